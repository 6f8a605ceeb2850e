"""The routes of OpenAI's API that answer with choices, streamed in chunks or as one JSON document.

These are `/v1/chat/completions` and `/v1/completions`. Each has an additional route that OpenAI
lacks: a GET with the id of an answer, which resumes its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.errors import openai_error
from tailrace.edge.generate.encoders import stream_headers
from tailrace.edge.generate.group_encoder import grouped
from tailrace.edge.generate.group_request import grouping_of, parse_group
from tailrace.edge.generate.params import read_body
from tailrace.edge.generate.routes import MAX_DOCUMENT_BYTES, Collected, collect, resume_request
from tailrace.edge.openai.chunks import (
    FINISH,
    AnswerShape,
    ChunkEncoder,
    check_end,
    chunk_head,
    usage,
)
from tailrace.edge.openai.merged import PROMPTS_AT_A_TIME, MergedAnswer
from tailrace.edge.openai.request import StreamOptions, flag, parse_body
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import Reader
from tailrace.edge.starlette_helpers import link_of, unless_disconnected
from tailrace.edge.stream_answer import StreamAnswer
from tailrace.ledger.errors import (
    CallerError,
    TailraceError,
    TooLarge,
)
from tailrace.ledger.frame import (
    Caller,
    FinishReason,
    Open,
    Opened,
    Resume,
    StreamEnd,
)
from tailrace.ledger.process.tasks import gather

CANCELLED = "cancelled"
"""The `finish_reason` of a cancelled stream in a GET. OpenAI's API has no such reason."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route of OpenAI's API: how its requests are parsed, and how its answers look."""

    body: type[Any]
    """The pydantic model of a request: a `ChoiceSettings` with a method `opens`."""
    example: str
    """A valid request body, which error messages show."""
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
        """Return the Resume for a GET, and the encoder if the answer is to be streamed.

        Args:
            name: The id of an answer, with its prefix.
            query: The query's parameters.
            token: The resume token in the headers.
            caller: The caller that the API key identifies.
        """
        said: dict[str, str] = {}
        for key, value in query:
            said.setdefault(key, value)
        after: Sequence[str] = [said["starting_after"]] if "starting_after" in said else []
        try:
            resume = resume_request(
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
    """Return the Starlette routes of one of OpenAI's APIs.

    POST starts an answer, and GET reads an answer again.
    """
    return [
        Route(dialect.path, partial(_start, dialect), methods=["POST"]),
        Route(f"{dialect.path}/{{id}}", partial(_read, dialect), methods=["GET"]),
    ]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer: its stream's Opened frame, and the reader of the stream."""

    reader: Reader
    opened: Opened


class _Broken(Exception):
    """Raised when a stream of an answer fails.

    The error response gets headers from `opened`, with which the client can read the text so far.
    """

    def __init__(self, error: TailraceError, opened: Opened) -> None:
        super().__init__(error)
        self.error = error
        self.opened = opened


async def _start(dialect: Dialect, request: Request) -> Response:
    body = await read_body(request)
    parsed, headers = parse_body(dialect.body, body, dialect.example)
    opens = parsed.opens(request.headers.get("Idempotency-Key"), caller_of(request))
    link = link_of(request)
    if not parsed.stream:
        return await unless_disconnected(request, _whole(dialect, link, opens, headers))
    options = parsed.stream_options or StreamOptions()
    grouping = grouping_of(parsed.group)
    if len(opens) == 1 and opens[0].n == 1:
        return StreamAnswer(opens[0], grouped(dialect.encoder(options), grouping), headers)
    include_usage = bool(options.include_usage)
    return MergedAnswer(dialect.shape, opens, headers, usage=include_usage, grouping=grouping)


async def _read(dialect: Dialect, request: Request) -> Response:
    """Answer a GET: with a document of the text so far, or by streaming from `starting_after`."""
    token = request.headers.get("Tailrace-Token")
    resume, encoder = dialect.resume(
        request.path_params["id"], request.query_params.multi_items(), token, caller_of(request)
    )
    grouping = parse_group(request.query_params)
    if encoder is not None:
        return StreamAnswer(resume, grouped(encoder, grouping))
    with Reader(link_of(request)) as reader:
        opened = await unless_disconnected(request, reader.open(replace(resume, follow=False)))
        headers = stream_headers(opened)
        collected = await unless_disconnected(request, collect(reader))
        end = collected.closing
        if isinstance(end, StreamEnd) and end.finish_reason is not FinishReason.CANCELLED:
            try:
                check_end(end)
            except TailraceError as error:
                return _refusal(dialect, _Broken(error, opened), headers)
        return _document(dialect, [(opened, collected)], 1, headers)


async def _choices(link: OriginPool, wanted: Open, opened: ExitStack) -> list[Choice]:
    """Open the stream of each choice of one prompt; the stack `opened` closes them."""

    async def ask(asked: Open | Resume) -> Choice:
        reader = opened.enter_context(Reader(link))
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
    """Return one document when all streams have ended, or an error as soon as one has failed."""
    turns, chars = asyncio.Semaphore(PROMPTS_AT_A_TIME), 0

    async def answered(wanted: Open) -> list[Answered]:
        nonlocal chars
        async with turns:
            with ExitStack() as opened:
                choices = await _choices(link, wanted, opened)
                try:
                    collected = await gather(*(collect(choice.reader) for choice in choices))
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
        made = await gather(*(answered(wanted) for wanted in opens))
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
    """Return the `finish_reason` of a stream, or None if it still runs.

    A cancelled stream gets CANCELLED, which OpenAI's API does not know, instead of an error: its
    text so far is valid.
    """
    end = collected.closing
    return FINISH.get(end.finish_reason, CANCELLED) if isinstance(end, StreamEnd) else None
