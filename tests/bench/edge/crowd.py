"""Readers of one stream, and followers of one chat: what each frame of each reader costs.

Origin, worker and edge are real processes on loopback. One stream gets ten words a second, and all
readers follow it, or its chat, by HTTP/1.1 as server-sent events. What is measured begins when
every reader has frames.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, cast

import httpx

from tailrace.origin.producer import About, End, Output, Request, Resumption, Text
from tests.bench.measured import cpu_s, resident_kib
from tests.e2e.fault_proxy import FaultProxy
from tests.e2e.processes import ROOT, Edge, Origin, running

PRODUCER = f"{__name__}:Paced"
FRAMES_PER_S = 10
BEGINS_TIMEOUT_S = 120.0
SETTLING_S = 2.0
"""Time for the readers that came last to get the frames that were there before."""
END = b"event: end"
TURNS = 5
"""Turns of a chat that are measured one after the other, each with one word."""
WARM_READERS = 20
"""Readers that come and go before the memory is measured, so that all code is loaded."""
FRAMES_TOTAL = "tailrace_edge_frames_total{"


class Paced:
    """A producer of ten words a second."""

    about = About("paced", "paced 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the words."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number in range(request.recipe.max_tokens):
            await asyncio.sleep(began + number / FRAMES_PER_S - loop.time())
            yield Text(" word")
        yield End(total_tokens=request.recipe.max_tokens)

    async def close(self) -> None:
        """Hold nothing."""


class CountingLink(FaultProxy):
    """A way between edge and origin that counts the bytes in both directions."""

    passed = 0

    async def _let_pass(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        self.passed += len(data)
        await super()._let_pass(data, sink)


class Reader(asyncio.Protocol):
    """A connection that counts the events it gets, and those that end a turn."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.frames = self.ends = 0
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        head = f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
        self.transport.write(head.encode())

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self.frames += 1
                self.begun.set()
            elif line == END:
                self.ends += 1
                self.ended.set()

    async def wait_for_end(self, number: int) -> None:
        """Wait until this number of turns has ended."""
        while self.ends < number:
            self.ended.clear()
            await self.ended.wait()


