"""Chunks of OpenAI's API: `data:` events, each of which says something of one choice.

Nothing else is sent (no ids, no comments, no names of events): known clients fail at each of them.
What the API has no place for is in a chunk without choices. `sequence_number` is the index in the
stream of the last frame that a chunk shows, from which a client goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.responses import Response

from tailrace.edge.errors import openai_error, openai_fields
from tailrace.edge.generate.encoders import Encoder
from tailrace.edge.generate.routes import Collected
from tailrace.edge.openai.request import compact
from tailrace.edge.sse import short_token
from tailrace.edge.telemetry.request_metrics import note_error
from tailrace.ledger.errors import (
    CallerError,
    OriginUnreachable,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.frame import (
    LOGGED,
    FinishReason,
    Logged,
    Notice,
    Opened,
    Reasoning,
    Revision,
    Score,
    ScoredToken,
    StreamEnd,
    StreamError,
    Token,
    TokenScores,
    ToolCall,
    decode,
    tag_of,
    to_error,
)

DONE = b"data: [DONE]\n\n"
FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.FILTERED: "content_filter",
    FinishReason.TOOL_CALLS: "tool_calls",
}
"""In the API's words; every other end is an error there."""


def data_event(fields: object) -> bytes:
    """One event; JSON leaves no bare line break in it, so one line always does."""
    return b"data: %b\n\n" % compact(fields).encode()


def end_error(end: StreamEnd) -> TailraceError | None:
    """Return the error of a stream that failed, was lost or cancelled; None for any other end."""
    if end.finish_reason in FINISH:
        return None
    if end.finish_reason is FinishReason.CANCELLED:
        return TailraceError("the stream was cancelled", code="cancelled", status=409)
    message = end.message or f"the stream ended as {end.finish_reason.word}"
    if end.finish_reason is FinishReason.ORIGIN_LOST:
        return OriginUnreachable(message, code="origin_lost", retryable=end.retryable)
    if end.retryable:
        return Unavailable(message, code="failed")
    return CallerError(message, code="failed")  # the same request would fail again


def check_end(end: StreamEnd) -> StreamEnd:
    """The end as given; raises the error that it says."""
    error = end_error(end)
    if error is not None:
        note_error(error.code)
        raise error
    return end


