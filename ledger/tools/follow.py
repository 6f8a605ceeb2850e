"""A stream as it grows, read from where the ledger lies while its owner writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from ledger.frame import Tag, tag_of
from ledger.interface import Record
from ledger.tools.reader import reading

POLL_S = 0.1
"""Between two looks into the ledger; another process cannot be woken by its owner."""
RECORDS_AT_ONCE = 4_096
"""Records that are in memory at a time."""


def follow(
    place: Path | str,
    stream: bytes,
    start: int,
    *,
    live: bool = True,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[int, Record]]:
    """(index, record) from `start` on; with `live` until the StreamEnd, however long."""
    at = start
    with reading(place) as reader:
        while True:
            row = reader.stream(stream)
            new = list(islice(reader.records(row, at), RECORDS_AT_ONCE))
            reader.release()  # the moment must not outlive a slow reader
            yield from new
            if new:
                at = new[-1][0] + 1
                if tag_of(new[-1][1].frame) == Tag.STREAM_END:
                    return
            elif not live or row.ended:
                return
            else:
                pause(POLL_S)