async def link_frames(edge: Edge) -> int:
    """Return how many frames the edge has got from its origin."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{edge.url}/metrics")).text
    [line] = [line for line in text.splitlines() if line.startswith(FRAMES_TOTAL)]
    return int(float(line.split()[-1]))


class House(NamedTuple):
    """An origin that produces words, its edge, and the way between them."""

    origin: Origin
    edge: Edge
    link: CountingLink

    @property
    def pids(self) -> tuple[int, int]:
        return self.origin.pid, self.edge.pid


@asynccontextmanager
async def house(folder: Path, tree: Path) -> AsyncIterator[House]:
    """Run a house whose processes are of the checkout `tree`."""
    settings = folder / "tailrace.toml"
    settings.write_text(f'[origin]\nproducer = "{PRODUCER}"\n')
    origin = Origin(folder / "data", config=settings)
    link = CountingLink(int(origin.link.rpartition(":")[2]))
    async with link.serving():
        edge = Edge(origin, links=link.link)
        origin.folder = edge.folder = tree
        async with running(origin, edge):
            yield House(origin, edge, link)


async def begin(edge: Edge, **fields: object) -> str:
    """Begin a stream and leave it; return its id."""
    body = {"model": "paced", "prompt": "-", **fields}
    accept = {"Accept": "text/event-stream"}
    async with (
        httpx.AsyncClient(timeout=60.0) as client,
        client.stream("POST", f"{edge.url}/v1/generate", json=body, headers=accept) as made,
    ):
        assert made.status_code == 200, await made.aread()
        stream: str = made.headers["Tailrace-Stream"]
    return stream


@asynccontextmanager
async def connected(edge: Edge, path: str, readers: int) -> AsyncIterator[list[Reader]]:
    """Connect readers of a path, and wait until each has an event."""
    crowd: list[Reader] = []
    try:
        for _ in range(readers):
            made = await asyncio.get_running_loop().create_connection(
                lambda: Reader(path), "127.0.0.1", edge.port
            )
            crowd.append(made[1])
        async with asyncio.timeout(BEGINS_TIMEOUT_S):
            for reader in crowd:
                await reader.begun.wait()
        yield crowd
    finally:
        for reader in crowd:
            reader.transport.abort()


async def cost_per_frame(house: House, crowd: list[Reader], seconds: float) -> dict[str, float]:
    """Return the processor time in us per frame of a reader, and what crosses the link per frame.

    What crosses the link is frames, and bytes in both directions.
    """
    await asyncio.sleep(SETTLING_S)
    linked, passed = await link_frames(house.edge), house.link.passed
    cpu, got = list(map(cpu_s, house.pids)), sum(reader.frames for reader in crowd)
    await asyncio.sleep(seconds)
    spent = [cpu_s(pid) - before for pid, before in zip(house.pids, cpu, strict=True)]
    frames = sum(reader.frames for reader in crowd) - got
    passed = house.link.passed - passed
    linked = await link_frames(house.edge) - linked
    return {
        "cpu_us": sum(spent) / frames * 1e6,
        "origin_cpu_us": spent[0] / frames * 1e6,
        "link_frames": linked / (frames / len(crowd)),
        "link_bytes": passed / (frames / len(crowd)),
    }


async def measure(
    folder: Path, readers: int, seconds: float, tree: Path = ROOT
) -> dict[str, float]:
    """Let many readers read one stream; return what a frame of a reader costs.

    Args:
        folder: takes the ledger.
        readers: how many follow the stream.
        seconds: how long they are measured.
        tree: the checkout whose processes run.
    """
    async with house(folder, tree) as made:
        path = f"/v1/generate/{await begin(made.edge, max_tokens=60_000)}"
        async with connected(made.edge, path, readers) as crowd:
            return await cost_per_frame(made, crowd, seconds)


async def measure_chat(
    folder: Path, readers: int, seconds: float, tree: Path = ROOT
) -> dict[str, float]:
    """Let many clients follow one chat; return what a frame, a turn and a follower cost.

    The figures of `measure` are those of a turn in progress. Names with `turn_` are of a turn of
    one word, from its request until the last follower has its end, per follower. `join_cpu_us` is
    the processor time of a follower that comes while the others do, and `edge_kib` and `origin_kib`
    are the memory of one that waits for the first turn.
    """
    async with house(folder, tree) as made:
        path = "/v1/chats/crowd"
        async with httpx.AsyncClient() as client:
            assert (await client.put(made.edge.url + path)).status_code == 204
        async with connected(made.edge, path, WARM_READERS):
            pass
        empty, before = list(map(resident_kib, made.pids)), sum(map(cpu_s, made.pids))
        async with connected(made.edge, path, readers) as crowd:
            await asyncio.sleep(SETTLING_S)
            full, joined = list(map(resident_kib, made.pids)), sum(map(cpu_s, made.pids))
            passed, cpu = made.link.passed, list(map(cpu_s, made.pids))
            began = time.perf_counter()
            for turn in range(TURNS):
                await begin(made.edge, max_tokens=1, chat="crowd")
                async with asyncio.timeout(BEGINS_TIMEOUT_S):
                    for reader in crowd:
                        await reader.wait_for_end(turn + 1)
            took_s = time.perf_counter() - began
            spent = [cpu_s(pid) - before for pid, before in zip(made.pids, cpu, strict=True)]
            passed = made.link.passed - passed
            await begin(made.edge, max_tokens=60_000, chat="crowd")
            found = await cost_per_frame(made, crowd, seconds)
    return found | {
        "join_cpu_us": (joined - before) / readers * 1e6,
        "turn_cpu_us": sum(spent) / TURNS / readers * 1e6,
        "turn_origin_cpu_us": spent[0] / TURNS / readers * 1e6,
        "turn_link_bytes": passed / TURNS / readers,
        "turn_ms": took_s / TURNS * 1e3,
        "origin_kib": (full[0] - empty[0]) / readers,
        "edge_kib": (full[1] - empty[1]) / readers,
    }
