"""A stream as it grows, read from the ledger's file while its owner writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ledger.frame import Tag, tag_of
from ledger.interface import Record
from ledger.reader import reading

POLL_S = 0.1
"""Between two looks into the file; another process cannot be woken by its owner."""


def follow(
    path: Path,
    stream: bytes,
    start: int,
    *,
    live: bool = True,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[int, Record]]:
    """(index, record) from `start` on; with `live` until the StreamEnd, however long."""
    at = start
    while True:
        with reading(path) as reader:
            row = reader.stream(stream)
            logged = reader.log()
            # All of it is read before any is given: the snapshot must not outlive a slow reader.
            new = list(reader.records(row, logged, at))
        for index, record in new:
            at = index + 1
            yield index, record
        if not live or (new and tag_of(new[-1][1].frame) == Tag.STREAM_END):
            return
        if not new and row.ended:
            return
        pause(POLL_S)
