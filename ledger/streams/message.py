"""Messages as frames: each a run of Chunks, the last of which says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ledger.frame import Chunk, FinishReason, ScoredToken, StreamEnd, Token, decode, encode
from ledger.interface import Record

CHUNK_BYTES = 64 * 1024
"""Most data in one Chunk: a frame that is small enough to share a connection."""


class Piece(NamedTuple):
    """What a frame adds to the bytes of its stream; `last` if a message ends with it."""

    data: bytes
    last: bool


def chunks(messages: Iterable[bytes], index: int) -> list[Record]:
    """The records of these messages, none of them empty, from `index` on."""
    records: list[Record] = []
    for message in messages:
        for at in range(0, len(message), CHUNK_BYTES):
            data = message[at : at + CHUNK_BYTES]
            chunk = Chunk(data, at + CHUNK_BYTES >= len(message), index + len(records))
            records.append(Record(encode(chunk), ()))
    return records


def end(index: int) -> Record:
    """The record that closes a stream."""
    return Record(encode(StreamEnd(0, FinishReason.STOP, index, 0)), ())


def piece(raw: bytes) -> Piece:
    """What a logged frame adds: a Chunk its data, a Token its text, any other nothing."""
    _, frame = decode(raw)
    if isinstance(frame, Chunk):
        return Piece(frame.data, frame.last)
    return Piece(frame.text.encode() if isinstance(frame, Token | ScoredToken) else b"", True)


def renumbered(raw: bytes, index: int) -> bytes:
    """The same Chunk or StreamEnd at another index, for the readers of a fork."""
    _, frame = decode(raw)
    if isinstance(frame, Chunk):
        return encode(Chunk(frame.data, frame.last, index))
    assert isinstance(frame, StreamEnd)  # the streams of objects hold no other frame
    return encode(StreamEnd(frame.total_tokens, frame.finish_reason, index, frame.prompt_tokens))
