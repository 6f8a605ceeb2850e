"""Each process killed by SIGKILL mid-stream: the reader sees a pause, and the same text."""

from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import House
from tests.e2e.processes import Edge, Origin, Process, running
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


def messages(process: Process, name: str) -> list[dict[str, object]]:
    return [event for event in process.events if event.get("message") == name]


@pytest.mark.parametrize("after", [1, 30, 150])
async def test_the_worker_is_killed_and_the_reader_stays_connected(
    house: House, client: httpx.AsyncClient, after: int
) -> None:
    url = house.edges[0].url
    whole = await start(client, url, REQUEST)
    reading = Reading()
    async with client.stream("POST", f"{url}/v1/generate", json=REQUEST, headers=SSE) as response:
        async for event in events(response):
            reading.events.append(event)
            if len(reading.events) == after:
                await house.origin.kill_worker()
    assert reading.text == whole.text
    assert reading.indexes == whole.indexes
    assert reading.end == whole.end
    await house.origin.saw("stream.taken_over")
    [taken_over] = messages(house.origin, "stream.taken_over")
    assert taken_over["epoch"] == 2
    assert after <= int(str(taken_over["frames"])) < TOKENS  # it died in the middle


async def test_a_worker_killed_again_and_again_still_gives_the_same_text(
    house: House, client: httpx.AsyncClient
) -> None:
    url = house.edges[0].url
    whole = await start(client, url, REQUEST)
    reading, kills = Reading(), (10, 60, 120)
    async with client.stream("POST", f"{url}/v1/generate", json=REQUEST, headers=SSE) as response:
        async for event in events(response):
            reading.events.append(event)
            if len(reading.events) in kills:
                await house.origin.kill_worker()
                await house.origin.saw("worker.ready", 2 + kills.index(len(reading.events)))
    assert (reading.text, reading.indexes) == (whole.text, whole.indexes)
    await house.origin.saw("stream.taken_over", len(kills))
    epochs = [event["epoch"] for event in messages(house.origin, "stream.taken_over")]
    assert epochs == [2, 3, 4]


async def test_the_edge_is_killed_and_the_reader_resumes_on_another(
    house: House, client: httpx.AsyncClient
) -> None:
    one, two = house.edges
    whole = await start(client, one.url, REQUEST)
    reading = Reading()

    async def read_and_kill() -> None:
        async with client.stream(
            "POST", f"{one.url}/v1/generate", json=REQUEST, headers=SSE
        ) as response:
            reading.stream = response.headers["Tailrace-Stream"]
            async for event in events(response):
                reading.events.append(event)
                if len(reading.events) == 20:
                    await one.kill()

    with pytest.raises(httpx.TransportError):
        await read_and_kill()
    assert 20 <= len(reading.events) < TOKENS
    await resume(client, two.url, reading)
    assert (reading.text, reading.indexes) == (whole.text, whole.indexes)
    assert reading.end == whole.end


async def test_the_origin_is_killed_and_the_reader_stays_connected(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    first = Origin(tmp_path)
    second = Origin(tmp_path, first.port)
    edge = Edge(first)
    async with running(first, edge, late=[second]):
        whole = await start(client, edge.url, REQUEST)
        reading = Reading()
        async with client.stream(
            "POST", f"{edge.url}/v1/generate", json=REQUEST, headers=SSE
        ) as response:
            async for event in events(response):
                reading.events.append(event)
                if len(reading.events) == 20:
                    await first.kill()
                    await second.ready()
        assert (reading.text, reading.indexes) == (whole.text, whole.indexes)
        assert reading.end == whole.end
        [taken_over] = messages(second, "stream.taken_over")
        assert 20 <= int(str(taken_over["frames"])) < TOKENS


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
