"""The connection of a pipeline's worker to its origin, when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest

from tailrace.ledger.errors import TailraceError, Unavailable
from tailrace.ledger.frame import (
    LINK_CODEC,
    SCHEMA_HASH,
    Credit,
    Detach,
    FinishReason,
    Frame,
    Hello,
    Open,
    Opened,
    Splitter,
    StreamEnd,
    StreamError,
    Token,
    encode,
)
from tailrace.origin.pipelines.origin_client import SOFTWARE, WINDOW_FRAMES, OriginClient

pytestmark = pytest.mark.anyio

REQUEST = Open("demo", prompt="x")
STREAM = bytes(16)


class FakeOrigin:
    """The origin's end of the socket; it is told what to send."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames: asyncio.Queue[tuple[int, Frame]] = asyncio.Queue()
        self.connections = 0
        self.writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with await asyncio.start_unix_server(self._connected, self.path):
            yield
            await asyncio.gather(*self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._tasks.append(cast("asyncio.Task[None]", asyncio.current_task()))
        self.writer = writer
        self.send(0, Hello(SCHEMA_HASH, "origin"))
        splitter = Splitter()
        while data := await reader.read(1 << 16):
            for raw in splitter.feed(data):
                self.frames.put_nowait(LINK_CODEC.decode(raw))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    def send(self, corr: int, *frames: Frame) -> None:
        assert self.writer is not None
        self.writer.write(b"".join(encode(frame, corr) for frame in frames))


async def test_a_stream_is_read_with_credit_and_given_up(tmp_path: Path) -> None:
    origin = FakeOrigin(tmp_path / "socket")
    client = OriginClient(origin.path)
    async with origin.serving():
        await read_and_give_up(origin, client)


async def read_and_give_up(origin: FakeOrigin, client: OriginClient) -> None:
    frames = client.read(REQUEST)
    first = asyncio.ensure_future(anext(frames))
    assert await origin.frames.get() == (0, Hello(SCHEMA_HASH, SOFTWARE))
    corr, request = await origin.frames.get()
    assert isinstance(request, Open)
    assert request.credit == WINDOW_FRAMES
    origin.send(corr, Opened(STREAM, 0, "", "demo", 1))
    assert isinstance(await first, Opened)
    half = WINDOW_FRAMES // 2
    origin.send(corr, *(Token("x", index) for index in range(half + 1)))
    for index in range(half + 1):
        assert await anext(frames) == Token("x", index)
    origin.send(corr, Token("x", half + 1))
    await anext(frames)
    credit = await origin.frames.get()
    assert credit[0] == corr
    assert isinstance(credit[1], Credit)
    assert credit[1].limit == half + WINDOW_FRAMES
    await frames.aclose()
    assert await origin.frames.get() == (corr, Detach())
    await client.close()


async def test_a_refusal_and_a_lost_connection_are_errors_and_the_next_read_connects_again(
    tmp_path: Path,
) -> None:
    origin = FakeOrigin(tmp_path / "socket")
    client = OriginClient(origin.path)
    with pytest.raises(Unavailable, match="the origin cannot be reached"):
        await anext(client.read(REQUEST))
    async with origin.serving():
        await fail_and_read_again(origin, client)


async def fail_and_read_again(origin: FakeOrigin, client: OriginClient) -> None:
    refused = asyncio.ensure_future(anext(client.read(REQUEST)))
    await origin.frames.get()
    corr, _ = await origin.frames.get()
    origin.send(corr, StreamError("overloaded", "no room", True, 503))
    with pytest.raises(TailraceError, match="no room") as caught:
        await refused
    assert caught.value.retryable
    lost = asyncio.ensure_future(anext(client.read(REQUEST)))
    await origin.frames.get()
    assert origin.writer is not None
    origin.writer.close()
    with pytest.raises(Unavailable, match="the connection to the origin was lost"):
        await lost
    again = asyncio.ensure_future(anext(client.read(REQUEST)))
    await origin.frames.get()
    corr, _ = await origin.frames.get()
    assert origin.connections == 2
    origin.send(corr, StreamEnd(0, FinishReason.STOP, 0, 0))
    assert isinstance(await again, StreamEnd)
    await client.close()
