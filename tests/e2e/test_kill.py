"""SIGKILL mid-stream, with a real model: the reader sees a pause, and the same text.

That nothing is lost whoever dies, and at every index, is in tests/runtimes.
"""

from pathlib import Path

import httpx
import pytest

from ledger.frame import Open, Sampling
from tests.e2e.conftest import House
from tests.e2e.multiplex import Stream, connected
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import SSE, Reading, events, resume, start

pytestmark = pytest.mark.anyio

TOKENS = 400
REQUEST = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}


async def test_a_worker_killed_again_and_again_still_gives_the_same_text(
    house: House, client: httpx.AsyncClient
) -> None:
    url = house.edges[0].url
    whole = await start(client, url, REQUEST)
    reading, kills = Reading(), (1, 40, 100)
    async with client.stream("POST", f"{url}/v1/generate", json=REQUEST, headers=SSE) as response:
        async for event in events(response):
            reading.events.append(event)
            if len(reading.events) in kills:
                await house.origin.kill_worker()
                await house.origin.saw("worker.ready", 2 + kills.index(len(reading.events)))
    assert reading.events == whole.events
    await house.origin.saw("stream.taken_over", len(kills))
    taken_over = [e for e in house.origin.events if e.get("message") == "stream.taken_over"]
    assert [each["epoch"] for each in taken_over] == [2, 3, 4]
    for each, killed_at in zip(taken_over, kills, strict=True):
        assert killed_at <= each["frames"] < TOKENS  # it died in the middle


async def test_all_of_them_are_killed_during_one_stream(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    first = Origin(tmp_path)
    second = Origin(tmp_path, first.port)
    one, two = Edge(first), Edge(first)
    async with running(first, one, two, late=[second]):
        whole = await start(client, one.url, REQUEST)
        reading = await start(client, one.url, REQUEST, stop_after=10)
        await first.kill_worker()
        await one.kill()
        await first.kill()
        await second.ready()
        await two.saw("origin link up", 2)
        await resume(client, two.url, reading)
        assert (reading.text, reading.indexes) == (whole.text, whole.indexes)


async def test_a_worker_is_killed_under_twenty_streams_of_one_websocket(house: House) -> None:
    requests = [
        Open(
            "demo",
            prompt="Once upon a time",
            max_tokens=TOKENS // 2,
            ignore_eos=True,
            credit=1000,
            sampling=Sampling(temperature=0.8, seed=seed),
        )
        for seed in range(20)
    ]
    whole, streams = [Stream() for _ in requests], [Stream() for _ in requests]
    async with connected(house.edges[0].url, whole) as client:
        await client.open(requests)
        await client.drain()
    async with connected(house.edges[0].url, streams) as client:
        await client.open(requests)
        async for _ in client.read():
            if all(stream.frames for stream in streams):  # and none is near its end
                break
        await house.origin.kill_worker()
        await client.drain()
    assert [stream.frames for stream in streams] == [stream.frames for stream in whole]
    await house.origin.saw("stream.taken_over", len(streams))
    taken_over = [e for e in house.origin.events if e.get("message") == "stream.taken_over"]
    assert all(0 < event["frames"] < TOKENS // 2 for event in taken_over)
