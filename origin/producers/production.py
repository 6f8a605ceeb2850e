"""Turns the outputs of a producer into the frames of one stream.

Whatever the producer does, the stream gets contiguous frames and exactly one StreamEnd.
"""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from tailrace.ledger import frame
from tailrace.ledger.errors import FrameError, TailraceError
from tailrace.ledger.frame import (
    MAX_FRAME_BYTES,
    Chunk,
    Classification,
    Embedding,
    FinishReason,
    Logged,
    Notice,
    ScoredToken,
    StreamEnd,
    Token,
    ToolCall,
    encode,
)
from tailrace.origin.filter import FilterFactory, FilterGate
from tailrace.origin.generations.stream_log import RETRIED
from tailrace.origin.producer import (
    Data,
    End,
    Label,
    Output,
    Producer,
    Reasoning,
    Remark,
    Request,
    Resumption,
    Revision,
    Text,
    Vector,
)
from tailrace.origin.tool_calls import CallPiece
from tailrace.origin.workers.worker_frame import NOT_COUNTED, TokenCounts

MAX_CHUNK_BYTES = 256 * 1024
"""Maximum bytes of a Chunk's data; as base64 it still fits a frame."""
MAX_TEXT_CHARS = MAX_CHUNK_BYTES // 4
"""Maximum characters per text frame; a character is at most 4 bytes of UTF-8."""
MAX_VECTOR_VALUES = MAX_CHUNK_BYTES // 4
"""Maximum values of one Embedding; longer vectors are sent as Chunks."""
# Errors that the codec raises for values of wrong types, because it does not check types.
_NO_FRAME = (FrameError, TypeError, ValueError, OverflowError, AttributeError, struct.error)

MAX_MESSAGE_CHARS = 500
"""Maximum characters of an error's message in a stream."""
OVERRULED = (FinishReason.STOP, FinishReason.LENGTH)
"""Finish reasons that a producer gives with its last text.

If the filter ends the stream at this text, the filter's reason replaces them.
"""
INEXACT = Remark(
    "inexact",
    "the text goes on from what was delivered; an uninterrupted run might have said something else",
)
"""Notice that precedes the first output of an inexact continuation."""
log = structlog.get_logger("producer")
Numbered = tuple[int, bytes]
"""A frame's index, and the encoded frame."""


class Framing:
    """Makes the frames of one stream: with contiguous indexes, none too large.

    `next_index` is the index of the next frame. It advances only when the frame after that is
    requested, so that a frame which could not be sent leaves no gap. The indexes `inserted` belong
    to frames that the origin has added to the log, and are skipped.
    """

    def __init__(self, next_index: int = 0, inserted: Sequence[int] = ()) -> None:
        self._inserted = inserted
        self.next_index = self._free(next_index)
        self._interim: int | None = None  # index of the first frame that may still be revised

    def encoded(self, output: Output) -> Iterator[bytes]:
        """Yield the encoded frames of one output. Raises TailraceError for an invalid output."""
        frames = self._frames(output)
        while (raw := _encoded(output, frames)) is not None:
            yield raw
            self.next_index = self._free(self.next_index + 1)

    def _free(self, index: int) -> int:
        """Return the first index from `index` on that no inserted frame has."""
        while index in self._inserted:
            index += 1
        return index

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
            case Remark(code=code) if code == RETRIED:
                raise bad_output(f"a Remark with the code {RETRIED!r}, which only the origin uses")
            case Remark():
                yield Notice(output.code, output.message, self.next_index)
            case End():
                yield self._end(output)
            case _:
                raise bad_output(f"{type(output).__name__} is not an output")

    def _text(self, output: Text) -> Iterator[Logged]:
        scores = output.scores
        for text in _pieces(output.text):
            if output.scores:
                yield ScoredToken(text, scores, self.next_index)
                scores = ()
            else:
                yield Token(text, self.next_index)

    def _call(self, piece: CallPiece) -> Iterator[Logged]:
        """Yield the frames of a piece of a tool call.

        Only the first frame has the call's id and the function's name.
        """
        id_, name = piece.id, piece.name
        for arguments in _pieces(piece.arguments) or [""]:
            yield ToolCall(piece.call, id_, name, arguments, self.next_index)
            id_ = name = ""

    def _revisions(self, revision: Revision) -> Iterator[Logged]:
        """Yield one frame, or several for long text; only the first replaces earlier text."""
        stability = 1.0 if revision.final else revision.stability
        if not (isinstance(stability, float | int) and 0 <= stability <= 1):
            raise bad_output(f"a Revision with the stability {stability!r}, not 0 to 1")
        first = self.next_index
        for text in _pieces(revision.text) or [""]:
            at = self.next_index
            replaces = self._interim if at == first and self._interim is not None else at
            yield frame.Revision(replaces, text, revision.final, at, stability)
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
    return TailraceError(f"the producer gave an invalid output: {what}", code="bad_output")


