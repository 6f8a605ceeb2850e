"""One request on its way through a producer: from outputs to frames, and how it ends.

Whatever the producer does, the stream gets contiguous frames and exactly one StreamEnd.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import replace

import structlog

from ledger.errors import TailraceError
from ledger.frame import FinishReason
from origin.filter import FilterFactory, FilterGate
from origin.producer import (
    End,
    Output,
    Producer,
    Reasoning,
    Remark,
    Request,
    Resumption,
    Revision,
    Text,
)
from origin.producers.framing import Framing, bad_output

MAX_MESSAGE_CHARS = 500
"""Of an error's text that goes into a stream."""
OVERRULED = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends that the filter's word on the last text replaces; of the others it changes nothing."""
INEXACT = Remark(
    "inexact",
    "the text goes on from what was delivered; an uninterrupted run might have said something else",
)
"""Precedes the first output of a continuation that is not exact."""

log = structlog.get_logger("producer")

Numbered = tuple[int, bytes]
"""A frame's index, and the frame, encoded."""


class Production:
    """The frames of one stream from `request.next_index` on; logs call it by its `run`."""

    def __init__(
        self,
        producer: Producer,
        request: Request,
        run: int,
        filter_factory: FilterFactory | None = None,
    ) -> None:
        self._producer = producer
        self._request = request
        self._run = run
        self._resumption = producer.about.resumption
        self._is_changed = producer.about.fingerprint != request.recipe.fingerprint
        # One that repeats itself counts from 0 again; what is logged already is not sent again.
        self._repeats = self._resumption is Resumption.REPEATS and not self._is_changed
        self._framing = Framing(0 if self._repeats else request.next_index)
        self._filter = self._open_filter(filter_factory)
        self._ended = False

    async def frames(self) -> AsyncGenerator[Numbered, None]:
        """All frames, the last of them a StreamEnd; raises CancelledError and nothing else."""
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    for numbered in self._new_frames(output):
                        yield numbered
                    if self._ended:
                        return
        except TailraceError as error:
            end = self._failed(error)
        except Exception:  # whatever a foreign producer raises ends its stream, not its worker
            log.exception("producer.failed", run=self._run)
            end = End(FinishReason.FAILED, message="the producer failed; see the origin's log")
        if not self._ended:
            yield self.ending(end)

    def ending(self, end: End) -> Numbered:
        """The StreamEnd of a stream that its producer does not end itself."""
        self._ended = True
        index = max(self._framing.next_index, self._request.next_index)
        return index, next(Framing(index).encoded(end))

    async def _outputs(self) -> AsyncGenerator[Output, None]:
        """The recipe's own notices, which are a stream's first frames, and what is produced."""
        notices = [Remark(*notice) for notice in self._request.recipe.notices]
        logged = self._request.next_index
        for notice in notices if self._repeats else notices[logged:]:
            yield notice
        is_continued = logged > len(notices)
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
        return (output,) if self._filter is None else self._filter.passed(output)

    def _cannot_continue(self) -> str | None:
        """Why what was lost with its worker cannot be gone on with, if it cannot."""
        if self._resumption is Resumption.CONTINUES and self._request.calls:
            return "the worker was lost after a call of a tool, which cannot be gone on with"
        if self._resumption is Resumption.ENDS:
            return "the worker was lost, and what it was producing cannot be gone on with"
        if self._resumption is Resumption.REPEATS and self._is_changed:
            return "the producer changed since the stream began; it would not repeat itself"
        return None

    def _new_frames(self, output: Output) -> Iterator[Numbered]:
        """The frames of one output that the stream does not have yet."""
        framing, logged = self._framing, self._request.next_index
        if isinstance(output, End) and framing.next_index < logged:
            raise bad_output("fewer outputs than the first time")
        for raw in framing.encoded(output):
            if framing.next_index >= logged:
                yield framing.next_index, raw
        self._ended = isinstance(output, End)

    def _failed(self, error: TailraceError) -> End:
        cause = repr(error.__cause__) if error.__cause__ is not None else None
        log.warning("producer.refused", run=self._run, error=str(error), cause=cause)
        message = error.message[:MAX_MESSAGE_CHARS]
        return End(FinishReason.FAILED, message=message, retryable=error.retryable)


class TextFilter:
    """Outputs in, those that may be seen out.

    Nobody can judge text that may still change: of revisions only the final text is checked, and
    goes out. Reasoning, which nobody judges, does not; what is no text passes. `delivered` is the
    text that readers have already, in so many `pieces`; it is judged once more, as the filter's
    state follows from it.
    """

    def __init__(self, factory: FilterFactory, delivered: str = "", pieces: int = 0) -> None:
        self._gate = FilterGate(factory)
        self._known = len(delivered) - len(self._gate.feed(delivered))
        self._pieces = pieces

    @property
    def end(self) -> End | None:
        """The filter's own end of the stream, once it has come to one."""
        if self._gate.reason is None:
            return None
        return End(self._gate.reason, total_tokens=self._pieces, message=self._gate.message)

    def passed(self, output: Output) -> Iterator[Output]:
        """What comes out for one output; nothing follows an End."""
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
        """But for the characters that were held when the stream was cut, and are known."""
        known = min(self._known, len(text))
        self._known -= known
        if text[known:]:
            yield Text(text[known:])
