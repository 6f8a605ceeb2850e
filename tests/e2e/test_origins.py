"""Origins and edges on one PostgreSQL: a dead origin's streams go on at another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from tailrace.origin.config import LedgerConfig
from tests.e2e.cluster import Cluster, Reader, request
from tests.e2e.processes import Edge, running
from tests.e2e.sse import SSE, Reading, events, resume, start
from tests.e2e.test_chats import Event, follow, listed
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

TOKENS = 150
LONG = 600
PATIENCE_S = 60.0
BEFORE_THE_KILL = 20
"""Events that every reader has when an origin is killed."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer.make()
    yield made
    made.stop()


@pytest.fixture(scope="module")
async def standing(
    server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """For tests that kill nothing; each edge has an origin of its own."""
    with server.database() as dsn:
        made = Cluster(tmp_path_factory.mktemp("cluster"), dsn, apart=True)
        async with running(*made.origins, *made.edges):
            yield made


@pytest.fixture
async def cluster(server: PostgresServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    with server.database() as dsn:
        made = Cluster(tmp_path, dsn)
        async with running(*made.origins, *made.edges):
            yield made


@pytest.mark.parametrize("dead", [0, 1])
async def test_a_killed_origins_streams_go_on_at_the_other(
    cluster: Cluster, client: httpx.AsyncClient, dead: int
) -> None:
    bodies = [request(seed, LONG, cluster.prompt_of(seed % 2)) for seed in range(4)]
    whole = await asyncio.gather(*(start(client, cluster.edges[0].url, body) for body in bodies))
    readers = [Reader(BEFORE_THE_KILL) for _ in bodies]
    async with asyncio.TaskGroup() as group:
        for number, (reader, body) in enumerate(zip(readers, bodies, strict=True)):
            group.create_task(reader.read(client, cluster.edges[number % 2], body))
        for reader in readers:
            await reader.under_way.wait()
        await cluster.origins[dead].kill()
    for reader, uninterrupted in zip(readers, whole, strict=True):
        assert reader.reading.text == uninterrupted.text
        assert reader.reading.indexes == uninterrupted.indexes
        assert reader.reading.end == uninterrupted.end
    await cluster.origins[1 - dead].saw("stream.taken_over", 2)
    taken = cluster.logged(1 - dead, "stream.taken_over")
    # Streams that had begun at the dead origin.
    assert [event["epoch"] for event in taken] == [2, 2]
    assert all(BEFORE_THE_KILL <= int(event["frames"]) < LONG for event in taken)


async def test_of_three_origins_two_die_and_one_that_loads_is_not_asked(
    server: PostgresServer, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    bodies = [request(seed, TOKENS) for seed in range(6)]
    readers = [Reader(BEFORE_THE_KILL) for _ in bodies]
    with server.database() as dsn:
        three = Cluster(tmp_path, dsn, origins=3)
        edge = three.edges[0]
        async with running(*three.origins, edge):
            whole = [await start(client, edge.url, body) for body in bodies]
            async with asyncio.TaskGroup() as group:
                for reader, body in zip(readers, bodies, strict=True):
                    group.create_task(reader.read(client, edge, body))
                for reader in readers:
                    await reader.under_way.wait()
                await three.origins[0].kill()
                await three.origins[1].kill()
            again = three.origin("one", three.origins[0].port)
            async with running(late=[again]):
                await again.start()
                await edge.saw("origin link up", 4)
                while not any(event.get("message") == "worker.ready" for event in again.events):
                    answer = await start(client, edge.url, request(9, 3))
                    assert answer.end["finish_reason"] == "length"
    for reader, uninterrupted in zip(readers, whole, strict=True):
        assert reader.reading.events == uninterrupted.events


async def test_a_frozen_origins_readers_move_on_when_its_lease_is_over(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    bodies = [request(seed, LONG, cluster.prompt_of(seed % 2)) for seed in range(4)]
    whole = await asyncio.gather(*(start(client, cluster.edges[1].url, body) for body in bodies))
    readers = [Reader(BEFORE_THE_KILL) for _ in bodies]
    frozen, edge = cluster.origins[0], cluster.edges[0]
    async with asyncio.TaskGroup() as group:
        for reader, body in zip(readers, bodies, strict=True):
            group.create_task(reader.read(client, edge, body))
        for reader in readers:
            await reader.under_way.wait()
        os.kill(frozen.pid, signal.SIGSTOP)
    os.kill(frozen.pid, signal.SIGCONT)
    for reader, uninterrupted in zip(readers, whole, strict=True):
        assert reader.reading.events == uninterrupted.events
    down = await edge.saw("origin link down")
    assert down["reason"] == f"the origin was silent for {LedgerConfig().lease_s:g} s"
    await cluster.origins[1].saw("stream.taken_over", 2)
    assert cluster.count(1, "stream.taken_over") == 2


async def test_a_stream_is_resumed_at_the_other_origin_while_the_first_generates_it(
    standing: Cluster, client: httpx.AsyncClient
) -> None:
    one, two = standing.edges
    whole = await start(client, one.url, request(5, LONG))
    cut = await start(client, one.url, request(5, LONG), stop_after=10)
    joined = await resume(client, two.url, cut)
    assert (joined.text, joined.indexes) == (whole.text, whole.indexes)
    assert joined.end == whole.end
    assert standing.count(1, "stream.taken_over") == 0


async def test_a_stream_is_cancelled_at_the_other_origin(
    standing: Cluster, client: httpx.AsyncClient
) -> None:
    one, two = standing.edges
    refused = standing.count(0, "append.refused")
    url = f"{one.url}/v1/generate"
    reading = Reading()
    async with client.stream("POST", url, json=request(7, LONG), headers=SSE) as response:
        stream, token = (response.headers[f"Tailrace-{name}"] for name in ("Stream", "Token"))
        async for event in events(response):
            reading.events.append(event)
            if len(reading.events) == 10:
                target = f"{two.url}/v1/generate/{stream}/cancel"
                cancelled = await client.post(target, headers={"Tailrace-Token": token})
                assert cancelled.json()["state"] == "ended"
    assert reading.end["finish_reason"] == "cancelled"
    assert reading.indexes == list(range(len(reading.events)))
    assert cancelled.json()["next_index"] == len(reading.events) < LONG
    await standing.origins[0].saw("append.refused", refused + 1)  # and it has stopped


async def test_an_open_that_is_sent_to_both_origins_makes_one_stream(
    standing: Cluster, client: httpx.AsyncClient
) -> None:
    async def open_at(edge: Edge) -> tuple[str, str]:
        body, headers = request(8, 60), {"Idempotency-Key": "the same"}
        answer = await client.post(f"{edge.url}/v1/generate", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.headers["Tailrace-Stream"], answer.json()["text"]

    for _ in range(2):  # the second time it is there already
        first, second = await asyncio.gather(*map(open_at, standing.edges))
        assert first == second


async def test_writers_and_readers_of_one_stream_share_it_across_origins(
    standing: Cluster, client: httpx.AsyncClient
) -> None:
    """Two writers, each at another origin, and 20 readers: nobody is turned away."""
    writes, readers = 30, 20
    urls = [f"{edge.url}/v1/stream/shared" for edge in standing.edges]
    text = {"Content-Type": "text/plain"}
    assert (await client.put(urls[0], headers=text)).status_code == 201
    statuses: list[int] = []

    async def write(url: str, mark: str) -> None:
        for index in range(writes):
            answer = await client.post(url, headers=text, content=f"{mark}{index};")
            statuses.append(answer.status_code)

    async def read(number: int) -> None:
        url, query = urls[number % 2], "?offset=-1"
        while True:
            answer = await client.get(url + query)
            statuses.append(answer.status_code)
            if "stream-closed" in answer.headers:
                return
            query = f"?offset={answer.headers['stream-next-offset']}&live=long-poll"

    async with asyncio.TaskGroup() as group:
        for number in range(readers):
            group.create_task(read(number))
        async with asyncio.TaskGroup() as writers:
            for url, mark in zip(urls, "ab", strict=True):
                writers.create_task(write(url, mark))
        assert (await client.post(urls[1], headers={"Stream-Closed": "true"})).status_code == 204
    assert set(statuses) <= {200, 204}
    stored = (await client.get(urls[1] + "?offset=-1")).text.split(";")[:-1]
    for mark in "ab":
        assert [s for s in stored if s[0] == mark] == [f"{mark}{index}" for index in range(writes)]


async def until_presence(reading: AsyncGenerator[Event, None], readers: int) -> None:
    """Read the events of a chat until one says that it has this number of readers."""
    async for event in reading:
        if event.name == "presence" and event.data["readers"] == readers:
            return
    raise AssertionError(f"the response ended before there were {readers} readers")


async def test_a_chats_presence_is_the_sum_over_the_origins_and_a_dead_ones_readers_leave(
    server: PostgresServer, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    with server.database() as dsn:
        cluster = Cluster(tmp_path, dsn, apart=True)
        one, two = (edge.url for edge in cluster.edges)
        async with running(*cluster.origins, *cluster.edges):
            assert (await client.put(f"{one}/v1/chats/c")).status_code == 204
            async with aclosing(follow(client, one, "c", "turns=1")) as first:
                await until_presence(first, 1)
                async with (
                    aclosing(follow(client, two, "c", "turns=1")) as second,
                    aclosing(follow(client, two, "c", "turns=1")) as third,
                ):
                    # A reader at each origin learns of those at the other one.
                    _ = await asyncio.gather(
                        *(until_presence(each, 3) for each in (first, second, third))
                    )
                    for url in (one, two):
                        assert (await listed(client, url, "c"))["readers"] == 3
                    await third.aclose()
                    await until_presence(first, 2)
                    await until_presence(second, 2)
                    await cluster.origins[1].kill()
                    await until_presence(first, 1)
            # The edge learns a moment after the test that this response was closed.
            async with asyncio.timeout(PATIENCE_S):
                while (await listed(client, one, "c"))["readers"] > 0:
                    pass
