"""Decides which records of a stream store a time, and finds the frames since a given time.

A record stores the time at which it was given to the ledger only if the stream's last stored time
is TIME_STEP_MS old, because a time takes ten bytes and most records are a few bytes long. So each
frame was stored less than TIME_STEP_MS after the last stored time before it. The times of a stream
never decrease, even if it goes to an origin whose clock is behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.ledger.interface import Ledger, StreamInfo
from tailrace.ledger.record_extra import RecordExtra

TIME_STEP_MS = 1000
"""Minimum interval between two stored times of a stream, in ms: the resolution of `since`."""
SEARCH_RECORDS = 256
"""Maximum number of records that the search for a time reads at once."""


def time_to_store(last_ms: int, now_ms: int) -> int | None:
    """Return the time to store with a stream's next record, or None if it needs none.

    `last_ms` is the stream's last stored time, or 0.
    """
    return now_ms if now_ms - last_ms >= TIME_STEP_MS else None


@dataclass(frozen=True, slots=True)
class TimedFrame:
    """The index of a record that stores a time, and this time as Unix ms."""

    index: int
    at_ms: int


async def index_since(ledger: Ledger, info: StreamInfo, since_ms: int) -> int:
    """Return an index such that no frame before it was stored at or after `since_ms` (Unix ms).

    A reader that begins at this index misses no frame since that time, but may also get frames that
    were stored up to TIME_STEP_MS before it. The result is the stream's next index if all frames
    are older than `since_ms`. It is 0 if the records have no times, because an earlier version of
    this software wrote them.
    """
    before: TimedFrame | None = None  # the last known record whose time is at most `since_ms`
    beyond = info.next_index  # the first known index with a time after `since_ms`
    low, high = 0, info.next_index  # the range of records that is still searched
    while low < high:
        middle = (low + high) // 2 if high - low > SEARCH_RECORDS else low
        found = await _next_timed(ledger, info.stream, middle, high)
        if found is None:
            high = middle
        elif found.at_ms <= since_ms:
            before, low = found, found.index + 1
        else:
            beyond, high = found.index, middle
    if before is None:
        return 0
    return before.index if since_ms - before.at_ms < TIME_STEP_MS else beyond


async def _next_timed(ledger: Ledger, stream: bytes, start: int, end: int) -> TimedFrame | None:
    """Return the first record from `start` up to, not including, `end` that stores a time."""
    while start < end:
        records = await ledger.read(stream, start, min(SEARCH_RECORDS, end - start))
        if not records:
            return None  # the stream was deleted meanwhile
        for index, record in enumerate(records, start):
            at_ms = RecordExtra.of(record).at_ms
            if at_ms is not None:
                return TimedFrame(index, at_ms)
        start += len(records)
    return None
