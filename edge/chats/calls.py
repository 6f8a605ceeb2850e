"""Requests to the origin's objects that list the turns of chats."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.origins.reader import Reader, whole_answer
from tailrace.edge.starlette_helpers import link_of, unless_disconnected
from tailrace.ledger.frame import Call, Caller, Cancel, Open, Opened, Resume
from tailrace.ledger.process.tasks import gather

OBJECT = "chat"
"""The class of the origin's objects that list the turns of chats."""

Fields = dict[str, Any]


def chat_call(
    chat: str, method: str, caller: Caller | None, query: str = "", body: bytes = b""
) -> Call:
    """Return the Call frame of a request to a chat's object; `query` has the parameters."""
    return Call(OBJECT, chat, method, url=f"?{query}", body=body, caller=caller)


async def create_chat(request: Request, chat: str) -> None:
    """Create a chat without turns, unless it exists."""
    await _add(request, chat, b"")


async def open_turn(
    request: Request, reader: Reader, wanted: Open | Resume, chat: str | None
) -> Opened:
    """Open a stream; if a chat is given, make the stream a turn of this chat.

    When this returns, everybody who follows the chat can find the stream. A repeated request with
    the same idempotency key opens the same stream, which is one turn.
    """
    opened = await unless_disconnected(request, reader.open(wanted))
    if chat is not None:
        await _add(request, chat, opened.stream)
    return opened


async def _add(request: Request, chat: str, stream: bytes) -> None:
    call = chat_call(chat, "PUT", caller_of(request), body=stream)
    await unless_disconnected(request, whole_answer(link_of(request), call))


async def read_turns(request: Request, chat: str, query: str) -> Fields:
    """Return the document of a chat: some of its turns, and the number of its readers.

    Raises NotFound if there is no such chat.
    """
    call = chat_call(chat, "GET", caller_of(request), query)
    _, body = await unless_disconnected(request, whole_answer(link_of(request), call))
    document: Fields = json.loads(body)
    return document


async def stop_turns(request: Request, chat: str) -> Fields:
    """Cancel the running turns of a chat, and return them with their new states."""
    found = await read_turns(request, chat, "running=1")
    token, caller = request.headers.get("Tailrace-Token"), caller_of(request)

    async def cancelled(turn: Fields) -> Fields:
        wanted = Cancel(bytes.fromhex(turn["stream"]), token=token, caller=caller)
        with Reader(link_of(request)) as reader:
            status = await reader.ask(wanted)
        return turn | {"state": status.state.word, "next_index": status.next_index}

    stopped = await unless_disconnected(request, gather(*map(cancelled, found["turns"])))
    return {"id": chat, "stopped": stopped}
