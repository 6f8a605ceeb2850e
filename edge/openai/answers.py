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

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.errors import openai_error, openai_fields
from tailrace.edge.generate.encoders import SILENCE_S, Encoder, stream_headers
from tailrace.edge.generate.params import read_body as whole_body
from tailrace.edge.generate.routes import MAX_DOCUMENT_BYTES, Collected, asked_to_read, collect
from tailrace.edge.openai.request import StreamOptions, compact, flag, read_body
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import Reader
from tailrace.edge.sse import short_token
from tailrace.edge.starlette_helpers import attended, link_of
from tailrace.edge.stream_answer import StreamAnswer
from tailrace.edge.streamed_body import StreamedBody
from tailrace.edge.telemetry.request_metrics import note_error
from tailrace.ledger.errors import (
    CallerError,
    OriginUnreachable,
    TailraceError,
    TooLarge,
    Unavailable,
)
from tailrace.ledger.frame import (
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
from tailrace.ledger.process.tasks import cancel, together

DONE = b"data: [DONE]\n\n"
PROMPTS_AT_A_TIME = 8
"""Prompts of one request that have streams under way, so that it leaves room for others."""
FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.FILTERED: "content_filter",
    FinishReason.TOOL_CALLS: "tool_calls",
}
"""In the API's words; every other end is an error there."""
CANCELLED = "cancelled"
"""A word of ours, in the document of a stream that was cancelled and is read later."""


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
    """The path of the route."""
    prefix: str
    """Of the id of an answer."""
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


class _Broken(Exception):
    """An answer that ended as an error; what there is of its stream can be read."""

    def __init__(self, error: TailraceError, opened: Opened) -> None:
        super().__init__(error)
        self.error = error
        self.opened = opened


async def _start(dialect: Dialect, request: Request) -> Response:
    body = await whole_body(request)
    parsed, headers = read_body(dialect.body, body, dialect.example)
    opens = parsed.opens(request.headers.get("Idempotency-Key"), caller_of(request))
    link = link_of(request)
    if not parsed.stream:
        return await attended(request.receive, _whole(dialect, link, opens, headers))
    options = parsed.stream_options or StreamOptions()
    if len(opens) == 1 and opens[0].n == 1:
        return StreamAnswer(opens[0], dialect.encoder(options), headers)
    with ExitStack() as unless_handed_on:
        first = _choices(link, opens[0], unless_handed_on)
        choices = await attended(request.receive, first)
        headers |= stream_headers(choices[0].opened)
        headers["Content-Type"] = ChunkEncoder.media_type
        opened = unless_handed_on.pop_all()
        pieces = _merged(dialect, link, opens, choices, opened, bool(options.include_usage))
        return StreamedBody(opened.close, pieces, headers=headers)


async def _read(dialect: Dialect, request: Request) -> Response:
    """What a stream has come to, or all that follows where the client is."""
    token = request.headers.get("Tailrace-Token")
    resume, encoder = dialect.resume(
        request.path_params["id"], request.query_params.multi_items(), token, caller_of(request)
    )
    if encoder is not None:
        return StreamAnswer(resume, encoder)
    with closing(Reader(link_of(request))) as reader:
        opened = await attended(request.receive, reader.open(replace(resume, follow=False)))
        headers = stream_headers(opened)
        collected = await attended(request.receive, collect(reader))
        end = collected.closing
        if isinstance(end, StreamEnd) and end.finish_reason is not FinishReason.CANCELLED:
            try:
                check_end(end)
            except TailraceError as error:
                return _refusal(dialect, _Broken(error, opened), headers)
        return _document(dialect, [(opened, collected)], 1, headers)


async def _choices(link: OriginPool, wanted: Open, opened: ExitStack) -> list[Choice]:
    """All streams of one prompt; `opened` closes them."""

    async def ask(asked: Open | Resume) -> Choice:
        reader = opened.enter_context(closing(Reader(link)))
        return Choice(reader, await reader.open(asked))

    choices = [await ask(wanted)]
    for sibling in choices[0].opened.siblings:
        token = sibling.token or None
        choices.append(await ask(Resume(sibling.stream, token=token, caller=wanted.caller)))
    return choices


Answered = tuple[Opened, Collected]


