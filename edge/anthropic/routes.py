"""The endpoints of `/v1/messages`.

Edges keep no messages, so every edge can serve every message. The id of a message contains the id
of its stream, and the events and the document of a message are derived from the stream's log.
"""

from __future__ import annotations

import re
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.anthropic.cached_tokens import cached_tokens
from tailrace.edge.anthropic.events import PREFIX, MessageEvents, StreamedMessage
from tailrace.edge.anthropic.request import COUNT_DEFAULTS, parse_body
from tailrace.edge.errors import MESSAGES_PATH, messages_error
from tailrace.edge.generate.encoders import stream_headers
from tailrace.edge.generate.params import View, parse_after, read_body
from tailrace.edge.numbered_events import read_frames, resumed
from tailrace.edge.openai.chunks import check_end
from tailrace.edge.openai.request import flag
from tailrace.edge.origins.reader import Reader, whole_answer
from tailrace.edge.starlette_helpers import link_of, unless_disconnected
from tailrace.edge.stream_answer import StreamAnswer
from tailrace.edge.telemetry.request_metrics import request_id
from tailrace.ledger.errors import CallerError, NotFound, TailraceError
from tailrace.ledger.frame import LINK_CODEC, Call, Cancel, FinishReason, Open, Opened, Resume
from tailrace.ledger.links.token_count import TOKEN_COUNT

VERSION_HEADER = "anthropic-version"
VERSIONS = ("2023-06-01", "2026-10-21")
"""The versions of the API that are served. A POST to a route of Anthropic's own API must name one
of them in a header.

Anthropic's versions differ in the parameters that they refuse. Here both accept sampling settings.
"""

_ID = re.compile(rf"{PREFIX}([0-9a-f]{{32}})")


# ---- endpoints ----


async def create(request: Request) -> Response:
    """Handle POST /v1/messages: start a message; stream it, or return it when it has ended."""
    body = await read_body(request)
    _check_version(request)
    parsed, headers = parse_body(body)
    wanted = parsed.to_stream(request.headers.get("Idempotency-Key"), caller_of(request))
    headers |= _request_header()
    if parsed.stream:
        encoder = MessageEvents(request_id(), caller=wanted.caller)
        return StreamAnswer(wanted, encoder, headers)
    opened, message = await _read(request, wanted)
    return _document(opened, message, headers, keeps_cancelled=False)


async def retrieve(request: Request) -> Response:
    """Handle GET /v1/messages/{id}: read a message, as a document or as events."""
    asked, query = _asked(request), request.query_params
    after = _after(request)
    if not _wants_events(request, after):
        return await _so_far(request, asked)
    token = asked.token or query.get("token")  # EventSource cannot set headers
    # A client that has all events gets a 204 only if it is an EventSource, which sends this header:
    # a 204 keeps it from reconnecting, but is an error to Anthropic's npm SDK.
    by_header = "Last-Event-ID" in request.headers
    encoder = MessageEvents(request_id(), after, asked.caller, ends_by_204=by_header)
    if after is None:
        return StreamAnswer(replace(asked, token=token), encoder, _request_header())
    return await resumed(request, replace(asked, token=token), encoder, after, _request_header())


async def cancel(request: Request) -> Response:
    """Handle POST /v1/messages/{id}/cancel: end a message, and return its text so far."""
    await read_body(request)
    asked = _asked(request)
    with Reader(link_of(request)) as reader:
        wanted = Cancel(asked.stream, asked.token, asked.caller)
        await unless_disconnected(request, reader.ask(wanted))
    return await _so_far(request, asked)


async def count_tokens(request: Request) -> Response:
    """Handle POST /v1/messages/count_tokens: count the tokens of a prompt, as a model reads it."""
    body = await read_body(request)
    _check_version(request)
    parsed, headers = parse_body(body, COUNT_DEFAULTS)
    wanted = parsed.to_stream(None, None)
    call = Call(
        TOKEN_COUNT,
        wanted.model,
        "GET",  # counting changes nothing, so the Call is repeated if the link breaks
        url="",
        body=LINK_CODEC.encode(wanted),
        caller=caller_of(request),
    )
    _, count = await unless_disconnected(request, whole_answer(link_of(request), call))
    return JSONResponse({"input_tokens": int(count)}, headers={**headers, **_request_header()})


