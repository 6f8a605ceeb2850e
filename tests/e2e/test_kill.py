"""SIGKILL mid-stream, with a real model: the reader sees a pause, and the same text.

That nothing is lost whoever dies, and at every index, is in tests/runtimes.
"""

from pathlib import Path

import httpx
import pytest

from tailrace.ledger.frame import Open, Sampling
from tests.e2e.conftest import HeldHouse
from tests.e2e.held import HeldOrigin
from tests.e2e.multiplex import Stream, connected
from tests.e2e.processes import Edge, running
from tests.e2e.sse import SSE, Reading, events, resume, start

pytestmark = pytest.mark.anyio

TOKENS = 250
CHARACTERS = 200
"""At which twenty streams are held, with their worker: some have begun by then, none has ended."""
REQUEST = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}


async def test_a_worker_killed_again_and_again_still_gives_the_same_text(
    house: HeldHouse, client: httpx.AsyncClient
) -> None:
    url = house.edges[0].url
    whole = await start(client, url, REQUEST)
    reading, kills = Reading(), [1, 40, 100]
    house.origin.hold_behind(whole, kills[0])
    async with client.stream("POST", f"{url}/v1/generate", json=REQUEST, headers=SSE) as response:
        async for event in events(response):
            reading.events.append(event)
            if len(reading.events) in kills:
                at = kills.index(len(reading.events))
                await house.origin.kill_worker()
                house.origin.hold_behind(whole, [*kills, TOKENS][at + 1])
                await house.origin.saw("worker.ready", 2 + at)
                await house.origin.saw("stream.taken_over", at + 1)  # the next worker has it now
    assert reading.events == whole.events
    taken_over = [e for e in house.origin.events if e.get("message") == "stream.taken_over"]
    assert [each["epoch"] for each in taken_over] == [2, 3, 4]
    for each, killed_at in zip(taken_over, kills, strict=True):
        assert killed_at <= each["frames"] < TOKENS  # the worker died in the middle


async def test_all_of_them_are_killed_during_one_stream(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    first = HeldOrigin(tmp_path / "data")
    second = HeldOrigin(first.data, first.port)
    one, two = Edge(first), Edge(first)
    async with running(first, one, two, late=[second]):
        whole = await start(client, one.url, REQUEST)
        first.hold_behind(whole, 10)
        reading = await start(client, one.url, REQUEST, stop_after=10)
        await first.kill_worker()
        await one.kill()
        await first.kill()
        second.go_on()
        await second.ready()
        await two.saw("origin link up", 2)
        await resume(client, two.url, reading)
        assert (reading.text, reading.indexes) == (whole.text, whole.indexes)


async def test_a_worker_is_killed_under_twenty_streams_of_one_websocket(house: HeldHouse) -> None:
    requests = [
        Open(
            "demo",
            prompt="Once upon a time",
            max_tokens=TOKENS,
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
    house.origin.hold(CHARACTERS)
    async with connected(house.edges[0].url, streams) as client:
        await client.open(requests)
        await client.opened()
        if not any(stream.frames for stream in streams):
            await anext(client.read())
        await house.origin.kill_worker()
        house.origin.go_on()
        await client.drain()
    assert [stream.frames for stream in streams] == [stream.frames for stream in whole]
    for count in range(1, len(streams) + 1):
        taken_over = await house.origin.saw("stream.taken_over", count)
        assert taken_over["frames"] < TOKENS
        if taken_over["frames"]:  # it had begun; others may have had their turn later
            break