async def _whole(
    dialect: Dialect, link: OriginPool, opens: Sequence[Open], headers: Mapping[str, str]
) -> Response:
    """The answer as one document, when all of it is there; the first error ends it."""
    turns, chars = asyncio.Semaphore(PROMPTS_AT_A_TIME), 0

    async def answered(wanted: Open) -> list[Answered]:
        nonlocal chars
        async with turns:
            with ExitStack() as opened:
                choices = await _choices(link, wanted, opened)
                try:
                    collected = await together(*(collect(choice.reader) for choice in choices))
                    for each in collected:
                        if isinstance(each.closing, StreamEnd):
                            check_end(each.closing)
                        chars += len(each.text.text)
                    if chars > MAX_DOCUMENT_BYTES:
                        raise TooLarge(
                            f"the answers have over {MAX_DOCUMENT_BYTES} bytes",
                            hint="send fewer prompts, or set stream to true",
                        )
                except TailraceError as error:
                    raise _Broken(error, choices[0].opened) from error
        return [(choice.opened, each) for choice, each in zip(choices, collected, strict=True)]

    try:
        made = await together(*(answered(wanted) for wanted in opens))
    except _Broken as broken:
        return _refusal(dialect, broken, headers)
    answers = [each for group in made for each in group]
    return _document(dialect, answers, len(opens), {**headers, **stream_headers(answers[0][0])})


def _refusal(dialect: Dialect, broken: _Broken, headers: Mapping[str, str]) -> Response:
    refused = openai_error(broken.error, dialect.path)
    refused.headers.update({**headers, **stream_headers(broken.opened)})
    return refused


def _document(
    dialect: Dialect, answers: Sequence[Answered], prompts: int, headers: Mapping[str, str]
) -> Response:
    shape, head = dialect.shape, chunk_head(dialect.shape, answers[0][0])
    ends = [each.closing for _, each in answers if isinstance(each.closing, StreamEnd)]
    document = head | {
        "object": shape.whole,
        "choices": [
            shape.choice(index, each, _reason(each)) for index, (_, each) in enumerate(answers)
        ],
        "usage": usage(ends, prompts),
    }
    return JSONResponse(document, headers=headers)


def _reason(collected: Collected) -> str | None:
    """Return why a stream ended, or None for one that goes on.

    A cancelled one has no word of the API's: its text is all there, and ends where it was.
    """
    end = collected.closing
    return FINISH.get(end.finish_reason, CANCELLED) if isinstance(end, StreamEnd) else None


async def _relay(
    reader: Reader, encoder: ChunkEncoder, pieces: asyncio.Queue[bytes | None]
) -> None:
    """Put one stream's chunks into `pieces` until it ends; raises the error that ends it."""
    frames: list[bytes] = []
    while not frames or tag_of(frames[-1]) not in CLOSING:
        frames = await reader.take(SILENCE_S)
        await pieces.put(encoder.frames(frames) if frames else encoder.sign_of_life())
        if encoder.error is not None:
            raise encoder.error


async def _merged(
    dialect: Dialect,
    link: OriginPool,
    opens: Sequence[Open],
    first: Sequence[Choice],
    opened: ExitStack,
    include_usage: bool,
) -> AsyncGenerator[bytes]:
    """The chunks of several streams as they come, in one response, which all of them end.

    `first` are the choices of the first prompt. A few prompts have streams under way; when those of
    one have ended, the next prompt is sent. `opened` closes their readers.
    """
    head = chunk_head(dialect.shape, first[0].opened)
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue(1)  # None: all have ended
    ends: dict[int, StreamEnd] = {}
    prompts = iter(enumerate(opens))

    async def relay(index: int, choice: Choice) -> None:
        encoder = ChunkEncoder(dialect.shape, usage=include_usage, choice=index, alone=False)
        encoder.opened(choice.opened, head)
        await _relay(choice.reader, encoder, pieces)
        if encoder.end is not None:
            ends[index] = encoder.end

    async def relay_prompts() -> None:
        for nth, wanted in prompts:  # which all of these tasks take from
            choices = await _choices(link, wanted, opened) if nth else first
            places = range(nth * len(first), (nth + 1) * len(first))
            await together(*(relay(*each) for each in zip(places, choices, strict=True)))

    async def relay_all() -> Exception | None:
        failed = None
        try:
            await together(*(relay_prompts() for _ in opens[:PROMPTS_AT_A_TIME]))
        except Exception as error:  # noqa: BLE001  (raised below, when what came before it is out)
            failed = error
        await pieces.put(None)
        return failed

    relaying = asyncio.create_task(relay_all())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        failed = await relaying
        if isinstance(failed, TailraceError):
            yield error_events(failed)
        elif failed is not None:
            raise failed
        else:
            in_order = [end for _, end in sorted(ends.items())]
            last = ChunkEncoder(dialect.shape, usage=include_usage, alone=False)
            last.opened(first[0].opened, head)
            yield last.ending(usage(in_order, len(opens)) if include_usage else None)
    finally:
        await cancel([relaying])
