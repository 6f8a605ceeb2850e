"""A ledger seen from outside, read-only, beside the origins that write it.

What the tools of `tailrace ledger` are made of. Everything is read in one transaction, so
that it is the state of one moment, until that is released; the origins go on writing meanwhile.
A ledger that is read holds on to the moment that it is read of: a file keeps all that was
written since in its WAL, a database keeps what was deleted. So streams are read in pieces, each
whole in itself, and the moment is let go before anybody has one, who may be slow.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.ledger.errors import Damaged, NotFound
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite.storage import StreamRow

STREAMS_AT_ONCE = 1_000
"""Rows of streams that are in memory at a time."""
PIECE_RECORDS = 4_096
"""Records that are in memory at a time,"""
PIECE_BYTES = 4 * 1024 * 1024
"""or as many as have frames of so many bytes, if those are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """What every ledger can count. `ledger` says where it is, without secrets."""

    ledger: str
    streams: int
    unfinished: int
    ended: int
    object_streams: int
    objects: int
    alarms: int
    next_alarm_ms: int | None
    next_expiry_ms: int | None
    frames: int


def per_frame(size: int, frames: int) -> float | None:
    """Bytes for each frame; None where there is no frame."""
    return round(size / frames, 2) if frames else None


class LedgerReader(Protocol):
    """A ledger as it was at one moment. Make it with `reading`.

    Methods raise `Damaged` for what was stored and is not whole, `LedgerFailed` where the
    storage has gone away.
    """

    async def status(self) -> LedgerStatus: ...

    async def ledger_bytes(self) -> int:
        """What the ledger takes where it is stored."""

    async def expired(self, now_ms: int) -> int:
        """How many streams have outlived their retention at `now_ms` (Unix time)."""

    def streams(self) -> AsyncIterator[StreamRow]:
        """Every stream, those of an hour in the order of their creation."""

    async def stream(self, stream: bytes) -> StreamRow:
        """One stream; `NotFound` if there is none."""

    async def stored(self, row: StreamRow) -> dict[str, int]:
        """What one stream takes where it is stored: `stored_bytes` of frames and ids, and more."""

    def records(self, row: StreamRow, start: int = 0) -> AsyncGenerator[tuple[int, Record], None]:
        """(index, record) from `start` on; `Damaged` where the stream is not whole."""

    def damage(self) -> AsyncIterator[str]:
        """What is not whole and belongs to no stream, in words. Looks at everything."""

    async def release(self) -> None:
        """Let go of the moment: what is read next is of a later one."""


def parse_stream(text: str) -> bytes:
    """The id that somebody typed; `NotFound` for what cannot be one."""
    try:
        stream = bytes.fromhex(text)
    except ValueError:
        stream = b""
    if len(stream) != 16 or len(text) != 32:
        raise NotFound(
            f"{text!r} is not a stream id", code="unknown_stream", hint="it has 32 hex digits"
        )
    return stream


# ---- streams in pieces ----


@dataclass(slots=True)
class StreamPiece:
    """Records of one stream that follow one another; the first or the last ones, if it says so.

    `damage`: why there are no more. `row` is of the same moment.
    """

    row: StreamRow
    first: bool
    last: bool = True
    records: list[tuple[int, Record]] = field(default_factory=list)
    bytes: int = 0
    damage: Damaged | None = None

    @property
    def full(self) -> bool:
        return len(self.records) >= PIECE_RECORDS or self.bytes >= PIECE_BYTES


async def pieces(
    reader: LedgerReader, rows: AsyncIterable[StreamRow]
) -> AsyncIterator[StreamPiece]:
    """All records of these streams, but for what is removed meanwhile. Many short ones at once."""
    ready: list[StreamPiece] = []
    held = size = 0
    async for row in rows:
        async for piece in _of_one(reader, row):
            ready.append(piece)
            held, size = held + 1 + len(piece.records), size + piece.bytes
            if held >= PIECE_RECORDS or size >= PIECE_BYTES:
                await reader.release()
                for done in ready:
                    yield done
                ready, held, size = [], 0, 0
    await reader.release()
    for done in ready:
        yield done


async def _of_one(reader: LedgerReader, row: StreamRow) -> AsyncIterator[StreamPiece]:
    at, last = 0, False
    while not last:
        piece = StreamPiece(row, first=at == 0)
        try:
            piece.row = await reader.stream(row.id)
            await fill(piece, reader, at)
        except NotFound:
            return  # removed since
        except Damaged as damage:
            piece.damage = damage
        at, last = at + len(piece.records), piece.last
        yield piece


async def fill(piece: StreamPiece, reader: LedgerReader, at: int) -> None:
    """With the records from index `at` on; raises `Damaged` behind those that are whole."""
    async with aclosing(reader.records(piece.row, at)) as records:
        async for index, record in records:
            piece.records.append((index, record))
            piece.bytes += len(record.frame)
            if piece.full:
                piece.last = False
                return
