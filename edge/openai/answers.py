"""Answers with choices as OpenAI's API has them: `data:` events, each a chunk, and whole documents.

Nothing else is on such a wire (no ids, no comments, no names of events): clients are known that
stumble over each of them. What the API has no place for rides in a chunk without choices.
`sequence_number` is the index in the stream of the last frame that a chunk has something of: where
to go on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge.access.middleware import caller_of
from edge.body import SILENCE_S, Encoder, StreamedBody, stream_body
from edge.errors import openai_error, openai_fields
from edge.generate import Collected, asked_to_read, collect, stream_headers
from edge.openai.request import StreamOptions, compact, flag, read_body
from edge.origins.link import Link, Reader, attended, link_of
from edge.parameters import read_body as whole_body
from edge.sse import short_token
from edge.telemetry.exchange import note_error
from ledger.errors import CallerError, OriginUnreachable, TailraceError, Unavailable
from ledger.frame import (
    CLOSING,
    LOGGED,
    Caller,
    FinishReason,
    Logged,
    Notice,
    Open,
    Opened,
    Reasoning,
    Resume,
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
from ledger.tasks import together

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
    """What an end says that is none of an answer: a failure, a loss, somebody's cancel."""
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
    """Of the route."""
    prefix: str
    """Of the id of an answer."""
    kind: str
    """The `object` of a chunk."""
    whole: str
    """The `object` of a whole answer."""

    def first(self, index: int) -> dict[str, Any] | None:
        """What a choice begins with, if with anything."""
        return None

    def text(self, index: int, text: str, scores: tuple[TokenScores, ...]) -> dict[str, Any]: ...

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
        first = self.shape.first(self.choice)
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
                said = shape.text(choice, frame.text, frame.scores)
            case Revision() if frame.final:
                # What may still change is not shown: nothing can be taken back here.
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
        # Who is cut off before the usage is to be told of it when it comes again.
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
        return self._chunk([choice], index, usage=_counts(self._prompt_tokens, made))

    def _chunk(self, choices: list[Any], index: int | None = None, **more: Any) -> bytes:
        fields = self._head | {"choices": choices}
        if self.usage:
            fields["usage"] = None
        fields |= more
        if index is not None:
            fields["sequence_number"] = index
        return data_event(fields)


def chunk_head(shape: AnswerShape, opened: Opened) -> dict[str, Any]:
    """What all chunks of an answer begin with."""
    return {
        "id": f"{shape.prefix}{opened.stream.hex()}",
        "object": shape.kind,
        "created": opened.created_ms // 1000,
        "model": opened.model,
    }


def scores_of(
    scores: Sequence[TokenScores], impossible: float | None = None
) -> list[dict[str, Any]]:
    """Each drawn token with the likeliest ones; JSON has no infinity for one that cannot be."""

    def told(score: Score) -> dict[str, Any]:
        return {
            "token": score.token.decode(errors="replace"),
            "logprob": score.logprob if math.isfinite(score.logprob) else impossible,
            "bytes": list(score.token),
        }

    return [told(each.chosen) | {"top_logprobs": [*map(told, each.top)]} for each in scores]


def error_events(error: TailraceError) -> bytes:
    """What a stream that breaks off ends with: never in silence."""
    return data_event({"error": openai_fields(error)}) + DONE


