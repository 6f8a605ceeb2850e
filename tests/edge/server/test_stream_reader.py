"""A response past the application: what a client that stalls, leaves or waits gets and costs."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tailrace.edge.flush import FlushBatch
from tailrace.edge.generate.encoders import Encoder, FrameEncoder
from tailrace.edge.openai.chat import ChatShape
from tailrace.edge.openai.chunks import ChunkEncoder
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.server.deadlines import Deadlines
from tailrace.edge.server.interfaces import Headers, ResponseWriter
from tailrace.edge.server.stream_reader import StreamReader
from tailrace.edge.telemetry.request_metrics import RequestMetrics
from tailrace.edge.unread import UnreadDefault
from tailrace.ledger.frame import (
    Credit,
    Detach,
    Frame,
    Open,
    Opened,
    Token,
    ToolCall,
    decode,
    encode,
    split,
)
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.manual_clock import ManualClock
from tests.edge.server.serving import PATIENCE_S, Client, Served, serving

pytestmark = pytest.mark.anyio

WORDS = 12_000
BODY = b'{"model": "demo", "prompt": "Once"}'
START = (
    b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
    b"Accept: application/vnd.tailrace.frames\r\n\r\n%b"
)


@pytest.fixture
async def origin() -> AsyncIterator[ScriptedOrigin]:
    async with ScriptedOrigin(WORDS).listening() as origin:
        yield origin


@pytest.fixture
async def served(origin: ScriptedOrigin) -> AsyncIterator[Served]:
    async with serving(origin) as served:
        yield served


async def received(origin: ScriptedOrigin, kind: type[Frame]) -> Frame:
    """Return the first frame of that kind that the origin has had."""
    async with asyncio.timeout(PATIENCE_S):
        count = 1
        while not (found := [f for f in origin.received if isinstance(f, kind)]):
            await origin.has_received(count)
            count = len(origin.received) + 1
    return found[0]


async def test_a_client_that_stalls_holds_a_window_and_gets_all_when_it_reads_on(
    origin: ScriptedOrigin, served: Served
) -> None:
    async with Client.connected(served) as client:
        sock: socket.socket = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.reader._limit = 1024  # type: ignore[attr-defined]  # it stops reading early
        await client.send(START % (len(BODY), BODY))
        await received(origin, Credit)
        assert len(await _whole(served)) == WORDS + 1
        assert min(origin.sent.values()) < WORDS // 2
        answer = await client.answer("POST")
    frames = [decode(raw)[1] for raw in split(answer.body)]
    assert frames == origin.frames


class Narrow:
    """A writer with room for a frame or two, which notifies its source when there is room again."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.waiting = 0
        self.disappointed = False

    def start(self, status: int, headers: Headers) -> None:
        assert status == 200

    def write(self, data: bytes) -> None:
        self.body += data
        self.waiting += len(data)

    def end(self) -> None: ...

    def reset(self) -> None: ...

    def writable_bytes(self) -> int:
        room = 40 - self.waiting
        self.disappointed = self.disappointed or room < 1
        return room


class NoOrigin:
    """The part of a link that a stream reader uses; requests go nowhere."""

    unread = UnreadDefault()

    def ask(self, sink: object, corr: int, request: Frame) -> None: ...

    def credit(self, sink: object, corr: int, credit: Credit) -> None: ...

    def forget(self, sink: object) -> None: ...


def stream_reader(batch: FlushBatch, writer: ResponseWriter, encoder: Encoder) -> StreamReader:
    """Return a reader of a stream whose frames the test delivers."""
    return StreamReader(
        cast(OriginPool, NoOrigin()),
        batch,
        Deadlines(ManualClock()),
        writer,
        encoder,
        (),
        lambda: None,
        RequestMetrics(None, "h1", "POST", "/v1/generate", ()),
    )


async def test_frames_that_have_come_leave_when_there_is_room_whatever_the_link_brings() -> None:
    batch, writer = FlushBatch(), Narrow()
    reader = stream_reader(batch, writer, FrameEncoder())
    reader.ask(Open(model="demo", prompt="Once"))
    frames = [encode(Token(" word", index), 0) for index in range(20)]
    for raw in (encode(Opened(STREAM, 0, "", "demo", 1), 0), *frames):
        reader.deliver(raw)
    batch.flush()
    while writer.disappointed:  # nothing more comes from the link
        writer.waiting, writer.disappointed = 0, False
        reader.drained()
        batch.flush()
    assert split(bytes(writer.body)) == frames
    reader._close()


async def test_a_chat_that_begins_with_a_tool_call_begins_without_text() -> None:
    batch, writer = FlushBatch(), Narrow()
    reader = stream_reader(batch, writer, ChunkEncoder(ChatShape()))
    reader.ask(Open(model="demo", prompt="Once"))
    for frame in (Opened(STREAM, 0, "", "demo", 1), ToolCall(0, "c1", "add", "", 0)):
        reader.deliver(encode(frame, 0))
    batch.flush()
    first, call = [json.loads(event[6:]) for event in bytes(writer.body).split(b"\n\n")[:-1]]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert call["choices"][0]["delta"]["tool_calls"][0]["id"] == "c1"
    reader.disconnected()


async def _whole(served: Served) -> list[bytes]:
    async with Client.connected(served) as client:
        await client.send(START % (len(BODY), BODY))
        return split((await client.answer("POST")).body)


async def test_a_client_that_leaves_is_detached(origin: ScriptedOrigin, served: Served) -> None:
    hold = b'{"model": "demo", "prompt": "hold"}'
    async with Client.connected(served) as client:
        await client.send(START % (len(hold), hold))
        await received(origin, Open)
    await received(origin, Detach)


async def test_a_reader_at_the_tip_learns_at_once_that_it_is_connected(
    origin: ScriptedOrigin, served: Served
) -> None:
    """And that a stream which says nothing goes on, by a sign of life: see KEEPALIVE_INTERVAL_S."""
    origin.released = 3
    ask = f"GET /v1/generate/{STREAM.hex()}?after=2 HTTP/1.1\r\nHost: localhost\r\n"
    async with Client.connected(served) as client:
        await client.send(f"{ask}Accept: text/event-stream\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
