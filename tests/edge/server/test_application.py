"""The ASGI application behind a protocol whose streams are ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.edge.flush import FlushBatch
from tailrace.edge.server.asgi import AsgiApplication, AsgiRequest
from tailrace.edge.server.deadlines import Deadlines
from tailrace.edge.server.interfaces import Headers, Request
from tests.edge.server.manual_clock import ManualClock

pytestmark = pytest.mark.anyio


class Kept:
    """a writer that keeps what it gets; `space` is its room."""

    def __init__(self, space: int) -> None:
        self.space = space
        self.status = 0
        self.headers: Headers = ()
        self.body = b""
        self.end_of_it = ""

    def start(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def write(self, data: bytes) -> None:
        self.body += data
        self.space -= len(data)

    def end(self) -> None:
        self.end_of_it = "ended"

    def reset(self) -> None:
        self.end_of_it = "reset"

    def writable_bytes(self) -> int:
        return self.space


class Asked:
    """One request to an application."""

    def __init__(
        self,
        app: ASGIApp,
        method: str = "POST",
        space: int = 1 << 20,
        taken: Callable[[int], None] = lambda _size: None,
    ) -> None:
        self.writer = Kept(space)
        batch = FlushBatch()
        deadlines = Deadlines(ManualClock(), batch.flush)
        self.application = AsgiApplication(app, batch, deadlines)
        request = Request(method, b"/a%20b", b"q=1", [(b"host", b"h")], "https", None, "3")
        self.request: AsgiRequest = self.application.start(request, self.writer, consumed=taken)

    async def over(self) -> Kept:
        await self.application.ended(30)
        return self.writer


async def some_turns() -> None:
    """Run the event loop for as many turns as any task here needs to reach its wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def test_a_request_comes_in_pieces_and_is_taken_as_it_is_read() -> None:
    scopes: list[Scope] = []
    messages: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        while not messages or messages[-1]["more_body"]:
            messages.append(await receive())
        await send(start())
        await send(body(b"thanks"))
        messages.append(await receive())

    taken: list[int] = []
    asked = Asked(app, taken=taken.append)
    asked.request.feed(b"one", ended=False)
    await some_turns()
    asked.request.feed(b"three", ended=True)
    writer = await asked.over()
    assert [message.get("body") for message in messages] == [b"one", b"three", None]
    assert messages[-1]["type"] == "http.disconnect"
    assert taken == [3, 5]
    assert (scopes[0]["path"], scopes[0]["raw_path"]) == ("/a b", b"/a%20b")
    assert (writer.status, writer.body, writer.end_of_it) == (200, b"thanks", "ended")


async def test_a_response_waits_for_room() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send(start())
        for _ in range(3):
            await send(body(b"12345678", more=True))
        await send(body(b""))

    asked = Asked(app, space=10)
    await some_turns()
    assert asked.writer.body == b"12345678" * 2
    asked.writer.space = 100
    asked.request.drained()
    assert (await asked.over()).body == b"12345678" * 3


async def test_a_fault_before_the_answer_is_a_500_and_within_it_a_reset() -> None:
    async def before(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise RuntimeError

    async def within(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send(start())
        await send(body(b"a", more=True))

    writer = await Asked(before).over()
    assert (writer.status, writer.end_of_it) == (500, "ended")
    assert b'"code":"internal"' in writer.body
    writer = await Asked(within).over()
    assert (writer.status, writer.body, writer.end_of_it) == (200, b"a", "reset")


async def test_a_client_that_leaves_is_a_disconnect_and_frees_whoever_waits_for_room() -> None:
    seen: list[str] = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await send(start())
        await send(body(b"full", more=True))
        seen.append((await receive())["type"])
        await send(body(b"nobody reads this"))

    asked = Asked(app, space=1)
    await some_turns()
    asked.request.disconnected()
    writer = await asked.over()
    assert seen == ["http.disconnect"]
    assert (writer.body, writer.end_of_it) == (b"full", "")


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_an_answer_without_a_body_has_none(method: str, status: int) -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send(start(status, (b"Connection", b"close"), (b"X-Name", b"v")))
        await send(body(b"left out", more=True))

    writer = await Asked(app, method).over()
    assert (writer.status, writer.body, writer.end_of_it) == (status, b"", "ended")
    assert [name for name, _ in writer.headers] == [b"x-name"]
