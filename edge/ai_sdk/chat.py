"""`/api/chat`: the AI SDK's chat, and the way back to an answer that is still being made.

The AI SDK comes back with no more than the id of its chat. Which stream is that chat's latest is
known to an object of the origin, so that any edge finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.access.middleware import caller_of
from edge.ai_sdk.chat_request import EXAMPLE, ChatBody, check_chat, to_open
from edge.ai_sdk.ui_events import HEADER, UiEvents, refusal
from edge.body import stream_body
from edge.generate import stream_headers
from edge.openai.request import read_body
from edge.parameters import read_body as whole_body
from edge.reader import Reader, attended, link_of, whole_answer
from ledger.errors import NotFound, TailraceError, Unavailable
from ledger.frame import Call, Open, Resume, Status, StreamState, decode

PATH = "/api/chat"
OBJECT = "chat"
"""The class of objects that know the latest stream of a chat."""


# ---- endpoints ----


async def send(request: Request) -> Response:
    """POST /api/chat"""
    body, headers = read_body(ChatBody, await whole_body(request), EXAMPLE)
    body.model = body.model or _only_model(request)
    wanted = to_open(body, request.headers.get("Idempotency-Key"), caller_of(request))
    chat = None if body.id is None else check_chat(body.id)
    return await _answered(request, wanted, headers, chat)


async def resume(request: Request) -> Response:
    """GET /api/chat/{id}/stream: the whole answer from its start, while it is being made."""
    chat = check_chat(request.path_params["id"])
    try:
        wanted = await attended(request.receive, _unfinished(request, chat))
    except NotFound:
        wanted = None
    if wanted is None:
        return Response(status_code=204, headers={"Cache-Control": "no-store"})
    return await _answered(request, wanted, {})


def _refusing(
    endpoint: Callable[[Request], Coroutine[Any, Any, Response]],
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TailraceError as error:
            return refusal(error)

    return answered


ROUTES = [
    Route(PATH, _refusing(send), methods=["POST"]),
    Route(f"{PATH}/{{id}}/stream", _refusing(resume), methods=["GET"]),
]


# ---- from a request to a stream ----


async def _answered(
    request: Request, wanted: Open | Resume, headers: dict[str, str], chat: str | None = None
) -> Response:
    """`chat` is one that knows of the stream before anybody is told."""
    encoder = UiEvents()
    with ExitStack() as source:
        reader = source.enter_context(closing(Reader(link_of(request))))
        opened = await attended(request.receive, reader.open(wanted))
        if chat is not None:
            await attended(request.receive, _ask(request, "PUT", chat, opened.stream))
        encoder.opened(opened)
        return stream_body(source, reader, encoder, headers | stream_headers(opened) | HEADER)


async def _unfinished(request: Request, chat: str) -> Resume | None:
    """A request for the latest stream of a chat; None if it has ended. NotFound if it is gone."""
    token = request.headers.get("Tailrace-Token")
    stream = await _ask(request, "GET", chat)
    wanted = Resume(stream, token=token, caller=caller_of(request))
    with closing(Reader(link_of(request))) as reader:
        begun = await reader.open(replace(wanted, follow=False), frames=0)
    if begun.next_index == 0:
        return wanted
    with closing(Reader(link_of(request))) as reader:
        await reader.open(replace(wanted, after=begun.next_index - 1, follow=False), frames=0)
        _, status = decode((await reader.take())[0])
    has_ended = isinstance(status, Status) and status.state is StreamState.ENDED
    return None if has_ended else wanted


async def _ask(request: Request, method: str, chat: str, body: bytes = b"") -> bytes:
    """What the object of a chat answers."""
    call = Call(OBJECT, chat, method, url="", body=body, caller=caller_of(request))
    _, answer = await whole_answer(link_of(request), call)
    return answer


def _only_model(request: Request) -> str:
    """The model that an edge has; the first one where there are several."""
    models = link_of(request).heartbeat.models
    if not models:
        raise Unavailable("no model is loaded", code="loading")
    return models[0]