class AnswerShape(Protocol):
    """How a dialect says things in one choice of an answer; `index` is the choice's.

    It has no words for what is None.
    """

    path: str
    """The path of the route."""
    prefix: str
    """Prefix of the id of an answer, such as `chatcmpl-`."""
    kind: str
    """The `object` of a chunk."""
    whole: str
    """The `object` of a whole answer."""

    def first(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        """Return what a choice begins with, if with anything. `calls`: no text comes first."""
        return None

    def text(
        self, index: int, text: str, scores: tuple[TokenScores, ...], offset: int = 0
    ) -> dict[str, Any]:
        """`offset` is the number of characters of the scored tokens before these."""

    def reasoning(self, index: int, text: str) -> dict[str, Any] | None:
        return None

    def call(self, index: int, piece: ToolCall) -> dict[str, Any] | None:
        return None

    def end(self, index: int, reason: str) -> dict[str, Any]: ...

    def choice(self, index: int, collected: Collected, reason: str | None) -> dict[str, Any]:
        """A choice of a whole answer."""


@dataclass(slots=True)
class ChunkEncoder(Encoder):
    """One choice of an answer that is streamed as chunks; the encoder of a response with one.

    `begun`: the client has the beginning. `usage` is asked for at the end, and with `continuous`
    in each chunk; `alone`: no other choice is in the response, which ends with this one.
    """

    shape: AnswerShape
    begun: bool = False
    usage: bool = False
    continuous: bool = False
    choice: int = 0
    alone: bool = True
    end: StreamEnd | None = None
    error: TailraceError | None = None
    _head: dict[str, Any] = field(default_factory=dict)
    _prompt_tokens: int = 0
    _scored_chars: int = 0
    _before: bytes = b""
    _behind: bytes = b""

    def opened(self, opened: Opened, head: dict[str, Any] | None = None) -> None:
        """`head` is that of the first choice, where this is a later one of the same answer."""
        self._prompt_tokens = opened.prompt_tokens
        self._head = head or chunk_head(self.shape, opened)
        # Around the text of a token: nearly all of the traffic is made of these.
        mark = "\ufdd0"
        usual = self._event(self.shape.text(self.choice, mark, ()), 0)
        before, _, behind = usual.partition(mark.encode())
        self._before = before
        self._behind = behind.removesuffix(b"0}\n\n")

    def refusal(self, error: TailraceError) -> Response:
        return openai_error(error, self.shape.path)

    def frames(self, frames: list[bytes]) -> bytes:
        said = b"".join([self._said(raw) for raw in frames])
        if self.begun:
            return said
        self.begun = True
        begins = next((tag for tag in map(tag_of, frames) if tag != Notice.tag), None)
        first = self.shape.first(self.choice, calls=begins == ToolCall.tag)
        return (b"" if first is None else self._chunk([first])) + said

    def sign_of_life(self) -> bytes:
        """A chunk without choices, which every client takes and shows to nobody."""
        return self._chunk([])

    # ---- frames ----

    def _said(self, raw: bytes) -> bytes:
        token = None if self.continuous else short_token(raw)
        if token is None:
            return self._any(raw)
        text, index = token
        return b"%b%b%b%d}\n\n" % (self._before, text, self._behind, index)

    def _any(self, raw: bytes) -> bytes:
        tag = tag_of(raw)
        if tag in LOGGED:
            frame = decode(raw)[1]
            assert isinstance(frame, Logged)
            return self._logged(frame)
        if tag == StreamError.tag:
            error = decode(raw)[1]
            assert isinstance(error, StreamError)
            return self._failed(to_error(error))
        return self.ending(None) if self.alone else b""  # a Status: nothing is left

    def _logged(self, frame: Logged) -> bytes:
        shape, choice = self.shape, self.choice
        said: dict[str, Any] | None = None
        match frame:
            case Token():
                said = shape.text(choice, frame.text, ())
            case ScoredToken():
                said = shape.text(choice, frame.text, frame.scores, self._scored_chars)
                self._scored_chars += sum(len(text_of(each.chosen)) for each in frame.scores)
            case Revision() if frame.final:
                # Only final revisions are sent, because a chunk cannot be taken back.
                said = shape.text(choice, frame.text, ())
            case Reasoning():
                said = shape.reasoning(choice, frame.text)
            case ToolCall():
                said = shape.call(choice, frame)
            case Notice():
                notice = {"code": frame.code, "message": frame.message}
                return self._chunk([], frame.index, notice=notice)
            case StreamEnd():
                return self._ended(frame)
        return b"" if said is None else self._event(said, frame.index)

    def _ended(self, end: StreamEnd) -> bytes:
        self.end = end
        error = end_error(end)
        if error is not None:
            return self._failed(error)
        said = self.shape.end(self.choice, FINISH[end.finish_reason])
        if not self.alone:
            return self._event(said, None)
        # With usage, only the next event has an id, so that a client cut off before it gets it.
        return self._event(said, None if self.usage else end.index) + self.ending(
            usage([end]) if self.usage else None, end.index
        )

    def _failed(self, error: TailraceError) -> bytes:
        self.error = error
        return error_events(error) if self.alone else b""

    # ---- events ----

    def ending(self, used: dict[str, int] | None, index: int | None = None) -> bytes:
        """The last events of an answer."""
        if used is None:
            return DONE
        return self._chunk([], index, usage=used) + DONE

    def _event(self, choice: dict[str, Any], index: int | None) -> bytes:
        if not self.continuous:
            return self._chunk([choice], index)
        made = 0 if index is None else index + 1
        return self._chunk([choice], index, usage=counts(self._prompt_tokens, made))

    def _chunk(self, choices: list[Any], index: int | None = None, **more: Any) -> bytes:
        fields = self._head | {"choices": choices}
        if self.usage:
            fields["usage"] = None
        fields |= more
        if index is not None:
            fields["sequence_number"] = index
        return data_event(fields)


def chunk_head(shape: AnswerShape, opened: Opened) -> dict[str, Any]:
    """Return the fields that every chunk of an answer has."""
    return {
        "id": f"{shape.prefix}{opened.stream.hex()}",
        "object": shape.kind,
        "created": opened.created_ms // 1000,
        "model": opened.model,
    }


def text_of(score: Score) -> str:
    """Return a token's text; the bytes of a character may be those of several tokens."""
    return score.token.decode(errors="replace")


def scores_of(
    scores: Sequence[TokenScores], impossible: float | None = None
) -> list[dict[str, Any]]:
    """Each drawn token with the likeliest ones; JSON has no infinity for one that cannot be."""

    def told(score: Score) -> dict[str, Any]:
        return {
            "token": text_of(score),
            "logprob": score.logprob if math.isfinite(score.logprob) else impossible,
            "bytes": list(score.token),
        }

    return [told(each.chosen) | {"top_logprobs": [*map(told, each.top)]} for each in scores]


def error_events(error: TailraceError) -> bytes:
    """Return the last events of a stream that fails: the error and `[DONE]`."""
    return data_event({"error": openai_fields(error)}) + DONE


def usage(ends: Sequence[StreamEnd], prompts: int = 1) -> dict[str, int]:
    """Return the usage of the streams of `prompts` prompts, which are ordered by prompt."""
    each = max(1, len(ends) // prompts)
    prompt = sum(end.prompt_tokens for end in ends[::each])
    return counts(prompt, sum(end.total_tokens for end in ends))


def counts(prompt: int, made: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }
