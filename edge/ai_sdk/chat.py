"""`/api/chat`: the AI SDK's chat, and the way back to an answer that is still being made.

The AI SDK comes back with no more than the id of its chat. Which stream is that chat's latest is
known to an object of the origin, so that any edge finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge.access.middleware import caller_of
from edge.ai_sdk.chat_request import EXAMPLE, ChatBody, check_chat, to_open
from edge.ai_sdk.ui_events import HEADER, UiEvents, refusal
from edge.attend import attended
from edge.body import StreamedBody, frames_of
from edge.generate import stream_headers
from edge.openai.request import read_body
from edge.parameters import read_body as whole_body
from edge.reader import Reader, link_of, whole_answer
from ledger.errors import NotFound, TailraceError, Unavailable
from ledger.frame import Call, Caller, Open, Opened, Resume, Status, StreamState, decode

PATH = "/api/chat"
OBJECT = "chat"
"""The class of objects that know the latest stream of a chat."""


# ---- endpoints ----


async def send(request: Request) -> Response:
    """POST /api/chat"""
    body, headers = read_body(ChatBody, await whole_body(request), EXAMPLE)
    caller = caller_of(request)
    body.model = body.model or _only_model(request)
    wanted = to_open(body, request.headers.get("Idempotency-Key"), caller)
    chat = None if body.id is None else check_chat(body.id)
    return await _answered(request, _begun(request, wanted, chat, caller), headers)


async def resume(request: Request) -> Response:
    """GET /api/chat/{id}/stream: the whole answer from its start, while it is being made."""
    chat, caller = check_chat(request.path_params["id"]), caller_of(request)
    token = request.headers.get("Tailrace-Token")
    try:
        wanted = await attended(request.receive, _unfinished(request, chat, token, caller))
    except NotFound:
        wanted = None
    if wanted is None:
        return Response(status_code=204, headers={"Cache-Control": "no-store"})
    return await _answered(request, _opened(request, wanted), {})


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


Begun = tuple[Reader, Opened]


async def _answered(
    request: Request, work: Coroutine[Any, Any, Begun], headers: dict[str, str]
) -> Response:
    reader, opened = await attended(request.receive, work)
    encoder = UiEvents()
    encoder.opened(opened)
    headers |= stream_headers(opened) | HEADER | {"Content-Type": encoder.media_type}
    if request.method == "HEAD":
        reader.close()
        return Response(headers=headers)
    return StreamedBody(reader, frames_of(reader, encoder), headers=headers)


async def _begun(request: Request, wanted: Open, chat: str | None, caller: Caller | None) -> Begun:
    """A new stream, which its chat knows of before anybody is told."""
    reader, opened = await _opened(request, wanted)
    try:
        if chat is not None:
            await _ask(request, "PUT", chat, caller, opened.stream)
    except BaseException:
        reader.close()
        raise
    return reader, opened


async def _opened(request: Request, wanted: Open | Resume) -> Begun:
    reader = Reader(link_of(request))
    try:
        return reader, await reader.open(wanted)
    except BaseException:
        reader.close()
        raise


async def _unfinished(
    request: Request, chat: str, token: str | None, caller: Caller | None
) -> Resume | None:
    """A request for the latest stream of a chat; None if it has ended. NotFound if it is gone."""
    stream = await _ask(request, "GET", chat, caller)
    wanted = Resume(stream, token=token, caller=caller)
    with closing(Reader(link_of(request))) as reader:
        begun = await reader.open(replace(wanted, follow=False), frames=0)
    if begun.next_index == 0:
        return wanted
    with closing(Reader(link_of(request))) as reader:
        await reader.open(replace(wanted, after=begun.next_index - 1, follow=False), frames=0)
        _, status = decode((await reader.take())[0])
    has_ended = isinstance(status, Status) and status.state is StreamState.ENDED
    return None if has_ended else wanted


async def _ask(
    request: Request, method: str, chat: str, caller: Caller | None, body: bytes = b""
) -> bytes:
    """What the object of a chat answers."""
    call = Call(OBJECT, chat, method, url="", body=body, caller=caller)
    _, answer = await whole_answer(link_of(request), call)
    return answer


def _only_model(request: Request) -> str:
    """The model that an edge has; the first one where there are several."""
    models = link_of(request).heartbeat.models
    if not models:
        raise Unavailable("no model is loaded", code="loading")
    return models[0]
