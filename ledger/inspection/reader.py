"""A read-only view of a ledger while origins write it.

The commands of `tailrace ledger` use it. Everything is read from one snapshot (a read
transaction) until `release`; the origins continue to write. While a snapshot is open, the ledger
grows: a SQLite file keeps all later writes in its WAL, and PostgreSQL keeps deleted rows. So
streams are read in pieces, and the snapshot is released before a piece is given to its consumer,
who may be slow.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from tailrace.ledger.errors import Damaged, NotFound
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite.storage import StreamRow
from tailrace.ledger.usage import Usage, UsageQuery, UsageSums

STREAMS_AT_ONCE = 1_000
"""Maximum rows of streams in memory."""
PIECE_RECORDS = 4_096
"""Maximum records of a stream that are in memory at a time."""
PIECE_BYTES = 4 * 1024 * 1024
"""Bytes of frames at which a piece ends, even if it has fewer than PIECE_RECORDS records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """Figures that every kind of ledger has. `ledger` is its path or URL, without secrets."""

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
    """A snapshot of a ledger; create it with `ledger.inspection.commands.reading`.

    Methods raise `Damaged` if stored data is corrupt, and `LedgerFailed` if the storage can no
    longer be reached.
    """

    async def status(self) -> LedgerStatus: ...

    async def ledger_bytes(self) -> int:
        """Return the bytes that the ledger takes in its storage."""

    async def expired(self, now_ms: int) -> int:
        """Return the number of streams that have expired at `now_ms` (Unix time)."""

    def streams(self) -> AsyncIterator[StreamRow]:
        """Yield every stream, ordered by the hour of its creation."""

    async def stream(self, stream: bytes) -> StreamRow:
        """Return a stream.

        Raises:
            NotFound: There is no such stream.
        """

    async def usage(self, query: UsageQuery) -> UsageSums:
        """Return sums of the usage of generations that have ended, as `Ledger.usage` does."""

    async def usage_row(self, stream: bytes) -> Usage | None:
        """Return the stored usage of a stream; None if no usage is stored (yet)."""

    async def stored(self, row: StreamRow) -> dict[str, int]:
        """Return figures of a stream's storage, such as `stored_bytes` of its frames and ids."""

    def records(self, row: StreamRow, start: int = 0) -> AsyncGenerator[tuple[int, Record], None]:
        """Yield (index, record) from index `start` on; raise `Damaged` at a damaged record."""

    def damage(self) -> AsyncIterator[str]:
        """Read the whole ledger; yield descriptions of damage that belongs to no stream."""

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
    """Consecutive records of one stream.

    `first` and `last` are True for the first and the last piece of the stream. `damage` is the
    error that ended the reading, if any. `row` is from the same snapshot as the records.
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

    Streams that the ledger removes in the meantime are left out.
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
            return  # the stream was removed in the meantime
        except Damaged as damage:
            piece.damage = damage
        at, last = at + len(piece.records), piece.last
        yield piece


async def fill(piece: StreamPiece, reader: LedgerReader, at: int) -> None:
    """Add the records from index `at` on to `piece`, until it is full.

    Raises:
        Damaged: A record is corrupt; the records before it have been added.
    """
    async with aclosing(reader.records(piece.row, at)) as records:
        async for index, record in records:
            piece.records.append((index, record))
            piece.bytes += len(record.frame)
            if piece.full:
                piece.last = False
                return
