"""A worker that is stopped under its streams: its successor goes on with the same tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import Reader, request
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import Reading, start

pytestmark = pytest.mark.anyio

STREAMS = 3
TOKENS = 300
SETTINGS = "[origin]\nworker_silence_s = 3\n"


async def test_a_worker_that_hangs_is_noticed_and_its_streams_go_on_exactly(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    settings = tmp_path / "tailrace.toml"
    settings.write_text(SETTINGS)
    origin = Origin(tmp_path / "data", config=settings)
    edge = Edge(origin)
    async with running(origin, edge):
        alone = await asyncio.gather(*(whole(client, edge, seed) for seed in range(STREAMS)))
        readers = [Reader(10) for _ in range(STREAMS)]
        bodies = [request(seed, TOKENS) for seed in range(STREAMS)]
        reads = [
            asyncio.create_task(reader.read(client, edge, body))
            for reader, body in zip(readers, bodies, strict=True)
        ]
        for reader in readers:
            await reader.under_way.wait()
        os.kill(origin.worker_pid(), signal.SIGSTOP)
        await origin.saw("worker.hung")
        await origin.saw("worker.ready", 2)
        await asyncio.gather(*reads)
    assert [r.reading.text for r in readers] == [reading.text for reading in alone]
    assert [r.reading.indexes for r in readers] == [reading.indexes for reading in alone]


async def whole(client: httpx.AsyncClient, edge: Edge, seed: int) -> Reading:
    return await start(client, edge.url, request(seed, TOKENS))
