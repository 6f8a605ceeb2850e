"""A WebSocket through the Worker: the runtime relays that of the edge behind, unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from tests.worker.workerd import Workerd

pytestmark = pytest.mark.anyio

TIMEOUT_S = 60.0
MEGABYTE = 1 << 20
CODES = [1000, 1001, 1002, 1003, 1008, 1009, 1011, 4000]
SUBPROTOCOLS = [Subprotocol("tailrace"), Subprotocol("tailrace-key.trk_behind")]
REFUSED = "/v1/ws?refused"


@dataclass
class Behind:
    """The WebSockets of an edge that sends back what it receives, and closes as the path says."""

    url: str = ""
    handshakes: asyncio.Queue[Headers] = field(default_factory=asyncio.Queue)
    closed: asyncio.Queue[tuple[int | None, str | None]] = field(default_factory=asyncio.Queue)

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != REFUSED:
            return None
        return connection.respond(401, "no such key\n")

    async def serve(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        closed = self.closed
        self.handshakes.put_nowait(socket.request.headers)
        _, _, code = socket.request.path.partition("?close=")
        if code:
            await socket.close(int(code), "as the path says")
            return
        try:
            async for message in socket:
                await socket.send(message)
        except ConnectionClosed:
            pass
        closed.put_nowait((socket.close_code, socket.close_reason))


@pytest.fixture(scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Behind]:
    made = Behind()
    async with serve(
        made.serve,
        "127.0.0.1",
        0,
        process_request=made.answer,
        select_subprotocol=lambda _, offered: next(iter(offered), None),
        compression=None,
        max_size=2 * MEGABYTE,
    ) as server:
        port = server.sockets[0].getsockname()[1]
        async with Workerd(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("worker")) as worker:
            made.url = worker.url.replace("http", "ws") + "/v1/ws"
            yield made


@pytest.fixture
def behind(standing: Behind) -> Behind:
    """Return the edge behind, which has noted nothing of this test yet."""
    standing.handshakes = asyncio.Queue()
    standing.closed = asyncio.Queue()
    return standing


async def test_messages_pass_unchanged_in_both_directions(behind: Behind) -> None:
    messages: list[bytes | str] = [b"", b"\0\xff", "text", bytes(range(256)) * (MEGABYTE // 256)]
    async with asyncio.timeout(TIMEOUT_S), connect(behind.url, max_size=2 * MEGABYTE) as socket:
        for message in messages:
            await socket.send(message)
        assert [await socket.recv() for _ in messages] == messages
        assert socket.protocol.extensions == []  # the edge behind compresses nothing


@pytest.mark.parametrize("code", CODES)
async def test_a_close_of_either_side_reaches_the_other_with_its_code(
    behind: Behind, code: int
) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        async with connect(f"{behind.url}?close={code}") as socket:
            await socket.wait_closed()
        assert (socket.close_code, socket.close_reason) == (code, "as the path says")
        async with connect(behind.url) as socket:
            await socket.close(code, "enough")
        assert socket.close_code == code
        assert await behind.closed.get() == (code, "enough")


async def test_a_connection_that_a_client_drops_is_dropped_behind(behind: Behind) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        socket = await connect(behind.url)
        socket.transport.abort()
        assert (await behind.closed.get())[0] == 1006


async def test_the_edge_behind_gets_the_key_and_not_the_page(behind: Behind) -> None:
    headers = {
        "Authorization": "Bearer trk_header",
        "Origin": behind.url.replace("ws", "http", 1).removesuffix("/v1/ws"),
        "Tailrace-Opened": "forged",
        "X-Request-Id": "mine-9",
    }
    async with connect(behind.url, subprotocols=SUBPROTOCOLS, additional_headers=headers) as socket:
        assert socket.subprotocol == "tailrace"
    said = await behind.handshakes.get()
    assert said["Authorization"] == "Bearer trk_header"
    assert said["Sec-WebSocket-Protocol"].replace(" ", "") == ",".join(SUBPROTOCOLS)
    assert (said["X-Forwarded-Proto"], said["X-Request-Id"]) == ("http", "mine-9")
    assert "Origin" not in said and "Tailrace-Opened" not in said


async def test_a_refusal_of_the_edge_behind_is_the_answer(behind: Behind) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await connect(behind.url + "?refused")
    assert (refused.value.response.status_code, refused.value.response.body) == (
        401,
        b"no such key\n",
    )


async def test_a_page_of_another_origin_is_refused_before_the_edge_behind_is_asked(
    behind: Behind,
) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await connect(behind.url, additional_headers={"Origin": "https://evil.example"})
    assert refused.value.response.status_code == 403
    assert behind.handshakes.empty()
