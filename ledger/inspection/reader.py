"""A read-only view of a ledger while origins write it.

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
"""Maximum rows of streams in memory."""
PIECE_RECORDS = 4_096
"""Maximum records in memory."""
PIECE_BYTES = 4 * 1024 * 1024
"""Maximum bytes of frames in memory, if that is fewer records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """Figures of any ledger. `ledger` is its place, without secrets."""

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
    """Bytes per frame; None without frames."""
    return round(size / frames, 2) if frames else None


class LedgerReader(Protocol):
    """A ledger as it was at one moment. Make it with `reading`.

    Methods raise `Damaged` for what was stored and is not whole, `LedgerFailed` where the
    storage has gone away.
    """

    async def status(self) -> LedgerStatus: ...

    async def ledger_bytes(self) -> int:
        """Return the bytes that the ledger takes in its storage."""

    async def expired(self, now_ms: int) -> int:
        """Return the number of streams that have expired at `now_ms` (Unix time)."""

    def streams(self) -> AsyncIterator[StreamRow]:
        """Yield every stream; those of an hour are ordered by creation."""

    async def stream(self, stream: bytes) -> StreamRow:
        """Return a stream.

        Raises:
            NotFound: There is no such stream.
        """

    async def stored(self, row: StreamRow) -> dict[str, int]:
        """Return the storage of a stream: `stored_bytes` of frames and ids, and more."""

    def records(self, row: StreamRow, start: int = 0) -> AsyncGenerator[tuple[int, Record], None]:
        """Yield (index, record) from `start` on; raise `Damaged` at damage."""

    def damage(self) -> AsyncIterator[str]:
        """Yield descriptions of damage that belongs to no stream. Reads everything."""

    async def release(self) -> None:
        """Release the snapshot; later reads use a new one."""


def parse_stream(text: str) -> bytes:
    """Parse a stream id.

    Raises:
        NotFound: The text is not a stream id.
    """
    try:
        stream = bytes.fromhex(text)
    except ValueError:
        stream = b""
    if len(stream) != 16 or len(text) != 32:
        raise NotFound(
            f"{text!r} is not a stream id",
            code="unknown_stream",
            hint="a stream id has 32 hex digits",
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
    """Yield all records of these streams, many short streams at a time.

    Streams that are removed in the meantime are left out.
    """
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
            return  # removed in the meantime
        except Damaged as damage:
            piece.damage = damage
        at, last = at + len(piece.records), piece.last
        yield piece


async def fill(piece: StreamPiece, reader: LedgerReader, at: int) -> None:
    """Yield the records from index `at` on; raise `Damaged` after the undamaged ones."""
    async with aclosing(reader.records(piece.row, at)) as records:
        async for index, record in records:
            piece.records.append((index, record))
            piece.bytes += len(record.frame)
            if piece.full:
                piece.last = False
                return
