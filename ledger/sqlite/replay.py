"""What was released of a stream, from any index on: segments first, then the tail in memory."""

from __future__ import annotations

from typing import NoReturn

from ledger.errors import Damaged, damaged_stream, unknown_stream
from ledger.interface import Record
from ledger.sqlite.cold_reader import SegmentReader
from ledger.sqlite.storage import SegmentRow, Storage
from ledger.sqlite.tail import Tail

READ_SEGMENTS = 64
"""Segments fetched per storage read, at most;"""
FRAMES_PER_SEGMENT = 64
"""fewer where less is asked for, at so many frames each (short ones have about 220)."""


class Replay:
    """Reads for the ledger that owns the tails. Raises `Damaged` where a stream is not whole."""

    def __init__(self, storage: Storage, segments: SegmentReader) -> None:
        self._storage = storage
        self._segments = segments

    async def frames(self, tail: Tail, start: int, limit: int) -> list[bytes]:
        """At most `limit` released frames from index `start` on."""
        # Segments may be stored before what is in them is released.
        limit = min(limit, tail.released - start)
        frames: list[bytes] = []
        while len(frames) < limit:
            at, room = start + len(frames), limit - len(frames)
            found = tail.take(at, room)
            if found is None:
                rows = await self._stored(tail, at, room)
                found = [frame for row in rows for frame in self._frames_of(tail, row, at)]
            frames += found or await self._missing(tail, at)
        return frames[: max(0, limit)]

    async def records(self, tail: Tail, start: int, limit: int) -> list[Record]:
        """The same with their ids."""
        limit = min(limit, tail.released - start)
        records: list[Record] = []
        while len(records) < limit:
            at, room = start + len(records), limit - len(records)
            found = tail.records(at, room)
            if found is None:
                rows = await self._stored(tail, at, room)
                found = [record for row in rows for record in self._records_of(tail, row, at)]
            records += found or await self._missing(tail, at)
        return records[: max(0, limit)]

    async def _stored(self, tail: Tail, start: int, limit: int) -> list[SegmentRow]:
        """Consecutive segments, the first of which holds index `start`, with `limit` records."""
        most = min(READ_SEGMENTS, 2 + limit // FRAMES_PER_SEGMENT)
        try:
            found = await self._storage.segments(tail.sid, start, most)
            await self._segments.load(row.coding for row in found)
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
        frames = self._segments.frames(row, where=_where(tail, row))
        return frames[max(0, start - row.first) :]

    def _records_of(self, tail: Tail, row: SegmentRow, start: int) -> list[Record]:
        unpacked = self._segments.unpack(row, where=_where(tail, row))
        return unpacked.records()[max(0, start - row.first) :]

    async def _missing(self, tail: Tail, at: int) -> NoReturn:
        stream = tail.info.stream
        if await self._storage.stream_by_id(stream) is None:
            raise unknown_stream(stream)
        raise damaged_stream(stream, f"index {at} is missing")


def _where(tail: Tail, row: SegmentRow) -> str:
    return f"stream {tail.info.stream.hex()}: segment at index {row.first}"
