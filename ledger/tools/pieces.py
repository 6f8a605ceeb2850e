"""Streams in pieces, so that whoever takes them may be slow.

A ledger that is read holds on to the moment that it is read of: a file keeps all that was
written since in its WAL, a database keeps what was deleted. So a piece is read whole and the
moment let go before anybody has it. Each piece is whole in itself; the next is of a later moment.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from ledger.errors import Damaged, NotFound
from ledger.interface import Record
from ledger.sqlite.storage import StreamRow
from ledger.tools.reader import LedgerReader

PIECE_RECORDS = 4_096
"""Records that are in memory at a time,"""
PIECE_BYTES = 4 * 1024 * 1024
"""or as many as have frames of so many bytes, if those are fewer."""


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
