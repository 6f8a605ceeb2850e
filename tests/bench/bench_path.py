"""Measure what a token costs from worker to reader: supervisor, ledger, link and edge.

    python tests/bench/bench_path.py [--seconds 4] [--rounds 5] [--tree FOLDER]

A worker that computes nothing makes a token for each of 64 streams a step, as fast as they are
taken, or 50 steps a second; each stream has a reader of frames over HTTP/1.1 on loopback, the
ledger is a file in `process` mode. Origin and edge have a core each; worker and readers are
wherever there is room. `--tree` is another checkout, with tests/bench copied into it, which is
measured in turn with this one. Each figure is the median of the rounds. It ends with one line of
JSON: us of processor a token of each process (`ledger_us` by itself: appends of the same shape, in
this process; `paced_`: at 50 steps a second, each by itself), ms from step to socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.frame import Durability, Token, encode  # noqa: E402
from tailrace.ledger.interface import Appends, LiveTail, NewStream  # noqa: E402
from tailrace.ledger.sqlite.ledger import SqliteLedger  # noqa: E402
from tests.bench.bench_edge import answering  # noqa: E402
from tests.bench.edge.readers import FRAMES, Reader  # noqa: E402
from tests.bench.machine import cpu, disk, print_line  # noqa: E402
from tests.bench.measured import cpu_s, process  # noqa: E402
from tests.e2e.processes import free_port  # noqa: E402

STREAMS = 64
PACE = 50
SETTLE_S = 1.0
ORIGIN_CORE, EDGE_CORE = "0", "1"
ASKED = {"model": "demo", "prompt": "Once", "max_tokens": 100_000, "ignore_eos": True}


class Served:
    """An origin of a tree and its edge."""

    def __init__(self, origin: int, edge: int, port: int) -> None:
        self.pids = {"supervisor": origin, "edge": edge}
        self.port = port

    def cpu_s(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self.pids.items()}


@asynccontextmanager
async def served(tree: Path, folder: Path, steps_per_s: int | None) -> AsyncIterator[Served]:
    link, port = f"127.0.0.1:{free_port()}", free_port()
    settings = json.dumps({"runs": STREAMS, "steps_per_s": steps_per_s})
    python, run = sys.executable, partial(process, tree=tree)
    origin = run(python, "tests/bench/path/origin.py", link, folder, settings, core=ORIGIN_CORE)
    flags = ("--http", f"127.0.0.1:{port}", "--origin", link)
    edge = run(python, "-m", "tailrace.cli", "edge", *flags, core=EDGE_CORE)
    async with origin as one, edge as two:
        await answering(port)
        yield Served(one.pid, two.pid, port)


async def begun(port: int) -> list[bytes]:
    """Return the ids of new streams, whose readers have left again."""
    ids = []
    headers = {"Accept": "application/vnd.tailrace.frames"}
    async with httpx.AsyncClient(timeout=60, base_url=f"http://127.0.0.1:{port}") as client:
        async with asyncio.timeout(60):
            while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for _ in range(STREAMS):
            async with client.stream(
                "POST", "/v1/generate", json=ASKED, headers=headers
            ) as response:
                ids.append(bytes.fromhex(response.headers["Tailrace-Stream"]))
    return ids


async def round_of(tree: Path, steps_per_s: int | None, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        async with served(tree, Path(folder), steps_per_s) as here:
            readers: list[Reader] = []
            for stream in await begun(here.port):
                _, reader = await loop.create_connection(
                    partial(Reader, FRAMES, stream), "127.0.0.1", here.port
                )
                readers.append(reader)
            await asyncio.sleep(SETTLE_S)
            before, began = here.cpu_s(), time.monotonic()
            came = sum(reader.frames for reader in readers)
            for reader in readers:
                reader.latencies_s.clear()
            await asyncio.sleep(seconds)
            tokens = sum(reader.frames for reader in readers) - came
            took_s, after = time.monotonic() - began, here.cpu_s()
            late = sorted(late for reader in readers for late in reader.latencies_s)
            for reader in readers:
                reader.close()
    found = {f"{name}_us": (after[name] - before[name]) / tokens * 1e6 for name in before}
    found["tokens_per_s"] = tokens / took_s
    if steps_per_s is not None:
        found["p50_ms"] = late[len(late) // 2] * 1e3
        found["p99_ms"] = late[len(late) * 99 // 100] * 1e3
    return found


async def ledger_us(seconds: float) -> float:
    """Return processor time per append in us, for steps like the worker's."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = await SqliteLedger.open(Path(folder) / "ledger.db", lambda: int(time.time() * 1e3))
        streams = [os.urandom(16) for _ in range(STREAMS)]
        places = dict.fromkeys(streams, 0)

        def take(stream: bytes, tail: LiveTail) -> None:
            places[stream] += len(tail.take(places[stream], 64) or ())

        for stream in streams:
            await ledger.create(NewStream(stream, "{}", Durability.PROCESS, ttl_s=3600))
            ledger.watch(stream, partial(take, stream, ledger.tail(stream)))
        index, began, cpu_began = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds:
            frames, ids = [encode(Token("123456", index))] * STREAMS, [(index & 0x7FFF,)] * STREAMS
            columns = [1] * STREAMS, [index] * STREAMS, frames, ids, [b""] * STREAMS
            await ledger.append(Appends(streams, *columns))
            index += 1
        spent = time.process_time() - cpu_began
        assert set(places.values()) == {index}, "every watcher saw every frame"
        await ledger.close()
    return spent / (index * STREAMS) * 1e6


async def measure(trees: dict[str, Path], rounds: int, seconds: float) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, tree in trees.items():
            flat = await round_of(tree, None, seconds)
            paced = await round_of(tree, PACE, seconds)
            late = {what: paced.pop(what) for what in ("p50_ms", "p99_ms")}
            steady = {f"paced_{what}": value for what, value in paced.items()}
            for what, value in (flat | late | steady).items():
                found.setdefault(name + what, []).append(value)
        found.setdefault("ledger_us", []).append(await ledger_us(seconds / 2))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", type=Path)
    options = parser.parse_args()
    trees = {"": ROOT} | ({"other_": options.tree.resolve()} if options.tree else {})
    found = uvloop.run(measure(trees, options.rounds, options.seconds))
    print(f"{cpu()}; ledger on {disk(Path(tempfile.gettempdir()))}, `process`")
    for name, value in found.items():
        print(f"{name:24} {value:12,.2f}")
    print_line(found)


if __name__ == "__main__":
    main()
