"""Streams as JSON lines or as raw frames, for other programs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ledger.frame import FinishReason, decode
from ledger.interface import Record
from ledger.life import StreamLife, tokens_of
from ledger.sqlite.storage import StreamRow
from ledger.tools.pieces import StreamPiece, pieces
from ledger.tools.reader import LedgerReader, durability_word, kind_word

Document = dict[str, Any]


def stream_document(row: StreamRow) -> Document:
    """What is known of a stream besides its frames."""
    return {
        "stream": row.id.hex(),
        "kind": kind_word(row),
        "epoch": row.epoch,
        "durability": durability_word(row),
        "created_ms": row.created_ms,
        "ttl_ms": row.ttl_ms,
        "recipe": _recipe(row.recipe),
    }


def frame_document(record: Record) -> Document:
    """One record, with the token ids that clients never see."""
    _, frame = decode(record.frame)
    document = {"type": type(frame).__name__, **_fields(frame), "ids": list(tokens_of(record))}
    life = StreamLife.of(record)
    return document if life is None else document | {"life": life._asdict()}


async def json_lines(reader: LedgerReader, rows: AsyncIterable[StreamRow]) -> AsyncIterator[str]:
    """For each stream a line of its own, then one for each record."""
    async for piece in pieces(reader, rows):
        if piece.first:
            yield json.dumps(stream_document(piece.row), ensure_ascii=False)
        for record in _records(piece):
            line = {"stream": piece.row.id.hex(), **frame_document(record)}
            yield json.dumps(line, ensure_ascii=False)


async def raw_frames(reader: LedgerReader, rows: AsyncIterable[StreamRow]) -> AsyncIterator[bytes]:
    """The wire frames of the streams, one after the other; they measure themselves."""
    async for piece in pieces(reader, rows):
        for record in _records(piece):
            yield record.frame


def _records(piece: StreamPiece) -> Iterator[Record]:
    for _, record in piece.records:
        yield record
    if piece.damage is not None:
        raise piece.damage


def _fields(struct: Any) -> Document:
    return {field.name: _plain(getattr(struct, field.name)) for field in fields(struct)}


def _plain(value: object) -> object:
    """A value of a frame as JSON has it."""
    if isinstance(value, FinishReason):
        return value.word
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _fields(value) if is_dataclass(value) else value


def _recipe(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
