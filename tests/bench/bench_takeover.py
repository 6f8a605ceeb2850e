"""Measure how long readers wait when one of two origins with a shared ledger is killed.

    python tests/bench/bench_takeover.py [--kills 6] [--freeze]

The demo model over loopback, PostgreSQL on a Unix socket, two readers through two edges,
HTTP/1.1 and SSE. Each kill is a SIGKILL of the origin that generates for both, or a SIGSTOP,
after which its links stand and are silent; what they read must equal the uninterrupted text. It
ends with one line of JSON; times are in s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.machine import disk, print_line  # noqa: E402
from tests.e2e.cluster import Cluster, Reader, request  # noqa: E402
from tests.e2e.processes import Edge, running  # noqa: E402
from tests.e2e.sse import TIMEOUT, start  # noqa: E402
from tests.ledger.postgres_server import PostgresServer  # noqa: E402

TOKENS = 200
KILL_AT = 40  # events of each reader


async def pauses(
    cluster: Cluster, client: httpx.AsyncClient, turn: int, *, freeze: bool
) -> list[float]:
    """Kill or freeze the origin that both edges use; what the readers then waited."""
    bodies = [request(turn * 2 + number, TOKENS) for number in range(2)]
    whole = [await start(client, cluster.edges[0].url, body) for body in bodies]
    readers = [Reader(KILL_AT) for _ in bodies]
    async with asyncio.TaskGroup() as group:
        for reader, edge, body in zip(readers, cluster.edges, bodies, strict=True):
            group.create_task(reader.read(client, edge, body))
        for reader in readers:
            await reader.under_way.wait()
        if freeze:
            os.kill(cluster.origins[turn % 2].pid, signal.SIGSTOP)
        else:
            await cluster.origins[turn % 2].kill()
    await cluster.origins[turn % 2].kill()
    for reader, uninterrupted in zip(readers, whole, strict=True):
        assert reader.reading.text == uninterrupted.text, "tokens were lost or doubled"
        assert reader.reading.indexes == uninterrupted.indexes
    return [reader.longest_pause_s for reader in readers]


async def measure(
    server: PostgresServer, folder: Path, kills: int, *, freeze: bool
) -> dict[str, Any]:
    cluster = Cluster(folder, server.dsn())
    cluster.edges = [Edge(*cluster.origins), Edge(*cluster.origins)]
    found: list[float] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT))
        await stack.enter_async_context(running(*cluster.origins, *cluster.edges))
        for turn in range(kills):
            found += await pauses(cluster, client, turn, freeze=freeze)
            dead = turn % 2
            successor = cluster.origin(("one", "two")[dead], cluster.origins[dead].port)
            cluster.origins[dead] = successor
            stack.push_async_callback(successor.stop)
            await successor.ready()
    return {
        "takeover_pause_median_s": round(statistics.median(found), 2),
        "takeover_pause_max_s": round(max(found), 2),
        "kills": kills,
        "frozen": freeze,
        "durability": "synchronous_commit=on",
        "disk": disk(server.folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--freeze", action="store_true", help="SIGSTOP in place of SIGKILL")
    options = parser.parse_args()
    server = PostgresServer.make()
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = measure(server, Path(folder), options.kills, freeze=options.freeze)
            print_line(asyncio.run(made))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
