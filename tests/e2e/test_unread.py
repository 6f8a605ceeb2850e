"""Unread streams: they starve no read stream, and may pause until a client reads them."""

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner
from websockets.asyncio.client import connect

from tailrace.cli import app
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Detach,
    Hello,
    Open,
    Opened,
    Sampling,
    StreamError,
    decode,
    encode,
    split,
)
from tests.e2e.cluster import request
from tests.e2e.conftest import House
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, running
from tests.e2e.sse import SSE, Reading, events, start

pytestmark = pytest.mark.anyio

LONG = 900
MANY = 64
ROOM = 16
"""Streams that an origin takes."""
OF_A_KEY = 5
"""Streams of a tenant that may not have ended."""
TOKENS = 250


async def test_a_client_that_opens_many_streams_and_leaves_keeps_nobody_waiting(
    house: House, client: httpx.AsyncClient
) -> None:
    abandoned, refused = await opened_and_left(house.edges[0].url, MANY)
    assert (len(abandoned), refused) == (MANY, [])
    edge = house.edges[1].url
    answer = await client.post(f"{edge}/v1/generate", json=request(1, 20))
    assert answer.json()["total_tokens"] == 20
    for stream in abandoned:
        state = (await client.get(f"{edge}/v1/generate/{stream}")).json()["state"]
        assert state == "running", "it came after one that had ended"


async def test_streams_that_are_opened_and_left_are_bounded_by_the_origin(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    """Attack: over one WebSocket after another, open streams and detach from them at once."""
    origin = HeldOrigin(tmp_path / "data")
    origin.environment["TAILRACE_ORIGIN_MAX_STREAMS"] = str(ROOM)
    origin.hold(1)
    edge = Edge(origin)
    async with running(origin, edge):
        taken = [await opened_and_left(edge.url, ROOM) for _ in range(3)]
        # Some of the room is kept for more urgent classes, and a stream that is being opened counts
        # twice for a moment: so it may be one or two less.
        assert ROOM - 4 <= sum(len(streams) for streams, _ in taken) <= ROOM
        assert {each for _, refused in taken for each in refused} == {("overloaded", 503)}
        origin.go_on()
        for stream in [each for streams, _ in taken for each in streams]:
            read = await client.get(f"{edge.url}/v1/generate/{stream}", headers=SSE)
            assert "event: end" in read.text
        answer = await client.post(f"{edge.url}/v1/generate", json=request(1, 20))
        assert answer.json()["total_tokens"] == 20


async def test_streams_that_a_tenant_opens_and_leaves_are_bounded_by_its_key(
    tmp_path: Path,
) -> None:
    """Attack: the same with a key, whose limit holds for all connections together."""
    keys = tmp_path / "api-keys.json"
    acme, other = (
        {"Authorization": f"Bearer {added(keys, tenant)}"} for tenant in ("acme", "other")
    )
    origin = HeldOrigin(tmp_path / "data")
    origin.hold(1)
    edge = Edge(origin)
    edge.environment["TAILRACE_EDGE_API_KEYS"] = str(keys)
    async with running(origin, edge):
        taken = [await opened_and_left(edge.url, OF_A_KEY, acme) for _ in range(3)]
        assert sum(len(streams) for streams, _ in taken) == OF_A_KEY
        assert {each for _, refused in taken for each in refused} == {("too_many_streams", 429)}
        assert len((await opened_and_left(edge.url, 1, other))[0]) == 1


def added(keys: Path, tenant: str) -> str:
    """Return a new key of the tenant, which may have OF_A_KEY streams that have not ended."""
    words = ["key", "add", tenant, "--tenant", tenant, "--max-unfinished", OF_A_KEY]
    done = CliRunner().invoke(app, [*map(str, words), "--keys", str(keys), "--json"])
    assert done.exit_code == 0, done.output
    key: str = json.loads(done.stdout)["key"]
    return key


async def opened_and_left(
    url: str, count: int, headers: dict[str, str] | None = None
) -> tuple[list[str], list[tuple[str, int]]]:
    """Open `count` streams over one WebSocket and detach from each.

    Returns the ids of the opened streams, and the code and status of each refusal.
    """
    opens = [
        Open("demo", prompt="Once", max_tokens=LONG, ignore_eos=True, sampling=Sampling(seed=seed))
        for seed in range(count)
    ]
    opened, refused = list[str](), list[tuple[str, int]]()
    url = url.replace("http", "ws", 1) + "/v1/ws"
    async with connect(url, additional_headers=headers) as socket:
        await socket.send(encode(Hello(SCHEMA_HASH, "test")))
        await socket.send(b"".join(encode(each, corr) for corr, each in enumerate(opens, 1)))
        while len(opened) + len(refused) < count:
            for corr, frame in map(decode, split(await socket.recv(decode=False))):
                if isinstance(frame, Opened):
                    opened.append(frame.stream.hex())
                    await socket.send(encode(Detach(), corr))
                elif isinstance(frame, StreamError):
                    refused.append((frame.code, frame.status))
    return opened, refused


async def test_a_paused_stream_goes_on_when_it_is_read_again_also_after_a_restart(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    origin = HeldOrigin(tmp_path / "data")
    edge = Edge(origin)
    async with running(origin, edge):
        await paused_and_read(origin, edge.url, client)


async def paused_and_read(origin: HeldOrigin, edge: str, client: httpx.AsyncClient) -> None:
    whole = await start(client, edge, request(5, TOKENS))
    body = request(5, TOKENS) | {"unread": {"then": "pause", "after_s": 1}}
    reading = Reading()

    async def read(method: str, url: str, most: int) -> None:
        sent = body if method == "POST" else None
        async with client.stream(method, url, headers=SSE, json=sent) as response:
            reading.stream = response.headers["Tailrace-Stream"]
            async for event in events(response):
                reading.events.append(event)
                if len(reading.events) == most:
                    return

    origin.hold_behind(whole, 3)
    await read("POST", f"{edge}/v1/generate", 3)
    place = f"{edge}/v1/generate/{reading.stream}"
    await origin.saw("stream.paused")
    seen = (await client.get(place)).json()
    assert seen["state"] == "running"
    assert seen["next_index"] < TOKENS
    origin.hold_behind(whole, 100)
    await read("GET", f"{place}?after={reading.indexes[-1]}", 100)
    await origin.saw("stream.paused", 2)
    await origin.kill()
    again = HeldOrigin(origin.data, origin.port)
    async with running(again):
        await again.saw("stream.paused")  # held until then, or it may end before it is paused
        again.go_on()
        await read("GET", f"{place}?after={reading.indexes[-1]}", -1)
    assert reading.events == whole.events
