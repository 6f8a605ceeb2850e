"""Streams that nobody reads: they starve nobody, and may pause until somebody does."""

from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from tailrace.edge.session import MAX_UNFINISHED
from tailrace.ledger.frame import (
    SCHEMA_HASH,
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
TOKENS = 250


async def test_a_client_that_opens_all_it_may_and_leaves_keeps_nobody_waiting(
    house: House, client: httpx.AsyncClient
) -> None:
    requests = [
        Open(
            "demo",
            prompt="Once upon",
            max_tokens=LONG,
            ignore_eos=True,
            sampling=Sampling(seed=seed),
        )
        for seed in range(MAX_UNFINISHED + 1)
    ]
    sent = [encode(Hello(SCHEMA_HASH, "test"))] + [encode(r, n) for n, r in enumerate(requests, 1)]
    abandoned: list[str] = []
    refused = None
    async with connect(house.edges[0].url.replace("http", "ws", 1) + "/v1/ws") as socket:
        await socket.send(b"".join(sent))
        while len(abandoned) < MAX_UNFINISHED or refused is None:
            for _, frame in map(decode, split(bytes(await socket.recv(decode=False)))):
                if isinstance(frame, Opened):
                    abandoned.append(frame.stream.hex())
                elif isinstance(frame, StreamError):
                    refused = frame
    assert (refused.code, refused.status) == ("too_many_streams", 429)
    assert refused.retry_after_ms is not None
    edge = house.edges[1].url
    answer = await client.post(f"{edge}/v1/generate", json=request(1, 20))
    assert answer.json()["total_tokens"] == 20
    for stream in abandoned:
        state = (await client.get(f"{edge}/v1/generate/{stream}")).json()["state"]
        assert state == "running", "it came after one that had ended"


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
