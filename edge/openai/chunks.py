"""Encodes streams as chunks of OpenAI's API: `data:` events, each about one choice.

The events have no id and no name, and no comments are sent, because some clients fail at each of
these. Content for which OpenAI has no field is sent in a chunk without choices. Each chunk has the
field `sequence_number`, the index of the last frame that it shows. To resume, a client sends it as
`starting_after`.
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
"""Maps reasons to OpenAI's `finish_reason`. OpenAI's API shows every other reason as an error."""


def data_event(fields: object) -> bytes:
    """Return an event with these fields as JSON, without id and name.

    JSON escapes line breaks, so the data fits into one line.
    """
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
    # A 4xx status, because a retry would fail again, and OpenAI's clients retry after a 5xx.
    return CallerError(message, code="failed")


def check_end(end: StreamEnd) -> StreamEnd:
    """Return the end of a stream; raise its error if it failed, was lost or cancelled."""
    error = end_error(end)
    if error is not None:
        note_error(error.code)
        raise error
    return end


class AnswerShape(Protocol):
    """Makes the JSON of one API for one choice of an answer; `index` is the index of the choice.

    A method returns None for content for which the API has no field.
    """

    path: str
    """The path of the route."""
    prefix: str
    """Prefix of the id of an answer, such as `chatcmpl-`."""
    kind: str
    """The value of the field `object` in a chunk."""
    whole: str
    """The value of the field `object` in a whole answer."""

    def first(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        """Return the choice's first chunk, or None if the API has none.

        `calls` is True if the choice begins with a tool call.
        """
        return None

    def text(
        self, index: int, text: str, scores: tuple[TokenScores, ...], offset: int = 0
    ) -> dict[str, Any]:
        """Return a choice with a piece of text and the scores of its tokens.

        `offset` is the number of characters of all scored tokens before this piece.
        """

    def reasoning(self, index: int, text: str) -> dict[str, Any] | None:
        """Return a choice with a piece of the model's reasoning."""
        return None

    def call(self, index: int, piece: ToolCall) -> dict[str, Any] | None:
        """Return a choice with a piece of a tool call."""
        return None

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """Return a choice that has ended for this reason."""

    def choice(self, index: int, collected: Collected, reason: str | None) -> dict[str, Any]:
        """Return a choice of a whole answer."""


@dataclass(slots=True)
class ChunkEncoder(Encoder):
    """Encodes one choice of an answer as chunks.

    Attributes:
        shape: Makes the JSON of the chunks.
        begun: True if the client already has the first chunk, because it resumes.
        usage: True if a chunk after the last choice has the token counts.
        continuous: True if every chunk has the token counts so far.
        choice: The index of this choice.
        alone: True if this is the only choice, so that its end ends the response.
        end: The stream's last frame, once it was encoded.
        error: The error that ended the stream, if there was one.
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
        """Note that the stream is open.

        `head` are the fields that all chunks have; by default they are made from `opened`. If an
        answer has several choices, `head` gives the fields of the first choice to the others.
        """
        self._prompt_tokens = opened.prompt_tokens
        self._head = head or chunk_head(self.shape, opened)
        # Nearly all chunks differ only in the text and the index, so the bytes around these are
        # encoded once.
        mark = "\ufdd0"
        usual = self._event(self.shape.text(self.choice, mark, ()), 0)
        before, _, behind = usual.partition(mark.encode())
        self._before = before
        self._behind = behind.removesuffix(b"0}\n\n")

    def refusal(self, error: TailraceError) -> Response:
        return openai_error(error, self.shape.path)

    def frames(self, frames: list[bytes]) -> bytes:
        """Return the encoded chunks; nothing if there are no frames yet.

        A choice cannot begin before its first frame, whose type decides how its first chunk looks.
        """
        if not frames:
            return b""
        said = b"".join([self._said(raw) for raw in frames])
        if self.begun:
            return said
        self.begun = True
        begins = next((tag for tag in map(tag_of, frames) if tag != Notice.tag), None)
        first = self.shape.first(self.choice, calls=begins == ToolCall.tag)
        return (b"" if first is None else self._chunk([first])) + said

    def keepalive(self) -> bytes:
        """Return a keepalive: a chunk without choices, which every client accepts and ignores."""
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
        # The frame is a Status: the stream has ended, and the client had every frame already.
        return self.ending(None) if self.alone else b""

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
                # Interim revisions are not sent, because a chunk cannot be withdrawn.
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
        # With usage, only the chunk with the token counts has the last index. So a client that lost
        # its connection before that chunk gets the chunk when it resumes.
        return self._event(said, None if self.usage else end.index) + self.ending(
            usage([end]) if self.usage else None, end.index
        )

    def _failed(self, error: TailraceError) -> bytes:
        self.error = error
        return error_events(error, self.shape.path) if self.alone else b""

    # ---- events ----

    def ending(self, used: dict[str, int] | None, index: int | None = None) -> bytes:
        """Return the last events of an answer: the token counts `used`, if given, and `[DONE]`."""
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
    """Return a token's text, with U+FFFD for the bytes of a character that spans several tokens."""
    return score.token.decode(errors="replace")


def scores_of(
    scores: Sequence[TokenScores], impossible: float | None = None
) -> list[dict[str, Any]]:
    """Return scores as JSON: each sampled token, with its most likely alternatives.

    `impossible` is sent in place of the logarithm of probability 0, because JSON has no infinity.
    """

    def told(score: Score) -> dict[str, Any]:
        return {
            "token": text_of(score),
            "logprob": score.logprob if math.isfinite(score.logprob) else impossible,
            "bytes": list(score.token),
        }

    return [told(each.chosen) | {"top_logprobs": [*map(told, each.top)]} for each in scores]


def error_events(error: TailraceError, path: str) -> bytes:
    """Return the last events of a stream that fails: the error and `[DONE]`.

    `path` is the path of the API, which decides the names of fields.
    """
    return data_event({"error": openai_fields(error, path)}) + DONE


def usage(ends: Sequence[StreamEnd], prompts: int = 1) -> dict[str, int]:
    """Return the sum of the token counts of all streams; each prompt counts once.

    `ends` are the last frames of all choices, ordered by prompt.
    """
    each = max(1, len(ends) // prompts)
    prompt = sum(end.prompt_tokens for end in ends[::each])
    return counts(prompt, sum(end.total_tokens for end in ends))


def counts(prompt: int, made: int) -> dict[str, int]:
    """Return the token counts as OpenAI's field `usage`."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }
