"""Measure how long a reader waits after a cut or a kill, through real processes.

    python tests/bench/bench_resume.py [--cuts 40] [--kills 5]

Every figure is of the demo model over loopback, one reader, HTTP/1.1 and SSE, durability
`process`. It ends with one line of JSON; times are in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.machine import print_line  # noqa: E402
from tests.e2e.processes import Edge, Origin, running  # noqa: E402
from tests.e2e.sse import SSE, TIMEOUT, Reading, events, resume, start  # noqa: E402

REQUEST: dict[str, Any] = {
    "model": "demo",
    "prompt": "Once upon a time",
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}
TOKENS = 400
KILL_AT = 40  # tokens


class Bench:
    """An origin, two edges, and a warm connection to each edge."""

    def __init__(self, origin: Origin, edges: tuple[Edge, Edge], client: httpx.AsyncClient) -> None:
        self.origin = origin
        self.one, self.two = edges
        self.client = client

    async def stream(self) -> tuple[float, float]:
        """(TTFT in ms, tokens per second) of an uninterrupted stream."""
        began = time.perf_counter()
        body = {**REQUEST, "max_tokens": TOKENS}
        url = f"{self.one.url}/v1/generate"
        async with self.client.stream("POST", url, json=body, headers=SSE) as response:
            times = [time.perf_counter() async for _ in events(response)]
        return (times[0] - began) * 1e3, (len(times) - 2) / (times[-2] - times[0])

    async def resumed_in(self, cut_at: int) -> float:
        """Cut there; time from asking the other edge to the first missing event, in ms."""
        reading = await start(self.client, self.one.url, {**REQUEST, "max_tokens": 60}, cut_at)
        began = time.perf_counter()
        await resume(self.client, self.two.url, reading, stop_after=1)
        return (time.perf_counter() - began) * 1e3

    async def longest_pause(self, kill: Callable[[], Awaitable[None]]) -> float:
        """Return the longest gap between events of a stream around a call of `kill`, in ms."""
        body = {**REQUEST, "max_tokens": TOKENS}
        url = f"{self.two.url}/v1/generate"
        reading, last, longest = Reading(), time.perf_counter(), 0.0
        killing: asyncio.Task[None] | None = None
        async with self.client.stream("POST", url, json=body, headers=SSE) as response:
            async for event in events(response):
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                reading.events.append(event)
                if len(reading.events) == KILL_AT:
                    killing = asyncio.ensure_future(kill())
        assert killing is not None
        await killing
        assert reading.indexes == list(range(int(reading.end["index"]) + 1))
        return longest * 1e3


async def measure(cuts: int, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        origin = Origin(Path(folder))
        successor = Origin(Path(folder), origin.port)
        edges = Edge(origin), Edge(origin)
        async with (
            running(origin, *edges, late=[successor]),
            httpx.AsyncClient(timeout=TIMEOUT) as client,
        ):
            bench = Bench(origin, edges, client)
            await bench.stream()  # warms up
            streams = [await bench.stream() for _ in range(5)]
            resumes = [await bench.resumed_in(1 + n % 58) for n in range(cuts)]
            worker = []
            for n in range(kills):
                worker.append(await bench.longest_pause(origin.kill_worker))
                await origin.saw("worker.ready", n + 2)

            async def replace_origin() -> None:
                await origin.kill()
                await successor.ready()

            killed_origin = await bench.longest_pause(replace_origin)
    return {
        "ttft_ms": round(statistics.median(ttft for ttft, _ in streams), 1),
        "tokens_per_s": round(statistics.median(rate for _, rate in streams)),
        "resume_p50_ms": round(statistics.median(resumes), 1),
        "resume_p99_ms": round(sorted(resumes)[int(len(resumes) * 0.99)], 1),
        "worker_killed_pause_ms": round(statistics.median(worker)),
        "origin_killed_pause_ms": round(killed_origin),
        "cuts": cuts,
        "kills": kills,
        "durability": "process",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cuts", type=int, default=40)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    print_line(asyncio.run(measure(options.cuts, options.kills)))


if __name__ == "__main__":
    main()
