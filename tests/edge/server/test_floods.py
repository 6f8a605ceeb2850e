"""Whoever floods an edge with input that asks for nothing is hung up on, and holds up nobody."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import cast

import pytest
from h2.errors import ErrorCodes
from wsproto.connection import Connection as WebSocketConnection
from wsproto.connection import ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong

from tailrace.edge.server.chunks import ChunkedBody
from tailrace.edge.server.connection import Connection
from tailrace.edge.server.flood import (
    DECAY_PER_S,
    MAX_POINTS,
    REFUSED_POINTS,
    SMALL_PIECE_BYTES,
    FloodBudget,
)
from tailrace.edge.server.input import MAX_HELD_BYTES, SLICE_BYTES, TURN_S, InputTurns
from tailrace.edge.server.interfaces import UNSENT_BYTES
from tailrace.edge.session import CloseCode
from tailrace.ledger.frame import Credit, Open, Opened, Token, encode
from tests.bench.edge import floods
from tests.edge.scripted_origin import ScriptedOrigin, until
from tests.edge.server.http2_pair import POST, Pair
from tests.edge.server.http2_peer import Peer as Http2Peer
from tests.edge.server.serving import Client, Served, serving
from tests.edge.server.test_admission import with_keys
from tests.edge.server.test_websocket import Peer

pytestmark = pytest.mark.anyio

FLOOD_BYTES = 1 << 20
ONE_READ_BYTES = 256 << 10  # uvloop's read size
REFUSED = floods.NO_BODY
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    async with ScriptedOrigin(20).listening() as origin, serving(origin) as served:
        yield served


async def flooded(served: Served, name: str) -> bytes:
    """Flood until the edge hangs up; return all that it has said."""
    begin, pieces = floods.flood(name)
    size = max(1, len(next(pieces)))
    begin, pieces = floods.flood(name)
    flood = begin + b"".join(islice(pieces, 1 + FLOOD_BYTES // size))
    async with Client.connected(served) as client:
        writing = asyncio.create_task(client.send(flood))
        try:
            return await client.rest()
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


@pytest.mark.parametrize("name", [name for name in floods.NAMES if name.startswith("h1_")])
async def test_a_flood_of_http1_is_hung_up_on(served: Served, name: str) -> None:
    said = await flooded(served, name)
    *_, last = re.split(rb"HTTP/1\.1 (?=\d{3} )", said)
    assert last.startswith(b"400")
    assert b"\r\nconnection: close\r\n" in last.lower()


@pytest.mark.parametrize("name", [name for name in floods.NAMES if name.startswith("ws_")])
async def test_a_flood_of_a_websocket_is_hung_up_on(served: Served, name: str) -> None:
    assert_closed_as_flood(await flooded(served, name))


@pytest.mark.parametrize("name", floods.NAMES_WITH_KEYS)
async def test_a_flood_of_requests_without_an_api_key_is_hung_up_on(name: str) -> None:
    async with with_keys() as served:
        assert_closed_as_flood(await flooded(served, name))


def assert_closed_as_flood(said: bytes) -> None:
    """Assert that the edge closed a WebSocket because of a flood, given all that it has sent."""
    protocol = WebSocketConnection(ConnectionType.CLIENT)
    protocol.receive_data(said.partition(b"\r\n\r\n")[2])
    closed = [event for event in protocol.events() if isinstance(event, CloseConnection)]
    assert [event.code for event in closed] == [CloseCode.POLICY_VIOLATION]
    assert closed[0].reason == "too_many_requests"


@pytest.mark.parametrize("name", [name for name in floods.NAMES if name.startswith("h2_")])
async def test_a_flood_of_http2_is_hung_up_on(served: Served, name: str) -> None:
    frames = list(frames_of(await flooded(served, name)))
    kind, payload = frames[-1]
    assert (kind, payload[4:8]) == (GOAWAY, ErrorCodes.ENHANCE_YOUR_CALM.to_bytes(4, "big"))


GOAWAY = 7


def frames_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the type and payload of each frame of HTTP/2."""
    while data:
        size = 9 + int.from_bytes(data[:3], "big")
        yield data[3], data[9:size]
        data = data[size:]


