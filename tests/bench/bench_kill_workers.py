"""Kill and stop workers under a load of streams, and compare the readers' text with the right one.

    python tests/bench/bench_kill_workers.py [--kills 200] [--hangs 50] [--streams 32] [--seed 1]

The demo model over loopback, one worker, readers by HTTP/1.1 and SSE. A kill (SIGKILL) or a stop
(SIGSTOP, of a worker that may be silent for 3 s) comes at a random moment after all streams are
under way again. The pause of a stream is the time from the kill to its next event; the restore
that it is held against is measured afterwards, in a process that does nothing else: to load the
model, and to bring as many streams with as many tokens as there were at that kill to their next
token each. It says how far it is on stderr, ends with one line of JSON, and exits with 1 if a
token was lost, doubled or changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.machine import print_line  # noqa: E402
from tests.e2e.cluster import request  # noqa: E402
from tests.e2e.processes import Edge, Origin, running  # noqa: E402
from tests.e2e.sse import SSE, Event, events  # noqa: E402

TOKENS = 400
SETTINGS = "[origin]\nworker_silence_s = 3\n"
TIMEOUT = httpx.Timeout(300.0)
SAY_EVERY = 10
INTERACTIVE_TURNS = 5
FAULT_S = 300.0
"""When streams that have not gone on never will."""
AFTER_S = (0.0, 1.0)
"""A fault comes so long after every stream has gone on."""


@dataclass
class Findings:
    """Faults that readers saw: lost, doubled and changed tokens.

    `refused` counts requests that were refused with Retry-After and asked again.
    """

    streams: int = 0
    refused: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0


@dataclass
class Fault:
    """`counts` are the tokens that each running stream had; `pauses_s` how long each waited."""

    at_s: float
    counts: list[int]
    waiting: set[int]
    pauses_s: list[float] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Load:
    """Readers that ask for one stream after another, each of a text that is known."""

    def __init__(self, url: str, seeds: Sequence[int], tokens: int) -> None:
        self.findings = Findings()
        self._url = f"{url}/v1/generate"
        self._tokens = tokens
        self._right: dict[int, list[Event]] = {}
        self._seeds = seeds
        self._counts: dict[int, int] = {}  # events of each stream that is under way
        self._fault: Fault | None = None
        self._stopped = False

    async def learn(self, client: httpx.AsyncClient) -> None:
        """Read every stream once without a fault, to know its right tokens."""
        reads = (self._read(client, seed) for seed in self._seeds)
        for seed, got in zip(self._seeds, await asyncio.gather(*reads), strict=True):
            self._right[seed] = got

    async def read(self, client: httpx.AsyncClient, seed: int) -> None:
        """Until `stop`, and then to the end of the stream."""
        while not self._stopped:
            self._check(await self._read(client, seed), self._right[seed])

    def stop(self) -> None:
        self._stopped = True

    def fault(self) -> Fault:
        """From now on the streams that are under way wait."""
        fault = Fault(time.perf_counter(), list(self._counts.values()), set(self._counts))
        if not fault.waiting:
            fault.over.set()
        self._fault = fault
        return fault

    async def _read(self, client: httpx.AsyncClient, seed: int) -> list[Event]:
        got: list[Event] = []
        body = request(seed, self._tokens)
        while not got:
            async with client.stream("POST", self._url, json=body, headers=SSE) as response:
                if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    self.findings.refused += 1
                    await asyncio.sleep(float(response.headers["Retry-After"]))
                    continue
                response.raise_for_status()
                async for event in events(response):
                    got.append(event)
                    self._counts[seed] = len(got)
                    self._heard(seed)
        del self._counts[seed]
        return got

    def _heard(self, seed: int) -> None:
        fault = self._fault
        if fault is not None and seed in fault.waiting:
            fault.waiting.discard(seed)
            fault.pauses_s.append(time.perf_counter() - fault.at_s)
            if not fault.waiting:
                fault.over.set()

    def _check(self, got: Sequence[Event], right: Sequence[Event]) -> None:
        self.findings.streams += 1
        by_index = {event.id: event for event in right}
        ids = [event.id for event in got]
        self.findings.doubled += len(ids) - len(set(ids))
        self.findings.lost += len(by_index.keys() - set(ids))
        self.findings.changed += sum(event != by_index.get(event.id) for event in got)


async def faults(
    load: Load, origin: Origin, count: int, number: signal.Signals, random: Random
) -> list[Fault]:
    """Send `count` signals, each once the streams have recovered from the one before."""
    made = []
    for turn in range(1, count + 1):
        await asyncio.sleep(random.uniform(*AFTER_S))
        ready = origin.count("worker.ready")
        os.kill(origin.worker_pid(), number)
        fault = load.fault()
        async with asyncio.timeout(FAULT_S):
            await origin.saw("worker.ready", ready + 1)
            await fault.over.wait()
        made.append(fault)
        if turn % SAY_EVERY == 0:
            print(f"{turn} {number.name}, {load.findings}", file=sys.stderr)
    return made


def restores_s(histories: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds that a load and the continuation of such streams take alone."""
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tests" / "bench" / "restore_floor.py")],
        input=json.dumps(histories),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[float] = json.loads(done.stdout)
    return found


