"""The commands of `tailrace ledger`, as functions of a ledger or of one stream.

`summary` reads a whole stream. `follow` reads a stream while its origin still appends to it.
`json_lines` and `raw_frames` export streams. `verify` checks that every stream is contiguous, ended
once, and matches its checksums. `collect` removes expired streams, as a running origin does
regularly. `accept` accepts the loss of data after the file or its WAL was damaged.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailrace.ledger.errors import Damaged, FrameError
from tailrace.ledger.frame import Durability, Logged, StreamEnd, decode, tag_of
from tailrace.ledger.frame_json import frame_fields
from tailrace.ledger.inspection.reader import LedgerReader, StreamPiece, fill, pieces
from tailrace.ledger.interface import Ledger, Record, StreamKind
from tailrace.ledger.record_extra import RecordExtra, StreamLife
from tailrace.ledger.sqlite.disk.file_locks import existing, lock
from tailrace.ledger.sqlite.storage import StreamRow
from tailrace.ledger.stream_text import StreamText

TEXT_CHARS = 2_000
"""Maximum characters of a stream's text in `show`."""
POLL_S = 0.1
"""Seconds between two reads of `follow`, which gets no notification when the origin appends."""

Document = dict[str, Any]


@dataclass(slots=True)
class StreamSummary:
    """Summary of a stream's frames."""

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
        return f"ended: {self.end.finish_reason.word}"


async def summary(reader: LedgerReader, row: StreamRow) -> StreamSummary:
    """Read a whole stream.

    Raises:
        Damaged: The stream is damaged.
    """
    result, text = StreamSummary(), StreamText()
    async for _, record in reader.records(row):
        result.frames += 1
        result.tokens += len(record.ids)
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
    """Yield (index, record) from `start` on; with `live` wait until the StreamEnd."""
    at = start
    async with reading(place) as reader:
        while True:
            piece = StreamPiece(await reader.stream(stream), first=at == 0)
            await fill(piece, reader, at)
            await reader.release()  # a snapshot kept for a slow reader would make the WAL grow
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
    """Number of removed streams, and the ledger's size before and after."""

    removed_streams: int
    before_bytes: int
    after_bytes: int


async def collect(place: Path | str, open_ledger: Callable[[], Awaitable[Ledger]]) -> Reclaimed:
    """Remove expired streams from the ledger at `place`, which `open_ledger` opens.

    Raises:
        ConfigError: There is no ledger, or another process owns the file.
    """
    before = await _bytes(place)  # raises if there is no ledger, which open_ledger would create
    ledger = await open_ledger()
    try:
        removed = await ledger.expire()
    finally:
        await ledger.close()
    return Reclaimed(removed, before, await _bytes(place))


async def _bytes(place: Path | str) -> int:
    # A file is not opened by `reading`, because a process that opens it to write may not also have
    # it open to read.
    if isinstance(place, Path):
        return existing(place).stat().st_size
    async with reading(place) as reader:
        return await reader.ledger_bytes()


def accept(path: Path) -> None:
    """Accept the file at `path` as complete, although acknowledged data is missing.

    Raises:
        ConfigError: There is no ledger, or an origin owns it.
    """
    of_file, of_lock = lock(Path(os.path.realpath(existing(path))))
    try:
        os.ftruncate(of_lock, 0)
    finally:
        os.close(of_lock)
        os.close(of_file)


def reading(place: Path | str) -> AbstractAsyncContextManager[LedgerReader]:
    """Open a snapshot of the ledger in a file, or in the database of a URL.

    Raises:
        ConfigError: There is no ledger.
        LedgerFailed: The server is away.
    """
    # Imported here, because the driver for PostgreSQL is an extra.
    if isinstance(place, Path):
        from tailrace.ledger.inspection.sqlite_reader import reading_file

        return reading_file(place)
    from tailrace.ledger.inspection.postgres_reader import reading_database

    return reading_database(place)


# ---- for other programs ----


def stream_document(row: StreamRow) -> Document:
    """Return a stream's data besides its frames."""
    return {
        "stream": row.id.hex(),
        "kind": StreamKind(row.kind).name.lower(),
        "epoch": row.epoch,
        "durability": Durability(row.durability).word,
        "created_ms": row.created_ms,
        "ttl_ms": row.ttl_ms,
        "recipe": _recipe(row.recipe),
    }


