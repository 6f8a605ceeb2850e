"""The frames of a stream object: messages as Chunks, and the data that each frame adds.

A message is one or more consecutive Chunks, the last of which is marked as such.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tailrace.ledger.frame import Chunk, FinishReason, ScoredToken, StreamEnd, Token, decode, encode
from tailrace.ledger.interface import Record

CHUNK_BYTES = 64 * 1024
"""Maximum data bytes per Chunk: small, so that it does not delay other streams' frames on a
connection."""


class FramePiece(NamedTuple):
    """Bytes that a frame adds to its stream; `last` is True if the frame ends a message."""

    data: bytes
    last: bool


def chunks(messages: Iterable[bytes], index: int) -> list[Record]:
    """Return the records that store these messages, from `index` on; no message may be empty."""
    records: list[Record] = []
    for message in messages:
        for at in range(0, len(message), CHUNK_BYTES):
            data = message[at : at + CHUNK_BYTES]
            chunk = Chunk(data, at + CHUNK_BYTES >= len(message), index + len(records))
            records.append(Record(encode(chunk), ()))
    return records


def end(index: int) -> Record:
    return Record(encode(StreamEnd(0, FinishReason.STOP, index, 0)), ())


def piece(raw: bytes) -> FramePiece:
    """Return the bytes that a logged frame adds to its stream.

    These are the data of a Chunk or the text of a Token; other frames add nothing.
    """
    _, frame = decode(raw)
    if isinstance(frame, Chunk):
        return FramePiece(frame.data, frame.last)
    return FramePiece(frame.text.encode() if isinstance(frame, Token | ScoredToken) else b"", True)


def renumbered(raw: bytes, index: int) -> bytes:
    """Return the same Chunk or StreamEnd at another index, for readers of a fork."""
    _, frame = decode(raw)
    if isinstance(frame, Chunk):
        return encode(Chunk(frame.data, frame.last, index))
    assert isinstance(frame, StreamEnd)  # a stream of an object has only Chunks and a StreamEnd
    return encode(StreamEnd(frame.total_tokens, frame.finish_reason, index, frame.prompt_tokens))
