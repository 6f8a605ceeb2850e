"""`/v1/generate`: start a stream, read it in one of three views, steer it, cancel it."""

from __future__ import annotations

from contextlib import ExitStack
from secrets import token_hex

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from edge.accept import View, choose_view
from edge.attend import attended, together
from edge.body import StreamBody
from edge.config import EdgeConfig
from edge.document import Collected, answer_document, collect, state_document
from edge.link import Link
from edge.parameters import check_idempotency_key, parse_after, parse_stream_id, read_body
from edge.request import parse_generate, parse_steer
from edge.subscriber import WINDOW_FRAMES, Subscriber
from ledger.frame import Cancel, Open, Opened, Resume, Sibling, Steer, Tag, tag_of

TIP_PATIENCE_S = 1.0
"""How long a reader that resumes at the tip waits to learn that the stream has ended."""
CLIENT_GONE = 499
"""The status of an answer that nobody is left to read."""

HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}


# ---- endpoints ----


async def start(request: Request) -> Response:
    """POST /v1/generate"""
    view = choose_view(request.headers.get("Accept"))
    key = request.headers.get("Idempotency-Key")
    # A key of our own lets the request be sent again when the origin link breaks.
    key = token_hex(16) if key is None else check_idempotency_key(key)
    config: EdgeConfig = request.app.state.config
    body = await read_body(request, config.max_body_bytes)
    wanted = parse_generate(body, idempotency_key=key, credit=WINDOW_FRAMES)
    return await _stream(request, view, wanted)


async def read(request: Request) -> Response:
    """GET /v1/generate/{id}"""
    view = choose_view(request.headers.get("Accept"))
    last_event_id = request.headers.get("Last-Event-ID")
    wanted = Resume(
        stream=parse_stream_id(request.path_params["id"]),
        after=parse_after(request.query_params.getlist("after"), last_event_id),
        token=request.headers.get("Tailrace-Token"),
        follow=view is not View.JSON,
        credit=WINDOW_FRAMES,
    )
    return await _stream(request, view, wanted)


async def cancel(request: Request) -> Response:
    """POST /v1/generate/{id}/cancel"""
    config: EdgeConfig = request.app.state.config
    await read_body(request, config.max_body_bytes)
    wanted = Cancel(
        stream=parse_stream_id(request.path_params["id"]),
        token=request.headers.get("Tailrace-Token"),
    )
    return await _asked(request, wanted)


async def steer(request: Request) -> Response:
    """POST /v1/generate/{id}/steer"""
    config: EdgeConfig = request.app.state.config
    body = await read_body(request, config.max_body_bytes)
    wanted = Steer(
        stream=parse_stream_id(request.path_params["id"]),
        token=request.headers.get("Tailrace-Token"),
        text=parse_steer(body),
    )
    return await _asked(request, wanted)


async def _asked(request: Request, wanted: Cancel | Steer) -> Response:
    """What the origin says of a request that is about a stream."""
    subscriber = Subscriber(_link(request))
    try:
        status = await attended(request.receive, subscriber.ask(wanted))
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    finally:
        subscriber.close()
    fields = {
        "id": status.stream.hex(),
        "state": status.state.word,
        "next_index": status.next_index,
    }
    return JSONResponse(fields, headers=HEADERS)


def _link(request: Request) -> Link:
    link: Link = request.app.state.link
    return link


# ---- from a request frame to an answer ----


async def _stream(request: Request, view: View, wanted: Open | Resume) -> Response:
    """The stream that `wanted` asks for, in the view that the client asked for."""
    subscriber = Subscriber(_link(request))
    with ExitStack() as unless_handed_on:
        unless_handed_on.callback(subscriber.close)
        try:
            answer = await attended(request.receive, _answer(subscriber, view, wanted))
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        if isinstance(answer, StreamBody):
            unless_handed_on.pop_all()  # the body closes it when it has been sent
        return answer


async def _answer(subscriber: Subscriber, view: View, wanted: Open | Resume) -> Response:
    opened = await subscriber.open(wanted)
    headers = _headers(opened)
    if view is View.JSON:
        document = await _document(subscriber, wanted, opened)
        return JSONResponse(document, headers=headers)
    if isinstance(wanted, Resume) and await _nothing_is_left(subscriber, wanted):
        return Response(status_code=204, headers=headers)
    return StreamBody(subscriber, view, headers)


async def _document(
    subscriber: Subscriber, wanted: Open | Resume, opened: Opened
) -> dict[str, object]:
    if isinstance(wanted, Resume):
        return state_document(opened, await collect(subscriber))
    others = [_sibling(subscriber.link, sibling) for sibling in opened.siblings]
    return answer_document(opened, await together(collect(subscriber), *others))


async def _sibling(link: Link, sibling: Sibling) -> Collected:
    subscriber = Subscriber(link)
    try:
        wanted = Resume(sibling.stream, token=sibling.token or None, credit=WINDOW_FRAMES)
        await subscriber.open(wanted)
        return await collect(subscriber)
    finally:
        subscriber.close()


async def _nothing_is_left(subscriber: Subscriber, wanted: Resume) -> bool:
    """Whether the stream has ended and the reader has all of it."""
    if wanted.after is None or not await subscriber.wait(TIP_PATIENCE_S):
        return False
    return tag_of(subscriber.peek()) == Tag.STATUS


def _headers(opened: Opened) -> dict[str, str]:
    headers = HEADERS | {"Tailrace-Stream": opened.stream.hex()}
    if opened.token:
        headers["Tailrace-Token"] = opened.token
    if opened.siblings:
        headers["Tailrace-Siblings"] = ", ".join(map(_named, opened.siblings))
    return headers


def _named(sibling: Sibling) -> str:
    """One of a list of items with a parameter (RFC 9110, 5.6.1 and 5.6.6)."""
    stream = sibling.stream.hex()
    return f"{stream};token={sibling.token}" if sibling.token else stream
