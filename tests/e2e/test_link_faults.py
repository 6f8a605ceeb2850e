"""Network faults between an edge and its origin, which no reader may notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import httpx
import pytest

from tailrace.edge.origins.renewal_queue import MAX_RENEWALS
from tests.bench import bench_links
from tests.e2e.cluster import Reader, request
from tests.e2e.fault_proxy import FaultProxy
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import SSE, events, start

pytestmark = pytest.mark.anyio

CUTS = 74
READERS = 8
TOKENS = 300
SEED = 11


class Way:
    """One origin, an edge of its own that is spared, and one behind a proxy that is not."""

    def __init__(self, folder: Path) -> None:
        self.origin = Origin(folder)
        self.proxy = FaultProxy(self.origin.port)
        self.spared = Edge(self.origin)
        self.edge: Edge


@pytest.fixture(scope="module")
async def way(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Way]:
    made = Way(tmp_path_factory.mktemp("faults"))
    async with made.proxy.serving():
        made.edge = Edge(made.origin, links=made.proxy.link)
        async with running(made.origin, made.spared, made.edge):
            yield made


@asynccontextmanager
async def reading(
    client: httpx.AsyncClient, way: Way, readers: list[Reader]
) -> AsyncIterator[None]:
    """While all read the same text through the proxy; at the end each has it whole."""
    whole = await start(client, way.spared.url, request(SEED, TOKENS))
    async with asyncio.TaskGroup() as group:
        for reader in readers:
            group.create_task(reader.read(client, way.edge, request(SEED, TOKENS)))
        yield
    for reader in readers:
        assert reader.reading.events == whole.events


def received(readers: list[Reader]) -> int:
    """Events, of all of them."""
    return sum(len(reader.reading.events) for reader in readers)


async def progress(readers: list[Reader], seen: int) -> None:
    """Wait until one reader has more than that, or all have everything."""
    while received(readers) <= seen:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_link_that_is_reset_74_times_under_load_costs_no_stream_and_no_request(
    way: Way, client: httpx.AsyncClient
) -> None:
    statuses: list[int] = []
    before = way.proxy.cuts

    async def ask() -> None:
        answer = await client.post(f"{way.edge.url}/v1/generate", json=request(SEED, 2))
        statuses.append(answer.status_code)

    while way.proxy.cuts - before < CUTS:
        readers = [Reader(1) for _ in range(READERS)]
        async with reading(client, way, readers), asyncio.TaskGroup() as group:
            for reader in readers:
                await reader.under_way.wait()
            while any(reader.reading.events[-1].name != "end" for reader in readers):
                seen = received(readers)
                way.proxy.cut()
                group.create_task(ask())  # in the very moment of the loss
                await progress(readers, seen)
    # A request that finds no link for 2 s gets Retry-After; none fails for good.
    assert set(statuses) <= {200, 503}
    assert 200 in statuses
    lines = [str(event) for event in way.edge.events]
    assert not [line for line in lines if "Traceback" in line or "exc_info" in line]


async def test_readers_of_one_stream_share_it_and_get_all_of_it_over_cuts(
    way: Way, client: httpx.AsyncClient
) -> None:
    whole = await start(client, way.spared.url, request(SEED, TOKENS))
    texts: list[str] = []
    shared = 0

    async def read(url: str) -> None:
        async with client.stream("GET", url, headers=SSE) as response:
            assert response.status_code == 200, await response.aread()
            parts = [e.data["text"] async for e in events(response) if e.name == "message"]
            texts.append("".join(parts))

    async with (
        asyncio.TaskGroup() as group,
        client.stream(
            "POST", f"{way.edge.url}/v1/generate", json=request(SEED, TOKENS), headers=SSE
        ) as made,
    ):
        url = f"{way.edge.url}/v1/generate/{made.headers['Tailrace-Stream']}"
        seen = 0
        async for _ in events(made):
            seen += 1
            if seen % 20 == 1:
                group.create_task(read(url))
            if seen % 90 == 45:
                way.proxy.cut()
            if seen % 30 == 0:
                shared = max(shared, await shared_readers(client, way.edge))
    assert texts == [whole.text] * len(texts)
    assert len(texts) == TOKENS // 20
    assert shared > 2


async def shared_readers(client: httpx.AsyncClient, edge: Edge) -> int:
    """Return how many readers share subscriptions at this edge now."""
    answer = await client.get(f"{edge.url}/metrics")
    name = "tailrace_edge_shared_readers{"
    [line] = [line for line in answer.text.splitlines() if line.startswith(name)]
    return int(float(line.split()[-1]))


async def test_a_slow_link_and_one_that_swallows_everything_are_pauses(
    way: Way, client: httpx.AsyncClient
) -> None:
    readers = [Reader(10) for _ in range(2)]
    async with reading(client, way, readers):
        way.proxy.delay_s = 0.05
        for reader in readers:
            await reader.under_way.wait()
        way.proxy.delay_s = 0.0
        way.proxy.swallow()
        for nth in count(1):  # those of the test above were of another kind
            gone = await way.edge.saw("origin link down", nth)
            if "silent" in gone["reason"]:
                break
        way.proxy.give_way()


async def test_more_readers_than_are_renewed_at_a_time_read_on_after_a_cut_and_a_killed_origin(
    tmp_path: Path,
) -> None:
    found = await bench_links.measure(tmp_path, 5 * MAX_RENEWALS, held_s=1.0, pinned=False)
    assert found["links_lost"] == 0