def _pieces(text: str) -> list[str]:
    if not isinstance(text, str):
        raise bad_output(f"text of {type(text).__name__}, not str")
    return [text[at : at + MAX_TEXT_CHARS] for at in range(0, len(text), MAX_TEXT_CHARS)]


def _encoded(output: Output, frames: Iterator[Logged]) -> bytes | None:
    """Return the next encoded frame. Raises TailraceError for a value outside its type."""
    try:
        logged = next(frames, None)
        raw = None if logged is None else encode(logged)
    except _NO_FRAME as error:
        raise bad_output(f"a {type(output).__name__} with a wrong value") from error
    if raw is not None and len(raw) > MAX_FRAME_BYTES:
        raise bad_output(f"a {type(output).__name__} of {len(raw)} bytes")
    return raw


class Production:
    """The frames of one stream, from `request.next_index` on; `run` is its id in logs.

    `inserted` are the indexes of frames that the origin has added since the producer began.
    `can_retry` is set with the StreamEnd: it is True if the stream has failed but another run can
    continue it, and no earlier run was such a retry.
    """

    def __init__(
        self,
        producer: Producer,
        request: Request,
        run: int,
        filter_factory: FilterFactory | None = None,
        inserted: Sequence[int] = (),
    ) -> None:
        self.can_retry = False
        self._inserted = inserted
        self._calls = request.calls
        self._producer = producer
        self._request = request
        self._run = run
        self._resumption = producer.about.resumption
        self._is_changed = producer.about.fingerprint != request.recipe.fingerprint
        # A producer that repeats its outputs starts at index 0 again; logged frames are skipped.
        self._repeats = self._resumption is Resumption.REPEATS and not self._is_changed
        self._framing = Framing(0 if self._repeats else request.next_index, inserted)
        self._note_repeats()
        self._filter = self._open_filter(filter_factory)
        self._ended = False
        self.counted = NOT_COUNTED
        """The token counts of the stream's End, once the producer has yielded it."""

    async def frames(self) -> AsyncGenerator[Numbered, None]:
        """Yield all frames, the last of them a StreamEnd; raises only CancelledError."""
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    for numbered in self._new_frames(output):
                        yield numbered
                    if self._ended:
                        return
        except TailraceError as error:
            end = self._failed(error)
        except Exception:  # an error of a custom producer must end its stream, not the worker
            log.exception("producer.failed", run=self._run)
            end = End(FinishReason.FAILED, message="the producer failed; see the origin's log")
        if not self._ended:
            yield self.ending(end)

    def ending(self, end: End) -> Numbered:
        """Return the StreamEnd of a stream that its producer did not end itself."""
        self._ended = True
        self.can_retry = self._may_retry(end)
        index = max(self._framing.next_index, self._request.next_index)
        return index, next(Framing(index).encoded(end))

    async def _outputs(self) -> AsyncGenerator[Output, None]:
        """Yield the recipe's notices, which come first in a stream, then the producer's outputs."""
        recipe, logged = self._request.recipe, self._request.next_index
        for told in recipe.first_notices(0 if self._repeats else logged):
            yield Remark(told.code, told.message)
        is_continued = self._is_begun(logged)
        if is_continued and (lost := self._cannot_continue()) is not None:
            yield End(FinishReason.ORIGIN_LOST, message=lost, retryable=True)
            return
        if self._filter is not None and self._filter.end is not None:
            yield self._filter.end
            return
        if is_continued and self._resumption is Resumption.CONTINUES:
            yield INEXACT
        async with aclosing(self._producer.produce(self._request)) as outputs:
            async for output in outputs:
                for passed in self._passed(output):
                    yield passed
        for passed in self._passed(End()):
            yield passed

    def _open_filter(self, factory: FilterFactory | None) -> TextFilter | None:
        if factory is None:
            return None
        delivered = self._request.delivered
        if self._resumption is Resumption.CONTINUES and delivered:
            return TextFilter(factory, delivered, self._request.next_index)
        return TextFilter(factory)

    def _passed(self, output: Output) -> Iterable[Output]:
        if self._filter is None or (isinstance(output, End) and self._may_retry(output)):
            # If another run will continue the stream, the text that the filter still holds back is
            # not sent here: that run produces this text and filters it again.
            return (output,)
        return self._filter.passed(output)

    def _is_begun(self, index: int) -> bool:
        """Return True if there is output before `index`, by the producer or a branch's parent."""
        request = self._request
        if request.delivered or request.calls:
            return True
        recipe = request.recipe
        return index > recipe.begin + len(recipe.notices) + len(self._inserted)

    def _may_retry(self, end: End) -> bool:
        """Return True if another run can continue after `end`, and no run has been retried yet."""
        if not end.retryable or self._inserted or self._producer.about.retries:
            return False
        index = max(self._framing.next_index, self._request.next_index)
        return not self._is_begun(index) or self._cannot_continue() is None

    def _cannot_continue(self) -> str | None:
        """Return why a stream cannot continue after its worker was lost; None if it can."""
        if self._resumption is Resumption.CONTINUES and self._calls:
            return "the worker was lost after a tool call, which cannot be continued"
        if self._resumption is Resumption.ENDS:
            return "the worker was lost, and its output cannot be continued"
        if self._resumption is Resumption.REPEATS and self._is_changed:
            return "the producer changed since the stream began; it would give other outputs"
        return None

    def _new_frames(self, output: Output) -> Iterator[Numbered]:
        """Yield those frames of an output that the stream does not have yet."""
        framing, logged = self._framing, self._request.next_index
        if isinstance(output, CallPiece):
            self._calls = max(self._calls, output.call + 1)
        if isinstance(output, End):
            self.can_retry = self._may_retry(output)
            if framing.next_index < logged:
                if not output.retryable:
                    raise bad_output("the producer gave fewer outputs than the first time")
                yield self.ending(output)
                return
            self.counted = TokenCounts(output.cached_tokens, output.reasoning_tokens)
        for raw in framing.encoded(output):
            if framing.next_index >= logged:
                yield framing.next_index, raw
        self._note_repeats()
        self._ended = isinstance(output, End)

    def _note_repeats(self) -> None:
        """Tell the producer if the stream has frames that it has not given yet."""
        request = self._request
        request.fate.is_repeating = self._framing.next_index < request.next_index

    def _failed(self, error: TailraceError) -> End:
        cause = repr(error.__cause__) if error.__cause__ is not None else None
        log.warning("producer.refused", run=self._run, error=str(error), cause=cause)
        message = error.message[:MAX_MESSAGE_CHARS]
        return End(FinishReason.FAILED, message=message, retryable=error.retryable)


