"""The endpoints of `/v1/chats/{id}`: create, list, follow and stop a chat."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.chats.calls import create_chat, read_turns, stop_turns
from tailrace.edge.chats.chat_id import check_chat
from tailrace.edge.chats.events import (
    ChatEncoder,
    LinesChatEncoder,
    SseChatEncoder,
    parse_position,
)
from tailrace.edge.chats.subscription import ChatSubscription, Wish
from tailrace.edge.generate.encoders import HEADERS
from tailrace.edge.generate.params import View, choose_view, parse_flag, parse_tail, read_body
from tailrace.edge.starlette_helpers import NO_STORE, link_of, unless_disconnected
from tailrace.edge.streamed_body import StreamedBody
from tailrace.ledger.errors import CallerError

CHATS_PATH = "/v1/chats"
FOLLOWED = (View.SSE, View.NDJSON, View.JSONL)
"""The views (media types) in which the events of a chat can be sent while the chat goes on."""


async def create(request: Request) -> Response:
    """Handle PUT /v1/chats/{id}: create a chat, so that it can be followed without a turn."""
    await read_body(request)
    await create_chat(request, check_chat(request.path_params["id"]))
    return Response(status_code=204, headers=NO_STORE)


async def read(request: Request) -> Response:
    """Handle GET /v1/chats/{id}: list the turns as JSON, or follow them as events or lines."""
    wish = _wish(request)
    view = choose_view(request.headers.get("Accept"))
    if view is not View.JSON:
        return await _follow(request, wish, _encoder(view))
    query = "" if wish.tail is None else f"tail={wish.tail}"
    if wish.after is not None:
        query = f"after={wish.after.turn}"
    found = await read_turns(request, wish.chat, query)
    return JSONResponse({"id": wish.chat, **found}, headers=HEADERS)


async def stop(request: Request) -> Response:
    """Handle POST /v1/chats/{id}/stop and /api/chat/{id}/stop: cancel the running turns."""
    await read_body(request)
    stopped = await stop_turns(request, check_chat(request.path_params["id"]))
    return JSONResponse(stopped, headers=HEADERS)


ROUTES = [
    Route(f"{CHATS_PATH}/{{id}}", create, methods=["PUT"]),
    Route(f"{CHATS_PATH}/{{id}}", read, methods=["GET"]),
    Route(f"{CHATS_PATH}/{{id}}/stop", stop, methods=["POST"]),
]


def _wish(request: Request) -> Wish:
    """Return the checked parameters of a request to read a chat."""
    query = request.query_params
    wish = Wish(
        chat=check_chat(request.path_params["id"]),
        after=parse_position(query.getlist("after"), request.headers.get("Last-Event-ID")),
        tail=parse_tail(query.getlist("tail")),
        turns_only=parse_flag(query.getlist("turns"), "turns"),
        snapshot=parse_flag(query.getlist("snapshot"), "snapshot"),
        caller=caller_of(request),
        token=request.headers.get("Tailrace-Token"),
    )
    if wish.tail == 0:
        raise CallerError("tail is 0", field="tail", hint="send the number of turns, at least 1")
    if wish.tail is not None and wish.after is not None:
        raise CallerError(
            "tail and after cannot be given together", field="tail", hint="leave one of them out"
        )
    return wish


def _encoder(view: View) -> ChatEncoder:
    if view not in FOLLOWED:
        raise CallerError(
            f"a chat cannot be followed as {view.value}",
            code="not_acceptable",
            status=406,
            field="Accept",
            hint="one of " + ", ".join(each.value for each in (*FOLLOWED, View.JSON)),
        )
    return SseChatEncoder() if view is View.SSE else LinesChatEncoder(view.value)


async def _follow(request: Request, wish: Wish, encoder: ChatEncoder) -> Response:
    subscription = ChatSubscription(link_of(request), wish, encoder)
    with ExitStack() as unless_handed_on:
        unless_handed_on.callback(subscription.close)
        await unless_disconnected(request, subscription.open())
        unless_handed_on.pop_all()  # from now on, `StreamedBody` closes the subscription
    headers = HEADERS | {"Content-Type": encoder.media_type}
    return StreamedBody(subscription.close, subscription.body(), headers=headers)
