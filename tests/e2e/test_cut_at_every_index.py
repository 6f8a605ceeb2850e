"""A 60-token stream, cut at every index and resumed on another edge: nothing lost or doubled."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from ledger.frame import LOGGED, Frame, Splitter, StreamEnd, Token, decode, tag_of
from tests.e2e.conftest import House
from tests.e2e.sse import Reading, resume, start

pytestmark = pytest.mark.anyio

TOKENS = 60
REQUEST = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 42,
    "ignore_eos": True,
}
AT_ONCE = 4
FRAMES = "application/vnd.tailrace.frames"


async def each_index(work: Callable[[int], Awaitable[None]], count: int) -> None:
    """Run `work` for each index below `count`, a few at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def guarded(index: int) -> None:
        async with gate:
            await work(index)

    async with asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(guarded(index))


async def test_over_sse(standing_house: House, client: httpx.AsyncClient) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    whole = await start(client, one, REQUEST)
    assert whole.end["total_tokens"] == TOKENS
    assert whole.end["finish_reason"] == "length"
    assert whole.indexes == list(range(len(whole.events)))
    streams = set()

    async def cut_at(index: int) -> None:
        cut = await start(client, one, REQUEST, stop_after=index)
        assert len(cut.events) == index
        joined = await resume(client, two, cut)
        assert joined.text == whole.text
        assert joined.indexes == whole.indexes
        assert joined.end == whole.end
        streams.add(joined.stream)

    await each_index(cut_at, len(whole.events))
    assert len(streams) == len(whole.events)  # each cut had a stream of its own


async def test_over_raw_frames(standing_house: House, client: httpx.AsyncClient) -> None:
    one, two = (edge.url for edge in standing_house.edges)

    async def read(response: httpx.Response, count: int | None) -> list[Frame]:
        assert response.status_code == 200, await response.aread()
        splitter, frames = Splitter(), list[Frame]()
        async for data in response.aiter_raw():
            for raw in splitter.feed(data):
                if tag_of(raw) in LOGGED and (count is None or len(frames) < count):
                    frames.append(decode(raw)[1])
            if count is not None and len(frames) >= count:
                break
        return frames

    async def begin(count: int | None) -> tuple[str, list[Frame]]:
        async with client.stream(
            "POST", f"{one}/v1/generate", json=REQUEST, headers={"Accept": FRAMES}
        ) as response:
            return response.headers["Tailrace-Stream"], await read(response, count)

    async def go_on(stream: str, after: int) -> list[Frame]:
        async with client.stream(
            "GET", f"{two}/v1/generate/{stream}?after={after}", headers={"Accept": FRAMES}
        ) as response:
            return await read(response, None)

    _, whole = await begin(None)
    assert [frame.index for frame in whole if isinstance(frame, Token | StreamEnd)] == list(
        range(len(whole))
    )

    async def cut_at(index: int) -> None:
        stream, first = await begin(index + 1)
        assert first + await go_on(stream, index) == whole

    await each_index(cut_at, len(whole) - 1)


async def test_cut_again_and_again_between_two_edges(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    whole = await start(client, standing_house.edges[0].url, REQUEST)
    reading: Reading = await start(client, standing_house.edges[0].url, REQUEST, stop_after=1)
    while reading.events[-1].name != "end":
        edge = standing_house.edges[len(reading.events) % 2]
        await resume(client, edge.url, reading, stop_after=1)
    assert reading.text == whole.text
    assert reading.indexes == whole.indexes