def usage(ends: Sequence[StreamEnd], prompts: int = 1) -> dict[str, int]:
    """What the streams of so many prompts have cost; those of one prompt lie side by side."""
    each = max(1, len(ends) // prompts)
    prompt = sum(end.prompt_tokens for end in ends[::each])
    return _counts(prompt, sum(end.total_tokens for end in ends))


def _counts(prompt: int, made: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route."""

    body: type[Any]
    """Of pydantic's models, `StreamedSettings` with `opens`."""
    example: str
    shape: AnswerShape

    @property
    def path(self) -> str:
        return self.shape.path

    def encoder(self, options: StreamOptions | None, *, resumes: bool = False) -> ChunkEncoder:
        options = options or StreamOptions()
        return ChunkEncoder(
            self.shape,
            begun=resumes,
            usage=bool(options.include_usage),
            continuous=bool(options.include_usage and options.continuous_usage_stats),
        )

    def resume(
        self,
        name: str,
        query: Iterable[tuple[str, str]],
        token: str | None,
        caller: Caller | None,
    ) -> tuple[Resume, ChunkEncoder | None]:
        """What a GET asks for, and how it is shown if it is to be a stream."""
        said: dict[str, str] = {}
        for key, value in query:
            said.setdefault(key, value)
        after: Sequence[str] = [said["starting_after"]] if "starting_after" in said else []
        try:
            resume = asked_to_read(
                name.removeprefix(self.shape.prefix),
                after,
                None,
                token or said.get("token"),
                caller,
            )
        except CallerError as error:
            error.field = "starting_after" if error.field == "after" else error.field
            raise
        options = StreamOptions(
            include_usage=flag(said, "include_usage"),
            continuous_usage_stats=flag(said, "continuous_usage_stats"),
        )
        encoder = self.encoder(options, resumes=resume.after is not None)
        return resume, encoder if flag(said, "stream") else None


def routes_of(dialect: Dialect) -> list[Route]:
    return [
        Route(dialect.path, partial(_start, dialect), methods=["POST"]),
        Route(f"{dialect.path}/{{id}}", partial(_read, dialect), methods=["GET"]),
    ]


@dataclass(frozen=True, slots=True)
class Choice:
    """One stream of an answer."""

    reader: Reader
    opened: Opened


async def _start(dialect: Dialect, request: Request) -> Response:
    body = await whole_body(request)
    parsed, headers = read_body(dialect.body, body, dialect.example)
    opens = parsed.opens(request.headers.get("Idempotency-Key"), caller_of(request))
    with ExitStack() as unless_handed_on:
        work = _choices(link_of(request), opens, unless_handed_on)
        choices = await attended(request.receive, work)
        headers |= stream_headers(choices[0].opened)
        if not parsed.stream:
            return await attended(request.receive, _whole(dialect, choices, len(opens), headers))
        options = parsed.stream_options or StreamOptions()
        if len(choices) == 1:
            encoder = dialect.encoder(options)
            encoder.opened(choices[0].opened)
            return stream_body(unless_handed_on, choices[0].reader, encoder, headers)
        pieces = _merged(dialect, choices, len(opens), include_usage=bool(options.include_usage))
        headers["Content-Type"] = ChunkEncoder.media_type
        return StreamedBody(unless_handed_on.pop_all().close, pieces, headers=headers)


async def _read(dialect: Dialect, request: Request) -> Response:
    """What a stream has come to, or all that follows where the client is."""
    token = request.headers.get("Tailrace-Token")
    resume, encoder = dialect.resume(
        request.path_params["id"], request.query_params.multi_items(), token, caller_of(request)
    )
    with ExitStack() as unless_handed_on:
        reader = unless_handed_on.enter_context(closing(Reader(link_of(request))))
        work = reader.open(replace(resume, follow=encoder is not None))
        choice = Choice(reader, await attended(request.receive, work))
        headers = stream_headers(choice.opened)
        if encoder is None:
            return await attended(request.receive, _whole(dialect, [choice], 1, headers))
        encoder.opened(choice.opened)
        return stream_body(unless_handed_on, reader, encoder, headers)


async def _choices(link: Link, opens: Sequence[Open], opened: ExitStack) -> list[Choice]:
    """All streams of a request, in the order of its prompts; `opened` closes them."""

    async def ask(wanted: Open | Resume) -> Choice:
        reader = opened.enter_context(closing(Reader(link)))
        return Choice(reader, await reader.open(wanted))

    choices: list[Choice] = []
    for wanted in opens:
        first = await ask(wanted)
        choices.append(first)
        for sibling in first.opened.siblings:
            token = sibling.token or None
            choices.append(await ask(Resume(sibling.stream, token=token, caller=wanted.caller)))
    return choices


async def _whole(
    dialect: Dialect, choices: Sequence[Choice], prompts: int, headers: Mapping[str, str]
) -> Response:
    """The answer as one document, when all of it is there."""
    try:
        collected = await together(*(collect(choice.reader) for choice in choices))
        closings = (each.closing for each in collected)
        ends = [check_end(each) for each in closings if isinstance(each, StreamEnd)]
    except TailraceError as error:
        refused = openai_error(error)
        refused.headers.update(headers)  # what there is of it can be read
        return refused
    shape, head = dialect.shape, chunk_head(dialect.shape, choices[0].opened)
    document = head | {
        "object": shape.whole,
        "choices": [
            shape.choice(index, each, _reason(each)) for index, each in enumerate(collected)
        ],
        "usage": usage(ends, prompts),
    }
    return JSONResponse(document, headers=headers)


def _reason(collected: Collected) -> str | None:
    """None for a stream that goes on."""
    end = collected.closing
    return FINISH[end.finish_reason] if isinstance(end, StreamEnd) else None


async def _merged(
    dialect: Dialect, choices: Sequence[Choice], prompts: int, *, include_usage: bool
) -> AsyncGenerator[bytes]:
    """The chunks of several streams as they come, in one response, which all of them end."""
    head = chunk_head(dialect.shape, choices[0].opened)
    encoders = [
        ChunkEncoder(dialect.shape, usage=include_usage, choice=nth, alone=False)
        for nth in range(len(choices))
    ]
    taking: dict[asyncio.Task[list[bytes]], int] = {}

    def take(nth: int) -> None:
        taking[asyncio.create_task(choices[nth].reader.take(SILENCE_S))] = nth

    for nth, choice in enumerate(choices):
        encoders[nth].opened(choice.opened, head)
        take(nth)
    try:
        while taking:
            done, _ = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                nth = taking.pop(task)
                encoder, frames = encoders[nth], task.result()
                if not frames:
                    yield encoder.sign_of_life()
                else:
                    yield encoder.frames(frames)
                if encoder.error is not None:
                    yield error_events(encoder.error)
                    return
                if not frames or tag_of(frames[-1]) not in CLOSING:
                    take(nth)
        ends = [encoder.end for encoder in encoders if encoder.end is not None]
        yield encoders[0].ending(usage(ends, prompts) if include_usage else None)
    finally:
        for task in taking:
            task.cancel()