class Paced:
    """A time budget of which each slice takes all, and how many turns of the loop there were."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = 0
        self.between: Callable[[], None] = lambda: None  # turns
        self.input = InputTurns(self.clock_s, self.call_soon)

    def clock_s(self) -> float:
        self.now += TURN_S
        return self.now

    def call_soon(self, act: Callable[[], None]) -> None:
        def in_turn() -> None:
            self.turns += 1
            self.between()
            act()

        asyncio.get_running_loop().call_soon(in_turn)


async def test_others_have_their_turn_after_each_slice_and_what_waits_is_bounded() -> None:
    """However much comes in one turn of the event loop, which reads up to 8 MiB in one."""
    paced = Paced()
    pieces: list[int] = []
    waiting: list[int] = []
    unbounded: list[int] = []  # bytes that waited while more was read
    async with ScriptedOrigin(3).listening() as origin, serving(origin) as served:
        object.__setattr__(served.context, "input", paced.input)
        async with Client.connected(served) as client:
            await client.send(GET)
            await client.answer()
            [found] = served.context.connections.all()
            connection = cast(Connection, found)
            receive = connection.protocol.receive

            def seen(data: bytes) -> None:
                pieces.append(len(data))
                waiting.append(len(connection._input))
                receive(data)

            connection.protocol.receive = seen  # type: ignore[method-assign]

            def between() -> None:
                transport = connection._transport
                if transport is not None and connection._input and transport.is_reading():
                    unbounded.append(len(connection._input))

            paced.between = between
            before = paced.turns
            body = b"x" * (1 << 20)
            head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            sending = asyncio.create_task(client.send(head % len(body) + body))
            assert (await client.answer()).status == 404
            sending.cancel()
    assert max(pieces) == SLICE_BYTES
    assert paced.turns - before >= len(pieces) - 1
    assert unbounded == []
    assert max(waiting) <= ONE_READ_BYTES + MAX_HELD_BYTES


async def test_no_request_is_answered_while_the_client_leaves_its_answers_unread(
    served: Served,
) -> None:
    """Else they pile up here: the client sends, and never reads."""
    count = 150
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", served.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    client = Client(reader, writer)
    await client.send(GET)
    await client.answer()
    [found] = served.context.connections.all()
    connection = cast(Connection, found)
    await client.send(REFUSED * count + GET)
    await until(lambda: connection.writable_bytes() < 1)
    transport = connection._transport
    assert transport is not None
    assert transport.get_write_buffer_size() < 2 * UNSENT_BYTES
    assert [(await client.answer()).status for _ in range(count + 1)] == [400] * count + [200]
    writer.close()


# ---- honest clients ----


async def test_a_few_requests_sent_together_are_all_answered(served: Served) -> None:
    async with Client.connected(served) as client:
        await client.send(REFUSED * 50 + GET * 50 + REFUSED)
        for n in range(101):
            status = (await client.answer()).status
            assert status == (200 if 50 <= n < 100 else 400)


BODY = b'{"model": "demo", "prompt": "Once"}'


async def test_any_number_of_chunks_of_normal_size_may_be_sent(served: Served) -> None:
    count = 2 * int(MAX_POINTS)
    chunk = b"%x\r\n%b\r\n" % (SMALL_PIECE_BYTES, b" " * SMALL_PIECE_BYTES)
    last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    async with Client.connected(served) as client:
        await client.send(floods.CHUNKED + chunk * count + last)
        assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    ("sizes", "points"),
    [([1], 0), ([64], 0), ([64, 64, 64], 0), ([64, 1], 0), ([1, 1, 1], 2), ([1, 64, 63, 64], 2)],
)
@pytest.mark.parametrize("piece_bytes", [1, 1000])
def test_each_small_chunk_but_the_last_costs_a_point(
    sizes: list[int], points: float, piece_bytes: int
) -> None:
    budget = FloodBudget(lambda: 0.0)
    chunks = ChunkedBody(budget.spend)
    body = b"".join(b"%x\r\n%b\r\n" % (size, b"x" * size) for size in sizes) + b"0\r\n\r\n"
    for begin in range(0, len(body), piece_bytes):
        chunks.feed(body[begin : begin + piece_bytes])
    assert chunks.ended
    assert budget.points == points


async def test_pings_and_credit_of_an_honest_client_are_answered(served: Served) -> None:
    async with Peer.connected(served) as peer:
        await peer.send(*(Ping(b"%d" % n) for n in range(100)))
        pongs = 0
        while pongs < 100:
            pongs += isinstance(await peer.event(), Pong)
        await peer.send(BytesMessage(encode(Open("demo", prompt="Once", credit=1), 1)))
        seen = 0
        while seen < 20:
            for corr, frame in await peer.frames(1):
                assert corr in (0, 1)
                seen += isinstance(frame, Token)
                if isinstance(frame, Opened | Token):
                    await peer.send(BytesMessage(encode(Credit(seen + 1), 1)))


def test_one_ping_a_second_is_never_too_many() -> None:
    now = [0.0]
    budget = FloodBudget(lambda: now[0])
    for _ in range(100_000):
        now[0] += 1.0
        assert budget.spend(1.0)


def test_points_are_forgiven_at_their_rate() -> None:
    now = [0.0]
    budget = FloodBudget(lambda: now[0])
    assert budget.spend(MAX_POINTS)
    assert not budget.spend(1.0)
    now[0] += 2.0 / DECAY_PER_S
    assert budget.spend(0.5)
    assert not budget.spend(1.0)


@pytest.mark.parametrize(("pace", "ends"), [(1.5, False), (0.0, True)])
def test_a_body_in_small_pieces_is_a_flood_only_if_they_come_fast(pace: float, ends: bool) -> None:
    pair = Pair()
    stream = pair.asks(POST, ended=False)
    for _ in range(5 * int(MAX_POINTS)):
        pair.now += pace / DECAY_PER_S
        pair.client.send_data(stream.id, b"a few bytes")
        pair.talk()
        stream.consumed(11)
        if pair.server.closed:
            break
    assert pair.server.closed == ends


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_trusted_proxy_is_not_hung_up_on_for_what_one_of_its_clients_does(
    trusted: bool,
) -> None:
    settings = {"trusted_proxies": ("127.0.0.1",)} if trusted else {}
    async with (
        ScriptedOrigin(3).listening() as origin,
        serving(origin, **settings) as behind,
        Http2Peer.of(behind) as peer,
    ):
        count = 2 * int(MAX_POINTS / REFUSED_POINTS)
        while len(peer.ended) < count and peer.goaway is None:
            stream = peer.ask("POST", "/v1/generate", {"accept": "text/event-stream"})
            await peer.until(lambda stream=stream: stream in peer.ended)
        assert (len(peer.ended) == count) == trusted
