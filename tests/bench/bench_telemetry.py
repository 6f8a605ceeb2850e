"""What telemetry costs of a relayed frame: an edge that counts and times beside one that does not.

    python tests/bench/bench_telemetry.py [--seconds 3] [--rounds 8]

64 connections with 20 frames a second each, as bench_edge.py has them. Both edges are on one core
and take turns, so that what else the machine does meets both. It ends with one line of JSON:
processor time per frame in us, medians of the rounds, and `overhead`, the part that telemetry adds:
the median of what two neighbours in time differ by, and all of those together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from edge.body import SseEncoder  # noqa: E402
from edge.origins.link import Link  # noqa: E402
from edge.origins.origin import Connection  # noqa: E402
from edge.reader import WINDOW_BYTES, WINDOW_FRAMES  # noqa: E402
from edge.server.deadlines import Deadlines  # noqa: E402
from edge.server.outlet import UNSENT_BYTES, Outlet, Turn  # noqa: E402
from edge.server.stream_reader import StreamReader  # noqa: E402
from edge.telemetry.counts import Counts  # noqa: E402
from edge.telemetry.exchange import Exchange  # noqa: E402
from ledger.frame import SCHEMA_HASH, Heartbeat, Hello, Open, Opened, Token, encode  # noqa: E402
from tests.bench.bench_edge import (  # noqa: E402
    OTHER_CORE,
    SERVER_CORE,
    SETTLE_S,
    Bench,
    answering,
)
from tests.bench.edge.readers import FRAMES, H2, SSE, WS  # noqa: E402
from tests.bench.edge.source import PACED, STEP  # noqa: E402
from tests.bench.machine import cpu  # noqa: E402
from tests.bench.measured import process  # noqa: E402
from tests.e2e.processes import free_port  # noqa: E402

CONNECTIONS = 64
KINDS = (("staggered", PACED), ("step", STEP))
STREAM = bytes(range(16))
INNER_FRAMES, INNER_TURNS = 200, 40


# ---- in one process, without sockets: steady on a busy machine, and what is added weighs more ----


class Way:
    """A transport, and an outlet, that takes all there is."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def start(self, status: int, headers: object) -> None: ...

    def end(self) -> None: ...

    def room(self) -> int:
        return UNSENT_BYTES


class Inner:
    """An edge's way from a read of the link to 64 responses, with telemetry or without."""

    def __init__(self, counts: Counts | None) -> None:
        self.turn = (
            Turn() if counts is None else Turn(clock_s=time.perf_counter, wrote=counts.wrote)
        )
        link = Link(("127.0.0.1", 9), turn=self.turn)
        self._connection = Connection(link.origins[0])
        self._connection.connection_made(cast(asyncio.Transport, Way()))
        self._read(encode(Hello(SCHEMA_HASH, "bench")), encode(Heartbeat(1, ready=True)))
        deadlines = Deadlines(lambda: 0.0)
        for _ in range(CONNECTIONS):
            exchange = Exchange(counts, "h1", "POST", "/v1/generate", ())
            wanted = Open("demo", prompt="x", credit=WINDOW_FRAMES, credit_bytes=WINDOW_BYTES)
            reader = StreamReader(
                *(link, self.turn, deadlines, cast(Outlet, Way()), SseEncoder(), wanted),
                *((), lambda: None, exchange),
            )
            reader.ask()
        corrs = range(1, CONNECTIONS + 1)
        self._read(*(encode(Opened(STREAM, 0, "", "demo", 1), corr) for corr in corrs))
        self._next = 0

    def _read(self, *frames: bytes) -> None:
        self._connection.data_received(b"".join(frames))

    def us_per_frame(self, *, step: bool) -> float:
        """A token for each of the connections, so often: in one read each time, or in one each."""
        first, self._next = self._next, self._next + INNER_FRAMES
        reads = []
        for index in range(first, self._next):
            frames = [encode(Token(" word", index), n + 1) for n in range(CONNECTIONS)]
            reads += [b"".join(frames)] if step else frames
        begun = time.process_time()
        for read in reads:
            self._connection.data_received(read)
        return (time.process_time() - begun) / (INNER_FRAMES * CONNECTIONS) * 1e6


async def inner() -> dict[str, float]:
    """Of many turns the least: what else the machine does only ever adds."""
    on, off, found = Inner(Counts()), Inner(None), dict[str, list[float]]()
    for _ in range(INNER_TURNS):
        for name, one in (("on", on), ("off", off)):
            for kind in ("staggered", "step"):
                spent = one.us_per_frame(step=kind == "step")
                found.setdefault(f"inner_{name}_{kind}_us", []).append(spent)
        await asyncio.sleep(0)
    return {name: min(each) for name, each in found.items()}


# ---- two processes, with all that a client has of them ----


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    link, upstream, on_port, off_port = (free_port() for _ in range(4))

    def edge(port: int) -> tuple[object, ...]:
        flags = ("--http", f"127.0.0.1:{port}", "--origin", f"127.0.0.1:{link}")
        return (sys.executable, "-m", "tailrace.cli", "edge", *flags)

    os.environ["TAILRACE_EDGE_TELEMETRY"] = "true"
    source = (sys.executable, ROOT / "tests/bench/edge/source.py", link, upstream)
    async with (
        process(*source, core=OTHER_CORE) as origin,
        process(*edge(on_port), core=SERVER_CORE) as on,
    ):
        os.environ["TAILRACE_EDGE_TELEMETRY"] = "false"
        async with process(*edge(off_port), core=SERVER_CORE) as off:
            assert origin.stdout is not None
            await origin.stdout.readline()
            for port in (on_port, off_port):
                await answering(port)
            await asyncio.sleep(SETTLE_S)
            bench = Bench(on.pid, on_port, off.pid, off_port, 0)
            bench.servers = {"on": (on.pid, on_port), "off": (off.pid, off_port)}
            for round_ in range(options.rounds):
                await one_round(bench, options.seconds, first="on" if round_ % 2 else "off")
    return report(bench.found)


async def one_round(bench: Bench, seconds: float, first: str) -> None:
    for name, kind in KINDS:
        for view in (SSE, FRAMES, WS, H2):
            for server in (first, "off" if first == "on" else "on"):
                label = f"{server}_{view}_{name}"
                await bench.paced(server, view, kind, CONNECTIONS, seconds, label)


def report(found: dict[str, list[float]]) -> dict[str, Any]:
    medians = {n: statistics.median(v) for n, v in found.items() if n.endswith("_us")}
    ratios = {
        name.removeprefix("on_").removesuffix("_us"): [
            on / off for on, off in zip(spent, found[name.replace("on_", "off_", 1)], strict=True)
        ]
        for name, spent in found.items()
        if name.startswith("on_") and name.endswith("_us")
    }
    overhead = {name: round(statistics.median(each) - 1, 4) for name, each in ratios.items()}
    together = statistics.geometric_mean([one for each in ratios.values() for one in each]) - 1
    return {
        **{name: round(value, 2) for name, value in sorted(medians.items())},
        "overhead": overhead,
        "overhead_together": round(together, 4),
        "machine": cpu(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="without the two processes")
    options = parser.parse_args()
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    least = uvloop.run(inner())
    shares = {
        f"inner_overhead_{kind}": least[f"inner_on_{kind}_us"] / least[f"inner_off_{kind}_us"] - 1
        for kind in ("staggered", "step")
    }
    told = {name: round(value, 4) for name, value in (least | shares).items()}
    print(json.dumps(told if options.quick else told | uvloop.run(measure(options))))


if __name__ == "__main__":
    main()
