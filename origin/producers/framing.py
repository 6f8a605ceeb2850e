"""A producer's outputs as frames with contiguous indexes, none larger than a frame may be.

A plain object. Every frame counts when the next is asked for, so that one which could not be
handed over leaves no gap.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from ledger import frame
from ledger.errors import FrameError, TailraceError
from ledger.frame import (
    MAX_FRAME_BYTES,
    Chunk,
    Classification,
    Embedding,
    Logged,
    Notice,
    ScoredToken,
    StreamEnd,
    Token,
    ToolCall,
    encode,
)
from origin.producer import Data, End, Label, Output, Reasoning, Remark, Revision, Text, Vector
from origin.tools import CallPiece

MAX_CHUNK_BYTES = 256 * 1024
"""Of a Chunk's data: a view that writes base64 stays under the frame limit too."""
MAX_TEXT_CHARS = MAX_CHUNK_BYTES // 4
"""Of one text frame; a character is at most 4 bytes of UTF-8."""
MAX_VECTOR_VALUES = MAX_CHUNK_BYTES // 4
"""Of one Embedding; more go out as Chunks."""
# The codec trusts its types, which a producer may not keep to: whatever it trips over is no frame.
_NO_FRAME = (FrameError, TypeError, ValueError, OverflowError, AttributeError, struct.error)


class Framing:
    """The frames of one stream; `next_index` is that of the next one."""

    def __init__(self, next_index: int = 0) -> None:
        self.next_index = next_index
        self._interim: int | None = None  # index of the first frame that may still be revised

    def encoded(self, output: Output) -> Iterator[bytes]:
        """The encoded frames of one output; TailraceError for what is no output."""
        frames = self._frames(output)
        while (raw := _encoded(output, frames)) is not None:
            yield raw
            self.next_index += 1

    def _frames(self, output: Output) -> Iterator[Logged]:
        match output:
            case Text():
                self._interim = None
                yield from self._text(output)
            case CallPiece():
                yield from self._call(output)
            case Reasoning():
                for text in _pieces(output.text):
                    yield frame.Reasoning(text, self.next_index)
            case Revision():
                yield from self._revisions(output)
            case Data():
                yield from self._chunks(output.data)
            case Vector():
                yield from self._vector(output.values)
            case Label():
                yield Classification(output.name, output.confidence, self.next_index)
            case Remark():
                yield Notice(output.code, output.message, self.next_index)
            case End():
                yield self._end(output)
            case _:
                raise bad_output(f"{type(output).__name__} is no output")

    def _text(self, output: Text) -> Iterator[Logged]:
        scores = output.scores
        for text in _pieces(output.text):
            if output.scores:
                yield ScoredToken(text, scores, self.next_index)
                scores = ()
            else:
                yield Token(text, self.next_index)

    def _call(self, piece: CallPiece) -> Iterator[Logged]:
        """Its id and name are in the first frame."""
        id_, name = piece.id, piece.name
        for arguments in _pieces(piece.arguments) or [""]:
            yield ToolCall(piece.call, id_, name, arguments, self.next_index)
            id_ = name = ""

    def _revisions(self, revision: Revision) -> Iterator[Logged]:
        """One frame, or several where the text is long: those after the first replace nothing."""
        first = self.next_index
        for text in _pieces(revision.text) or [""]:
            at = self.next_index
            replaces = self._interim if at == first and self._interim is not None else at
            yield frame.Revision(replaces, text, revision.final, at)
        if revision.final:
            self._interim = None
        elif self._interim is None:
            self._interim = first

    def _chunks(self, data: bytes) -> Iterator[Logged]:
        if not isinstance(data, bytes):
            raise bad_output(f"Data of {type(data).__name__}, not bytes")
        starts = range(0, max(len(data), 1), MAX_CHUNK_BYTES)
        for start in starts:
            piece = data[start : start + MAX_CHUNK_BYTES]
            yield Chunk(piece, start == starts[-1], self.next_index)

    def _vector(self, values: tuple[float, ...]) -> Iterator[Logged]:
        if not all(math.isfinite(value) for value in values):
            raise bad_output("a Vector with NaN or infinity")
        if len(values) <= MAX_VECTOR_VALUES:
            yield Embedding(values, self.next_index)
        else:
            yield from self._chunks(struct.pack(f"<{len(values)}f", *values))

    def _end(self, end: End) -> StreamEnd:
        return StreamEnd(
            total_tokens=end.total_tokens,
            finish_reason=end.reason,
            index=self.next_index,
            prompt_tokens=end.prompt_tokens,
            message=end.message,
            retryable=end.retryable,
        )


def bad_output(what: str) -> TailraceError:
    return TailraceError(f"the producer gave what cannot be sent: {what}", code="bad_output")


def _pieces(text: str) -> list[str]:
    if not isinstance(text, str):
        raise bad_output(f"text of {type(text).__name__}, not str")
    return [text[at : at + MAX_TEXT_CHARS] for at in range(0, len(text), MAX_TEXT_CHARS)]


def _encoded(output: Output, frames: Iterator[Logged]) -> bytes | None:
    """The next of these frames, whole; TailraceError where a value is outside its type."""
    try:
        logged = next(frames, None)
        raw = None if logged is None else encode(logged)
    except _NO_FRAME as error:
        raise bad_output(f"a {type(output).__name__} with a wrong value") from error
    if raw is not None and len(raw) > MAX_FRAME_BYTES:
        raise bad_output(f"a {type(output).__name__} of {len(raw)} bytes")
    return raw
