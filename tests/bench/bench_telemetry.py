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
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.bench_edge import (  # noqa: E402
    OTHER_CORE,
    SERVER_CORE,
    SETTLE_S,
    Bench,
    answering,
    process,
)
from tests.bench.edge.readers import FRAMES, H2, SSE, WS  # noqa: E402
from tests.bench.edge.source import PACED, STEP  # noqa: E402
from tests.bench.machine import cpu  # noqa: E402
from tests.e2e.processes import free_port  # noqa: E402

CONNECTIONS = 64
KINDS = (("staggered", PACED), ("step", STEP))


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
    options = parser.parse_args()
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    print(json.dumps(uvloop.run(measure(options))))


if __name__ == "__main__":
    main()
