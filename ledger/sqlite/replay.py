"""Replay of released frames from any index on: segments first, then the tail in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from tailrace.ledger.branch import part_at
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
"""Maximum segments per storage read."""
FRAMES_PER_SEGMENT = 64
"""Assumed minimum number of frames in a segment, so that a short read fetches few segments.

Segments of tokens have about 220 frames.
"""
REMEMBERED = 8
"""Maximum decompressed cold segments in the cache; each has about 120 KB."""

T = TypeVar("T")


class Replay:
    """Reads streams from their tails and from storage; raises `Damaged` for a damaged stream."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        # Cache of decompressed cold segments, by sid and first index.
        self._unpacked: dict[tuple[int, int], Unpacked] = {}

    async def frames(self, tail: Tail, start: int, limit: int) -> list[bytes]:
        """Return at most `limit` released frames from index `start` on."""
        return await self._released(tail, start, limit, tail.take, self._frames_of)

    async def records(self, tail: Tail, start: int, limit: int) -> list[Record]:
        """Return at most `limit` released records from index `start` on."""
        return await self._released(tail, start, limit, tail.records, self._records_of)

    async def _released(
        self,
        tail: Tail,
        start: int,
        limit: int,
        held: Callable[[int, int], list[T] | None],
        of_row: Callable[[Tail, SegmentRow, int], list[T]],
    ) -> list[T]:
        # Never return more than the released records, because segments may have later ones, too.
        limit = min(limit, tail.released - start)
        out: list[T] = []
        while len(out) < limit:
            at, room = start + len(out), limit - len(out)
            found = held(at, room)
            if found is None:
                # Inherited records of a branch are in the segments of another stream.
                sid, room = part_at(tail.parts, tail.sid, at, room)
                rows = await self._stored(tail, sid, at, room)
                found = [each for row in rows for each in of_row(tail, row, at)][:room]
            out += found or await self._missing(tail, at)
        return out[: max(0, limit)]

    async def _stored(self, tail: Tail, sid: int, start: int, limit: int) -> list[SegmentRow]:
        """Return consecutive segments with about `limit` records; the first contains `start`.

        `sid` is the stream that stores these records: the tail's stream, or one that it branches.
        """
        most = min(READ_SEGMENTS, 2 + limit // FRAMES_PER_SEGMENT)
        try:
            found = await self._storage.segments(sid, start, most)
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
        """Return the frames of a segment from index `start` on."""
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