async def first_token_s(client: httpx.AsyncClient, url: str, seed: int) -> float:
    """Return the time to the first token of an interactive stream that is opened now."""
    began = time.perf_counter()
    body = {**request(seed, 8), "priority": "interactive"}
    async with client.stream("POST", f"{url}/v1/generate", json=body, headers=SSE) as response:
        async for _ in events(response):
            return time.perf_counter() - began
    raise AssertionError("a stream without an event")


async def beside_batch(
    client: httpx.AsyncClient, edge: Edge, origin: Origin, batch: int
) -> dict[str, Any]:
    """Time first tokens of five interactive streams beside `batch` streams of class batch.

    They are timed without a kill of the worker and right after one, each when the batch streams are
    under way.
    """
    url = f"{edge.url}/v1/generate"
    news, counted = asyncio.Condition(), 0

    async def under_way() -> None:
        enough = counted + batch * 4
        async with news:
            await news.wait_for(lambda: counted >= enough)

    async def keep_busy(seed: int) -> None:
        nonlocal counted
        body = {**request(seed, TOKENS), "priority": "batch"}
        async with client.stream("POST", url, json=body, headers=SSE) as response:
            async for _ in events(response):
                counted += 1
                async with news:
                    news.notify_all()

    waits: dict[str, list[float]] = {"without": [], "with": []}
    tasks = [asyncio.create_task(keep_busy(1000 + one)) for one in range(batch)]
    try:
        for turn in range(INTERACTIVE_TURNS):
            for name in waits:
                await under_way()
                ready = origin.count("worker.ready")
                if name == "with":
                    os.kill(origin.worker_pid(), signal.SIGKILL)
                asked = (first_token_s(client, edge.url, turn * 10 + n) for n in range(5))
                waits[name] += await asyncio.gather(*asked)
                if name == "with":
                    await origin.saw("worker.ready", ready + 1)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    without, killed = (statistics.median(waits[name]) for name in ("without", "with"))
    return {
        "batch_streams": batch,
        "interactive_first_token_ms": round(without * 1e3),
        "interactive_first_token_after_kill_ms": round(killed * 1e3),
        "first_token_after_kill_over_without": round(killed / without, 2),
    }


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


async def measure(kills: int, hangs: int, streams: int, batch: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "tailrace.toml"
        settings.write_text(SETTINGS)
        origin = Origin(Path(folder) / "data", config=settings)
        edge = Edge(origin)
        limits = httpx.Limits(max_connections=None)
        async with (
            running(origin, edge),
            httpx.AsyncClient(timeout=TIMEOUT, limits=limits) as client,
        ):
            load = Load(edge.url, range(streams), TOKENS)
            await load.learn(client)
            reading = [asyncio.create_task(load.read(client, one)) for one in range(streams)]
            random = Random(seed)
            killed = await faults(load, origin, kills, signal.SIGKILL, random)
            stopped = await faults(load, origin, hangs, signal.SIGSTOP, random)
            load.stop()
            await asyncio.gather(*reading)
            beside = await beside_batch(client, edge, origin, batch)
    restores = restores_s([fault.counts for fault in killed])
    pauses = [pause for fault in killed for pause in fault.pauses_s]
    ratios = [
        pause / restore
        for fault, restore in zip(killed, restores, strict=True)
        for pause in fault.pauses_s
    ]
    hung = [pause for fault in stopped for pause in fault.pauses_s]
    findings = load.findings
    return {
        "kills": len(killed),
        "hangs": len(stopped),
        "streams": findings.streams,
        "refused": findings.refused,
        "lost": findings.lost,
        "doubled": findings.doubled,
        "changed": findings.changed,
        "pause_p50_ms": round(statistics.median(pauses) * 1e3),
        "pause_p99_ms": round(p99(pauses) * 1e3),
        "restore_p50_ms": round(statistics.median(restores) * 1e3),
        "restore_p99_ms": round(p99(restores) * 1e3),
        "pause_p50_over_restore": round(statistics.median(ratios), 2),
        "pause_p99_over_restore": round(p99(ratios), 2),
        "hang_pause_p99_s": round(p99(hung), 1) if hung else None,
        **beside,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hangs", type=int, default=50)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--batch", type=int, default=190)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    said = asyncio.run(measure(given.kills, given.hangs, given.streams, given.batch, given.seed))
    print_line(said)
    sys.exit(bool(said["lost"] or said["doubled"] or said["changed"]))


if __name__ == "__main__":
    main()
