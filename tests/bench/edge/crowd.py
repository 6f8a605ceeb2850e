"""Readers of one stream: the processor time of edge and origin for each frame of each reader.

Origin, worker and edge are real processes on loopback. One stream gets ten words a second, and all
readers follow it by HTTP/1.1 as server-sent events. What is measured begins when every reader has
frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import httpx

from tailrace.origin.producer import About, End, Output, Request, Resumption, Text
from tests.bench.measured import cpu_s
from tests.e2e.processes import ROOT, Edge, Origin, running

PRODUCER = f"{__name__}:Paced"
FRAMES_PER_S = 10
BEGINS_TIMEOUT_S = 120.0
SETTLING_S = 2.0
"""Time for the readers that came last to get the frames that were there before."""
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


class Reader(asyncio.Protocol):
    """A connection that counts the events it gets."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.frames = 0
        self.begun = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        head = f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
        self.transport.write(head.encode())

    def data_received(self, data: bytes) -> None:
        self.frames += data.count(b"data: ")
        if self.frames:
            self.begun.set()


async def link_frames(edge: Edge) -> int:
    """Return how many frames the edge has got from its origin."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{edge.url}/metrics")).text
    [line] = [line for line in text.splitlines() if line.startswith(FRAMES_TOTAL)]
    return int(float(line.split()[-1]))


async def measure(
    folder: Path, readers: int, seconds: float, tree: Path = ROOT
) -> dict[str, float]:
    """Return the processor time in us per frame of a reader, and frames on the link per frame.

    Args:
        folder: takes the ledger.
        readers: how many follow the stream.
        seconds: how long they are measured.
        tree: the checkout whose processes run.
    """
    settings = folder / "tailrace.toml"
    settings.write_text(f'[origin]\nproducer = "{PRODUCER}"\n')
    origin = Origin(folder / "data", config=settings)
    edge = Edge(origin)
    origin.folder = edge.folder = tree
    async with running(origin, edge):
        body = {"model": "paced", "prompt": "-", "max_tokens": 60_000}
        accept = {"Accept": "text/event-stream"}
        async with (
            httpx.AsyncClient(timeout=60.0) as client,
            client.stream("POST", f"{edge.url}/v1/generate", json=body, headers=accept) as made,
        ):
            assert made.status_code == 200, await made.aread()
            path = f"/v1/generate/{made.headers['Tailrace-Stream']}"
        crowd: list[Reader] = []
        for _ in range(readers):
            connected = await asyncio.get_running_loop().create_connection(
                lambda: Reader(path), "127.0.0.1", edge.port
            )
            crowd.append(connected[1])
        async with asyncio.timeout(BEGINS_TIMEOUT_S):
            for reader in crowd:
                await reader.begun.wait()
        await asyncio.sleep(SETTLING_S)
        pids = (origin.pid, edge.pid)
        linked = await link_frames(edge)
        cpu, got = [cpu_s(pid) for pid in pids], sum(reader.frames for reader in crowd)
        await asyncio.sleep(seconds)
        spent = [cpu_s(pid) - before for pid, before in zip(pids, cpu, strict=True)]
        frames = sum(reader.frames for reader in crowd) - got
        linked = await link_frames(edge) - linked
        for reader in crowd:
            reader.transport.abort()
    return {
        "cpu_us": sum(spent) / frames * 1e6,
        "origin_cpu_us": spent[0] / frames * 1e6,
        "link_frames": linked / (frames / readers),
    }
