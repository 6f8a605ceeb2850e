"""What `tailrace ledger` does with a ledger or with one stream, one function for each command.

`summary` tells a stream from its beginning to its tip, and `follow` reads it as it grows, while
its owner writes. `collect` is retention by hand: what a running origin does by itself, now and
to its end. `accept` goes on with what is left where the file or its WAL was damaged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from ledger.frame import FinishReason, StreamEnd, decode, tag_of
from ledger.interface import Ledger, Record
from ledger.life import StreamLife, tokens_of
from ledger.sqlite.disk.opening import existing, lock
from ledger.sqlite.storage import StreamRow
from ledger.text import StreamText
from ledger.tools.pieces import StreamPiece, fill
from ledger.tools.reader import LedgerReader

TEXT_CHARS = 2_000
"""Characters of a stream's text that `show` gives."""

POLL_S = 0.1
"""Between two looks into the ledger; another process cannot be woken by its owner."""


@dataclass(slots=True)
class StreamSummary:
    """What a stream's frames tell."""

    frames: int = 0
    tokens: int = 0
    frame_bytes: int = 0
    text: str = ""
    end: StreamEnd | None = None
    life: StreamLife | None = None

    @property
    def state(self) -> str:
        if self.end is None:
            return "unfinished"
        return f"ended: {FinishReason(self.end.finish_reason).word}"


async def summary(reader: LedgerReader, row: StreamRow) -> StreamSummary:
    """Read it all; `Damaged` where it is not whole."""
    result, text = StreamSummary(), StreamText()
    async for _, record in reader.records(row):
        result.frames += 1
        result.tokens += len(tokens_of(record))
        result.frame_bytes += len(record.frame)
        _, frame = decode(record.frame)
        text.add(frame)
        if isinstance(frame, StreamEnd):
            result.end = frame
            result.life = StreamLife.of(record)
    result.text = text.text
    return result


async def follow(
    place: Path | str, stream: bytes, start: int, *, live: bool = True
) -> AsyncIterator[tuple[int, Record]]:
    """(index, record) from `start` on; with `live` until the StreamEnd, however long."""
    at = start
    async with reading(place) as reader:
        while True:
            piece = StreamPiece(await reader.stream(stream), first=at == 0)
            await fill(piece, reader, at)
            await reader.release()  # the moment must not outlive a slow reader
            for found in piece.records:
                yield found
            if piece.records:
                at, last = at + len(piece.records), piece.records[-1][1]
                if tag_of(last.frame) == StreamEnd.tag:
                    return
            elif not live or piece.row.ended:
                return
            else:
                await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What went, and what the ledger took before and takes now."""

    removed_streams: int
    before_bytes: int
    after_bytes: int


async def collect(place: Path | str, open_ledger: Callable[[], Awaitable[Ledger]]) -> Reclaimed:
    """Remove what has expired from the ledger at `place`, which `open_ledger` opens.

    Raises `ConfigError` where there is none, or while another process owns the file.
    """
    before = await _bytes(place)  # what is no ledger is refused, not made into one
    ledger = await open_ledger()
    try:
        removed = await ledger.expire()
    finally:
        await ledger.close()
    return Reclaimed(removed, before, await _bytes(place))


async def _bytes(place: Path | str) -> int:
    if isinstance(place, Path):  # who writes a file does not open it as a reader too
        return existing(place).stat().st_size
    async with reading(place) as reader:
        return await reader.ledger_bytes()


def accept(path: Path) -> None:
    """Let the file at `path` count for all that was ever acknowledged.

    `ConfigError` where there is none, or while an origin owns it.
    """
    of_file, of_lock = lock(Path(os.path.realpath(existing(path))))
    try:
        os.ftruncate(of_lock, 0)
    finally:
        os.close(of_lock)
        os.close(of_file)


def reading(place: Path | str) -> AbstractAsyncContextManager[LedgerReader]:
    """The ledger in a file, or in the database that a URL names, as it is at this moment.

    Raises `ConfigError` where there is none, `LedgerFailed` where the server is away.
    """
    # Imported here, because the driver for PostgreSQL is an extra.
    if isinstance(place, Path):
        from ledger.tools.sqlite_reader import reading_file

        return reading_file(place)
    from ledger.tools.postgres_reader import reading_database

    return reading_database(place)
