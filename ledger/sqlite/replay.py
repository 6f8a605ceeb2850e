"""What was released of a stream, from any index on: segments first, then the tail in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from tailrace.ledger.errors import Damaged, damaged_stream, unknown_stream
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite.encoding import (
    COLD_CODINGS,
    Unpacked,
    segment_frames,
    unpack_cold,
    unpack_segment,
)
from tailrace.ledger.sqlite.storage import SegmentRow, Storage
from tailrace.ledger.sqlite.tail import Tail

READ_SEGMENTS = 64
"""Segments fetched per storage read, at most;"""
FRAMES_PER_SEGMENT = 64
"""fewer where less is asked for, at so many frames each (short ones have about 220)."""
REMEMBERED = 8
"""Unpacked cold segments that are kept for the next read: each about 120 KB."""

T = TypeVar("T")


class Replay:
    """Reads for the ledger that owns the tails. Raises `Damaged` where a stream is not whole."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._unpacked: dict[tuple[int, int], Unpacked] = {}  # cold ones, by sid and first

    async def frames(self, tail: Tail, start: int, limit: int) -> list[bytes]:
        """At most `limit` released frames from index `start` on."""
        return await self._released(tail, start, limit, tail.take, self._frames_of)

    async def records(self, tail: Tail, start: int, limit: int) -> list[Record]:
        """Return the same frames with what lies beside them."""
        return await self._released(tail, start, limit, tail.records, self._records_of)

    async def _released(
        self,
        tail: Tail,
        start: int,
        limit: int,
        held: Callable[[int, int], list[T] | None],
        of_row: Callable[[Tail, SegmentRow, int], list[T]],
    ) -> list[T]:
        # Segments may be stored before what is in them is released.
        limit = min(limit, tail.released - start)
        out: list[T] = []
        while len(out) < limit:
            at, room = start + len(out), limit - len(out)
            found = held(at, room)
            if found is None:
                rows = await self._stored(tail, at, room)
                found = [each for row in rows for each in of_row(tail, row, at)]
            out += found or await self._missing(tail, at)
        return out[: max(0, limit)]

    async def _stored(self, tail: Tail, start: int, limit: int) -> list[SegmentRow]:
        """Consecutive segments, the first of which holds index `start`, with `limit` records."""
        most = min(READ_SEGMENTS, 2 + limit // FRAMES_PER_SEGMENT)
        try:
            found = await self._storage.segments(tail.sid, start, most)
        except Damaged as error:
            raise damaged_stream(tail.info.stream, f"index {start} on: {error.message}") from error
        rows, at = [], start
        for row in found:
            if not row.first <= at < row.first + row.length or at - start >= limit:
                break
            rows.append(row)
            at = row.first + row.length
        return rows

    def _frames_of(self, tail: Tail, row: SegmentRow, start: int) -> list[bytes]:
        """The frames of a segment from index `start` on."""
        where = _where(tail, row)
        if row.coding in COLD_CODINGS:
            frames = self._cold(row, where).frames
        else:
            frames = segment_frames(row.records, where=where)
        return frames[max(0, start - row.first) :]

    def _records_of(self, tail: Tail, row: SegmentRow, start: int) -> list[Record]:
        where = _where(tail, row)
        is_cold = row.coding in COLD_CODINGS
        unpacked = self._cold(row, where) if is_cold else unpack_segment(row, where=where)
        return unpacked.records()[max(0, start - row.first) :]

    def _cold(self, row: SegmentRow, where: str) -> Unpacked:
        key = row.sid, row.first
        found = self._unpacked.get(key)
        if found is None:
            found = self._unpacked[key] = unpack_cold(row, where=where)
            if len(self._unpacked) > REMEMBERED:
                del self._unpacked[next(iter(self._unpacked))]
        return found

    async def _missing(self, tail: Tail, at: int) -> NoReturn:
        stream = tail.info.stream
        if await self._storage.stream_by_id(stream) is None:
            raise unknown_stream(stream)
        raise damaged_stream(stream, f"index {at} is missing")


def _where(tail: Tail, row: SegmentRow) -> str:
    return f"stream {tail.info.stream.hex()}: segment at index {row.first}"
