"""Many streams on one WebSocket: credit, resumption, cancel and detach, death in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Cancel,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Resume,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    decode,
    encode,
    split,
)
from tests.e2e.multiplex import Stream, connected
from tests.e2e.sse import SSE, events
from tests.runtimes.conftest import Scripts
from tests.runtimes.runtime import Runtime
from tests.runtimes.scripted_producer import Script

pytestmark = pytest.mark.anyio

STREAMS = 12
WORDS = 24
CREDIT = 1000
MOST_CORRS = 256
PATIENCE_S = 60.0


def opens(told: Script, count: int = STREAMS, credit: int = CREDIT) -> list[Open]:
    return [Open(credit=credit, **told.body) for _ in range(count)]


def assert_whole(streams: list[Stream], told: Script) -> None:
    assert [stream.text for stream in streams] == [told.text] * len(streams)
    assert all(stream.ended for stream in streams)


async def resumed(url: str, streams: list[Stream]) -> None:
    async with connected(url, streams) as client:
        await client.resume(CREDIT)
        await client.drain()


@asynccontextmanager
async def greeted(url: str) -> AsyncIterator[ClientConnection]:
    async with connect(url.replace("http", "ws", 1) + "/v1/ws", compression=None) as socket:
        await socket.send(encode(Hello(SCHEMA_HASH, "test")))
        yield socket


async def arriving(socket: ClientConnection) -> AsyncIterator[tuple[int, Frame]]:
    """Yield what comes on the corrs of requests."""
    async for message in socket:
        assert isinstance(message, bytes)
        for corr, frame in map(decode, split(message)):
            if not isinstance(frame, Hello | Heartbeat):
                yield corr, frame


async def test_credit_stops_each_stream_by_itself_and_each_goes_on_from_there(
    stage: Runtime, script: Scripts
) -> None:
    told = script(WORDS)
    streams = [Stream() for _ in range(STREAMS)]
    cuts = [2 * n for n in range(STREAMS)]  # the first one is given none
    async with connected(stage.url, streams) as client:
        await client.open(opens(told, credit=0))
        for n, cut in enumerate(cuts):
            await client.grant(n, cut)
        async for _ in client.read():
            if [len(stream.frames) for stream in streams] == cuts:
                break
            assert all(len(s.frames) <= cut for s, cut in zip(streams, cuts, strict=True))
    await resumed(stage.url, [stream for stream in streams if stream.id])
    assert_whole(streams, told)


async def test_an_answer_comes_before_the_first_frame_however_live_the_stream_is(
    stage: Runtime, client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(400, pace_s=0.001)
    seen: dict[int, list[Frame]] = {}
    async with (
        client.stream("POST", "/v1/generate", json=told.body, headers=SSE) as response,
        greeted(stage.url) as socket,
    ):
        stream = bytes.fromhex(response.headers["Tailrace-Stream"])
        corr = 0
        async for event in events(response):
            if event.id % 40 == 20:
                corr += 1
                await socket.send(encode(Resume(stream, after=event.id, credit=CREDIT), corr))
                seen[corr] = []
        async with asyncio.timeout(PATIENCE_S):
            async for at, frame in arriving(socket):
                seen[at].append(frame)
                if all(frames and isinstance(frames[-1], StreamEnd) for frames in seen.values()):
                    break
    assert len(seen) == 10
    for corr, (opened, *frames, end) in seen.items():
        assert isinstance(opened, Opened)
        assert isinstance(end, StreamEnd)
        first = 20 + 40 * (corr - 1) + 1
        indexes = [frame.index for frame in frames if isinstance(frame, Token)]
        assert indexes == list(range(first, 400))


async def test_a_cancel_is_answered_and_ends_the_stream_and_a_detach_does_not(
    stage: Runtime, client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(12, hold=5)
    opened: dict[int, Opened] = {}
    seen: dict[int, list[Frame]] = {1: [], 2: [], 3: []}
    async with greeted(stage.url) as socket:
        await socket.send(b"".join(encode(open_, n + 1) for n, open_ in enumerate(opens(told, 2))))
        async for corr, frame in arriving(socket):
            if isinstance(frame, Opened):
                opened[corr] = frame
            else:
                seen[corr].append(frame)
            if len(seen[1]) == len(seen[2]) == 5:
                break
        await socket.send(encode(Detach(), 1) + encode(Cancel(opened[2].stream), 3))
        async for corr, frame in arriving(socket):
            seen[corr].append(frame)
            if seen[3] and isinstance(seen[2][-1], StreamEnd):
                break
        told.go_on()
        left = Stream(opened[1].stream, opened[1].token, seen[1])
        await resumed(stage.url, [left])
    [status] = seen[3]
    assert isinstance(status, Status)
    assert status.stream == opened[2].stream
    end = seen[2][-1]
    assert isinstance(end, StreamEnd)
    assert (end.index, end.finish_reason.word) == (5, "cancelled")
    assert_whole([left], told)
    document = (await client.get(f"/v1/generate/{opened[2].stream.hex()}")).json()
    assert document["finish_reason"] == "cancelled"


async def test_who_has_the_whole_stream_is_told_that_nothing_is_left(
    stage: Runtime, script: Scripts
) -> None:
    stream = Stream()
    async with connected(stage.url, [stream]) as client:
        await client.open(opens(script(3), 1))
        await client.drain()
    async with greeted(stage.url) as socket:
        await socket.send(encode(Resume(stream.id, after=3, credit=CREDIT), 1))
        answers = arriving(socket)
        opened, status = [(await anext(answers))[1] for _ in range(2)]
    assert isinstance(opened, Opened)
    assert status == Status(stream.id, StreamState.ENDED, 4)


async def test_one_corr_too_many_is_refused_and_the_others_are_not(
    stage: Runtime, script: Scripts
) -> None:
    told = script(3)
    stream = Stream()
    async with connected(stage.url, [stream]) as client:
        await client.open(opens(told, 1))
        await client.drain()
    opened, refused = set(), []
    async with greeted(stage.url) as socket:
        for corr in range(1, MOST_CORRS + 2):
            await socket.send(encode(Resume(stream.id), corr))
        async for corr, frame in arriving(socket):
            if isinstance(frame, StreamError):
                refused.append((corr, frame.code, frame.status, frame.retryable))
            elif isinstance(frame, Opened):
                opened.add(corr)
            if len(opened) + len(refused) > MOST_CORRS:
                break
    assert opened == set(range(1, MOST_CORRS + 1))
    assert refused == [(MOST_CORRS + 1, "too_many_streams", 429, True)]


@pytest.mark.parametrize("code", [1000, 3000])
async def test_a_ping_and_a_close_are_answered(stage: Runtime, code: int) -> None:
    async with greeted(stage.url) as socket, asyncio.timeout(PATIENCE_S):
        await (await socket.ping())
        await socket.close(code)
    assert socket.close_code == code  # 1006, had the close not been answered


@pytest.mark.parametrize("dies", ["runtime", "behind"])
async def test_streams_that_a_death_cuts_off_go_on_from_what_was_read(
    stage: Runtime, script: Scripts, dies: str
) -> None:
    """The process behind the runtime can die while the client's connection lasts.

    Nothing is cut off then.
    """
    told = script(200, hold=150, pace_s=0.002)
    streams = [Stream() for _ in range(STREAMS)]

    async def read_and_kill() -> None:
        async with connected(stage.url, streams) as client:
            await client.open(opens(told))
            async for _ in client.read():
                if all(stream.frames for stream in streams):
                    break
            await (stage.kill() if dies == "runtime" else stage.behind[0].kill())
            await stage.start()
            told.go_on()
            await client.drain()

    try:
        await read_and_kill()
    except ConnectionClosed:
        assert not any(stream.ended for stream in streams)
    await resumed(stage.url, streams)
    assert_whole(streams, told)
