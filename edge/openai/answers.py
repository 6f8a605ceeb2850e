"""The application's side of the dialects with choices: whole answers, and streams of several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge.access.middleware import caller_of
from edge.body import SILENCE_S, StreamedBody, stream_body
from edge.document import Collected, collect
from edge.generate import stream_headers
from edge.openai.errors import openai_error
from edge.openai.events import (
    FINISH,
    ChunkEncoder,
    Dialect,
    check_end,
    chunk_head,
    error_events,
    usage,
)
from edge.openai.request import StreamOptions, read_body
from edge.origins.link import Link, Reader, attended, link_of
from edge.parameters import read_body as whole_body
from ledger.errors import TailraceError
from ledger.frame import CLOSING, Open, Opened, Resume, StreamEnd, tag_of
from ledger.tasks import together


def routes_of(dialect: Dialect) -> list[Route]:
    """The routes of one dialect."""

    async def start(request: Request) -> Response:
        return await _start(dialect, request)

    async def read(request: Request) -> Response:
        return await _read(dialect, request)

    return [
        Route(dialect.path, start, methods=["POST"]),
        Route(f"{dialect.path}/{{id}}", read, methods=["GET"]),
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
        return StreamedBody(unless_handed_on.pop_all(), pieces, headers=headers)


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
                    yield encoder.sign_of_life(choices[nth].reader.heartbeat)
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