class TextFilter:
    """Passes outputs through a filter.

    Text that may still change cannot be judged, so of revisions only the final text is checked and
    sent. Reasoning is not judged and not sent. All other outputs pass unchanged. `delivered` is the
    text that readers have, in `pieces` pieces; it is judged again to restore the filter's state.
    """

    def __init__(self, factory: FilterFactory, delivered: str = "", pieces: int = 0) -> None:
        self._gate = FilterGate(factory)
        self._known = len(delivered) - len(self._gate.feed(delivered))
        self._pieces = pieces

    @property
    def end(self) -> End | None:
        """The End of a stream that the filter has ended; None for any other stream."""
        if self._gate.reason is None:
            return None
        return End(self._gate.reason, total_tokens=self._pieces, message=self._gate.message)

    def passed(self, output: Output) -> Iterator[Output]:
        """Yield the outputs that may be sent after `output` was filtered; none follows an End."""
        match output:
            case Revision(final=False) | Reasoning():
                return
            case Text(text=str(text)) | Revision(text=str(text)):
                self._pieces += 1
                yield from self._text(self._gate.feed(text))
                if self.end is not None:
                    yield self.end
            case End():
                yield from self._text(self._gate.feed("", last=True))
                end = self.end
                if end is None or output.reason not in OVERRULED:
                    yield output
                else:
                    yield replace(output, reason=end.reason, message=end.message)
            case _:
                yield output

    def _text(self, text: str) -> Iterator[Text]:
        """Yield text, without the characters that readers had when the stream was interrupted."""
        known = min(self._known, len(text))
        self._known -= known
        if text[known:]:
            yield Text(text[known:])
