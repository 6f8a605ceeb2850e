"""Ten minutes of five models in memory for two, whose workers are killed: what clients get.

    python tests/bench/soak_models.py [--seconds 600] [--kills 17] [--readers 6] [--seed 1]

Five models of the demo's size, two workers each, run behind one origin and one edge, as real
processes. The memory cap has room for two of the models with both their workers. Readers ask for a
random model again and again, cut some of their connections and resume, so models are evicted and
loaded all the time, and a worker that is ready gets SIGKILL at random moments. Each whole text is
compared with that of a quiet origin. It ends with one line of JSON, and exits with 1 if the origin
ended, a client was answered a 500, or a token was lost, doubled or changed. An answer of 503 is
retried after the time that it names.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.machine import print_line  # noqa: E402
from tests.e2e.processes import Edge, Origin, running  # noqa: E402
from tests.e2e.sse import SSE, Event, events  # noqa: E402

DEMO = ROOT / "origin" / "demo" / "model"
MODELS = ("one", "two", "three", "four", "five")
WORKERS = 2
WORKER_MIB = 60
LOADED_MODELS = 2
SPARE_MIB = 10
CAP_MIB = LOADED_MODELS * WORKERS * WORKER_MIB + SPARE_MIB
"""Memory cap of the pool, which counts `memory_mib` once for each worker of a loaded model."""
SEEDS = range(8)
TOKENS = 300
CUT_SHARE = 0.3
"""Share of reads that the client cuts, to resume at the same index."""
ANSWER_S = 180.0
"""Timeout for one text, with its load, the kill of its worker and all retries."""
MOST_RETRY_S = 5.0
POLL_S = 0.05
SETTINGS = f"""
[origin]
policy = "greedy-dual"
cpu_memory_mib = {CAP_MIB}
cold_wait_s = 30
"""
MODEL = f"""
[models.NAME]
folder = "{DEMO}"
kv_mib = 16
memory_mib = {WORKER_MIB}
workers = {WORKERS}
"""


def request(model: str, seed: int) -> dict[str, Any]:
    """Return a body that gives the same text each time, whichever of the models answers."""
    return {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
    }


@dataclass
class Campaign:
    """Outcomes of the soak; `wrong` lists texts and answers that must not be."""

    edge: Edge
    random: Random
    expected: dict[int, str] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0
    cuts: int = 0
    longest_s: float = 0.0

    async def text(self, client: httpx.AsyncClient, model: str, seed: int) -> str | None:
        """Return the whole text of a new stream; None if it ended otherwise than by its length."""
        begun: list[Event] = []
        stream = ""
        while True:
            cut_at = self.random.randrange(1, TOKENS) if self.random.random() < CUT_SHARE else None
            try:
                if not stream:
                    url = f"{self.edge.url}/v1/generate"
                    body = request(model, seed)
                    call = client.stream("POST", url, json=body, headers=SSE)
                else:
                    url = f"{self.edge.url}/v1/generate/{stream}"
                    last = {"Last-Event-ID": str(begun[-1].id)} if begun else {}
                    call = client.stream("GET", url, headers=SSE | last)
                async with call as response:
                    self.statuses[response.status_code] += 1
                    if response.status_code == 503:
                        wait_s = float(response.headers.get("Retry-After", 1))
                        await asyncio.sleep(min(wait_s, MOST_RETRY_S))
                        continue
                    if response.status_code != 200:
                        said = (await response.aread()).decode()
                        self.wrong.append(f"{model}: {response.status_code} {said}")
                        return None
                    stream = response.headers["Tailrace-Stream"]
                    async for event in events(response):
                        begun.append(event)
                        if event.name == "end":
                            return self._whole(model, begun)
                        if event.name == "error":
                            self.wrong.append(f"{model}: {event.data}")
                            return None
                        if cut_at is not None and len(begun) >= cut_at:
                            self.cuts += 1
                            break
            except httpx.TransportError as error:
                self.wrong.append(f"{model}: the edge broke the connection: {error!r}")
                return None

    def _whole(self, model: str, begun: list[Event]) -> str | None:
        """Return the text of the events, whose indexes must be without gap and repetition."""
        indexes = [event.id for event in begun if event.name in ("message", "end")]
        if any(b <= a for a, b in itertools.pairwise(indexes)):
            self.wrong.append(f"{model}: indexes are not in order: {indexes}")
            return None
        self.tokens += len(indexes)
        return "".join(event.data["text"] for event in begun if event.name == "message")

    async def reader(self, client: httpx.AsyncClient, until: float) -> None:
        """Read one text after another, until `until` on the monotonic clock."""
        while time.monotonic() < until:
            model, seed = self.random.choice(MODELS), self.random.choice(SEEDS)
            began = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_S):
                    found = await self.text(client, model, seed)
            except TimeoutError:
                self.wrong.append(f"{model}: no whole text after {ANSWER_S:g} s")
                continue
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.answers += 1
            if found is not None and found != self.expected[seed]:
                self.wrong.append(f"{model}, seed {seed}: {found!r}, not {self.expected[seed]!r}")

    async def killer(self, origin: Origin, kills: int, seconds: float) -> int:
        """Kill workers that are ready, at random moments spread over the time; return how many."""
        moments = sorted(self.random.uniform(0, seconds) for _ in range(kills))
        began, done = time.monotonic(), 0
        for moment in moments:
            await asyncio.sleep(max(0.0, began + moment - time.monotonic()))
            async with asyncio.timeout(ANSWER_S):
                while not (pids := ready_pids(origin)):  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(POLL_S)
            os.kill(self.random.choice(pids), signal.SIGKILL)
            done += 1
        return done


def ready_pids(origin: Origin) -> list[int]:
    """Return the processes of workers that are ready, by what the origin has logged."""
    up: dict[int, int] = {}
    for event in origin.events:
        if event.get("message") == "worker.ready":
            up[event["slot"]] = int(event["pid"])
        elif event.get("message") in ("worker.lost", "worker.left"):
            up.pop(event["slot"], None)
    return [pid for pid in up.values() if Path(f"/proc/{pid}").exists()]


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the campaign in `folder`, and return its figures."""
    file = folder / "tailrace.toml"
    file.write_text(SETTINGS + "".join(MODEL.replace("NAME", name) for name in MODELS))
    origin = Origin(folder / "data", config=file)
    edge = Edge(origin)
    campaign = Campaign(edge, Random(options.seed))
    limits = httpx.Limits(max_connections=64)
    async with (
        running(origin, edge),
        httpx.AsyncClient(timeout=httpx.Timeout(60.0), limits=limits) as client,
    ):
        for seed in SEEDS:
            quiet = await campaign.text(client, MODELS[0], seed)
            assert quiet is not None, campaign.wrong
            campaign.expected[seed] = quiet
        until = time.monotonic() + options.seconds
        killing = asyncio.create_task(campaign.killer(origin, options.kills, options.seconds))
        readers = (campaign.reader(client, until) for _ in range(options.readers))
        await asyncio.gather(*readers, progress(campaign, until))
        kills = await killing
        is_alive = origin.is_up
    for fault in campaign.wrong[:20]:
        print(fault, file=sys.stderr)
    return {
        "seconds": options.seconds,
        "answers": campaign.answers,
        "tokens": campaign.tokens,
        "cuts": campaign.cuts,
        "kills": kills,
        "evictions": sum(e.get("choice") == "evict" for e in origin.events),
        "loads": origin.count("worker.ready"),
        "statuses": {str(status): count for status, count in sorted(campaign.statuses.items())},
        "longest_s": round(campaign.longest_s, 2),
        "wrong": len(campaign.wrong),
        "origin_alive": is_alive,
    }


async def progress(campaign: Campaign, until: float) -> None:
    """Say every half minute how far the campaign is."""
    while (left := until - time.monotonic()) > 0:
        print(f"{left:4.0f} s left, {campaign.answers} texts", file=sys.stderr)
        await asyncio.sleep(min(30.0, left))


def main() -> None:
    """Run the campaign and print its line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the campaign")
    parser.add_argument("--kills", type=int, default=17, help="workers to kill in that time")
    parser.add_argument("--readers", type=int, default=6, help="clients that read at once")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    print_line(found)
    sys.exit(bool(found["wrong"]) or not found["origin_alive"])


if __name__ == "__main__":
    main()