def frame_document(record: Record) -> Document:
    """Return a record with its token ids, which clients never see."""
    _, frame = decode(record.frame)
    document = {"type": type(frame).__name__, **frame_fields(frame), "ids": list(record.ids)}
    extra, life = RecordExtra.of(record), StreamLife.of(record)
    if extra.steered:
        document["steered"] = [[span.start, span.count] for span in extra.steered]
    if extra.engine is not None:
        document["engine"] = extra.engine
    return document if life is None else document | {"life": life._asdict()}


async def json_lines(reader: LedgerReader, rows: AsyncIterable[StreamRow]) -> AsyncIterator[str]:
    """Yield a line for each stream, then one for each of its records."""
    async for piece in pieces(reader, rows):
        if piece.first:
            yield json.dumps(stream_document(piece.row), ensure_ascii=False)
        for record in _records(piece):
            line = {"stream": piece.row.id.hex(), **frame_document(record)}
            yield json.dumps(line, ensure_ascii=False)


async def raw_frames(reader: LedgerReader, rows: AsyncIterable[StreamRow]) -> AsyncIterator[bytes]:
    """Yield the encoded frames of the streams, which readers split by the length in each header."""
    async for piece in pieces(reader, rows):
        for record in _records(piece):
            yield record.frame


def _records(piece: StreamPiece) -> Iterator[Record]:
    for _, record in piece.records:
        yield record
    if piece.damage is not None:
        raise piece.damage


def _recipe(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- verification ----


@dataclass(frozen=True, slots=True)
class Finding:
    """Damage that `verify` found; `stream` is the hex id of the stream, None if it is in none."""

    stream: str | None
    what: str


@dataclass(slots=True)
class Audit:
    """Result of a verification."""

    streams: int = 0
    frames: int = 0
    ended: int = 0
    tokens: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.findings


async def verify(
    reader: LedgerReader, progress: Callable[[int], None] = lambda _done: None
) -> Audit:
    """Check all stored data; call `progress` with the number of streams checked so far."""
    verdict = Audit(findings=[Finding(None, what) async for what in reader.damage()])
    await reader.release()
    stream = _Stream()
    try:
        async for piece in pieces(reader, reader.streams()):
            if piece.first:
                stream = _Stream()
            _check_piece(piece, stream, verdict)
            if piece.last:
                verdict.streams += 1
                verdict.ended += stream.ended_at is not None
                progress(verdict.streams)
    except Damaged as error:
        verdict.findings.append(Finding(None, error.message))
    return verdict


@dataclass(slots=True)
class _Stream:
    """The state of `verify` for the stream that it is checking."""

    ended_at: int | None = None
    broken: bool = False


def _check_piece(piece: StreamPiece, stream: _Stream, verdict: Audit) -> None:
    if stream.broken:
        return  # report only the first damage of a stream
    try:
        for index, record in piece.records:
            if stream.ended_at is not None:
                raise Damaged(f"index {index} follows the end at index {stream.ended_at}")
            _check_frame(record.frame, index)
            if tag_of(record.frame) == StreamEnd.tag:
                stream.ended_at = index
            verdict.frames += 1
            verdict.tokens += len(record.ids)
        if piece.damage is not None:
            raise piece.damage
        if piece.last and piece.row.ended and stream.ended_at is None:
            raise Damaged("the stream is marked as ended, but has no StreamEnd")
    except (Damaged, FrameError) as error:
        stream.broken = True
        name = piece.row.id.hex()
        verdict.findings.append(Finding(name, error.message.removeprefix(f"stream {name}: ")))


def _check_frame(raw: bytes, index: int) -> None:
    """Check that a frame is a canonical logged frame on channel 0 with the right index."""
    corr, frame = decode(raw)
    if not isinstance(frame, Logged):
        raise Damaged(f"index {index} holds a {type(frame).__name__}, which is never logged")
    if corr != 0 or frame.index != index:
        raise Damaged(f"index {index} holds a frame with corr {corr} and index {frame.index}")