ROUTES = [
    Route(MESSAGES_PATH, create, methods=["POST"]),
    Route(f"{MESSAGES_PATH}/count_tokens", count_tokens, methods=["POST"]),
    Route(f"{MESSAGES_PATH}/{{id}}", retrieve, methods=["GET"]),
    Route(f"{MESSAGES_PATH}/{{id}}/cancel", cancel, methods=["POST"]),
]


# ---- parsing ----


def parse_id(name: str) -> bytes:
    """Return the stream id of a message; raise NotFound if the id is not valid."""
    found = _ID.fullmatch(name)
    if found is None:
        raise NotFound(
            f"no message {name!r}",
            code="unknown_stream",
            field="id",
            hint=f"the id of a message is {PREFIX} and 32 hex digits",
        )
    return bytes.fromhex(found[1])


def _check_version(request: Request) -> None:
    """Raise CallerError unless the request names a version of the API that is served."""
    said = request.headers.get(VERSION_HEADER)
    if said not in VERSIONS:
        what = "header is required" if said is None else f"{said!r} is not supported"
        raise CallerError(
            f"{VERSION_HEADER}: {what}", field=VERSION_HEADER, hint="one of " + ", ".join(VERSIONS)
        )


def _asked(request: Request) -> Resume:
    """Return a Resume from the stream's start, because a message's events count from there."""
    return Resume(
        parse_id(request.path_params["id"]),
        token=request.headers.get("Tailrace-Token"),
        caller=caller_of(request),
    )


def _after(request: Request) -> int | None:
    """Return the number of the last event that the client has, or None if it has none."""
    given = request.query_params.getlist("starting_after")
    try:
        return parse_after(given, request.headers.get("Last-Event-ID"))
    except CallerError as error:
        raise CallerError(
            "not the number of one event",
            field="Last-Event-ID" if error.field == "Last-Event-ID" else "starting_after",
            hint="send the `id` of the last event that you have, in decimal digits",
        ) from error


def _wants_events(request: Request, after: int | None) -> bool:
    """Return True to answer with events, False to answer with a document.

    The query's `stream` decides. Without it, the client wants events if it resumes after an event,
    or if its Accept header names them.
    """
    if "stream" in request.query_params:
        return flag(request.query_params, "stream")
    return after is not None or View.SSE.value in request.headers.get("Accept", "")


# ---- from a stream to a message ----


def _request_header() -> dict[str, str]:
    return {"Request-Id": request_id()}


async def _so_far(request: Request, asked: Resume) -> Response:
    """Return a document with the message so far."""
    opened, message = await _read(request, replace(asked, follow=False))
    return _document(opened, message, _request_header(), keeps_cancelled=True)


async def _read(request: Request, wanted: Open | Resume) -> tuple[Opened, StreamedMessage]:
    """Read the stream of a request, and return it as a message.

    For an Open, the stream is read to its end; for a Resume with `follow=False`, as far as it has
    got.
    """
    with Reader(link_of(request)) as reader:
        opened = await unless_disconnected(request, reader.open(wanted))
        message = StreamedMessage(opened)
        await unless_disconnected(request, read_frames(reader, message.add))
        if message.end is not None:
            count = cached_tokens(reader.link, opened, wanted.caller)
            message.cached_tokens = await unless_disconnected(request, count)
        return opened, message


def _document(
    opened: Opened,
    message: StreamedMessage,
    more_headers: dict[str, str],
    *,
    keeps_cancelled: bool,
) -> Response:
    """Return the response with a message, or with the error with which its stream ended.

    With `keeps_cancelled`, a cancelled message is no error: its text so far is valid.
    """
    headers, end = {**stream_headers(opened), **more_headers}, message.end
    is_kept = keeps_cancelled and end is not None and end.finish_reason is FinishReason.CANCELLED
    if end is not None and not is_kept:
        try:
            check_end(end)
        except TailraceError as error:
            refused = messages_error(error, request_id())
            refused.headers.update(headers)
            return refused
    return JSONResponse(message.document(), headers=headers)
