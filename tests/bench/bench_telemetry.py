"""Measure the cost of telemetry per relayed frame: an edge with it beside an edge without.

    python tests/bench/bench_telemetry.py [--lives 12] [--seconds 2]

Two edges share one core; each relays 20 frames a second to 64 connections, as in bench_edge.py.
Both are measured over the same seconds, so that other work of the machine meets both. A pair is the
processor time (user and system) per frame of the two. Processes of one program differ by some per
cent because of their memory layout, so both are started anew for each of the lives, in alternating
order; a life gives one pair for each row.

The last line is JSON: us per frame, and as `overhead` the share that telemetry adds, as the median
with the bounds (95 %) of that of all pairs. `under` is true if it is below 5 %, false if above,
null if the bounds leave it open. `added_us` is what telemetry adds within one process, without
sockets, which a busy machine hardly changes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack
from itertools import chain, product
from pathlib import Path
from typing import Any, cast

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.edge.flush import FlushBatch  # noqa: E402
from tailrace.edge.generate.encoders import SseEncoder  # noqa: E402
from tailrace.edge.origins.origin import Connection  # noqa: E402
from tailrace.edge.origins.origin_pool import OriginPool  # noqa: E402
from tailrace.edge.server.deadlines import Deadlines  # noqa: E402
from tailrace.edge.server.interfaces import UNSENT_BYTES, ResponseWriter  # noqa: E402
from tailrace.edge.server.stream_reader import StreamReader  # noqa: E402
from tailrace.edge.telemetry.request_metrics import Counts, RequestMetrics  # noqa: E402
from tailrace.ledger.frame import SCHEMA_HASH, Heartbeat, Hello, Open, Opened, Token, encode  # noqa: E402
from tests.bench.bench_edge import (  # noqa: E402
    OTHER_CORE,
    SERVER_CORE,
    answering,
)
from tests.bench.edge.readers import FRAMES, H2, SSE, WS, connect  # noqa: E402
from tests.bench.edge.source import PACED, STEP  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.bench.measured import cpu_s, median_interval, process  # noqa: E402
from tests.e2e.processes import free_port  # noqa: E402
from tests.edge.server.manual_clock import ManualClock  # noqa: E402

CONNECTIONS = 64
KINDS = (("staggered", PACED), ("step", STEP))
VIEWS = (SSE, FRAMES, WS, H2)
MOST = 0.05
"""Maximum share of the cost of a relayed frame that telemetry may add."""
LEAST_LIVES = 6
"""Fewer pairs cannot be sure of anything."""
SETTLE_S, MOST_SETTLE_S = 0.5, 60
SETTLED_FRAMES = 20 * CONNECTIONS
"""Number of frames that each edge relays before it is measured: one second's."""
STREAM = bytes(range(16))
INNER_FRAMES, INNER_TURNS = 50, 200


# ---- in one process, without sockets: steady on a busy machine, and what is added weighs more ----


class Way:
    """A transport, and a writer, that takes all there is."""

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def start(self, status: int, headers: object) -> None: ...

    def end(self) -> None: ...

    def writable_bytes(self) -> int:
        return UNSENT_BYTES


class Inner:
    """An edge's way from a read of the link to 64 responses, with telemetry or without."""

    def __init__(self, counts: Counts | None) -> None:
        self.batch = (
            FlushBatch()
            if counts is None
            else FlushBatch(clock_s=time.perf_counter, observe=counts.relay)
        )
        link = OriginPool(("127.0.0.1", 9), batch=self.batch)
        self._connection = Connection(link.origins[0])
        self._connection.connection_made(cast(asyncio.Transport, Way()))
        self._read(encode(Hello(SCHEMA_HASH, "bench")), encode(Heartbeat(1, ready=True)))
        deadlines = Deadlines(ManualClock())
        for _ in range(CONNECTIONS):
            metrics = RequestMetrics(counts, "h1", "POST", "/v1/generate", ())
            wanted = Open("demo", prompt="x")
            reader = StreamReader(
                *(link, self.batch, deadlines, cast(ResponseWriter, Way()), SseEncoder()),
                *((), lambda: None, metrics),
            )
            reader.ask(wanted)
        corrs = range(1, CONNECTIONS + 1)
        self._read(*(encode(Opened(STREAM, 0, "", "demo", 1), corr) for corr in corrs))
        self._next = 0

    def _read(self, *frames: bytes) -> None:
        self._connection.data_received(b"".join(frames))

    def us_per_frame(self, *, step: bool) -> float:
        """Return the time per frame for a token to each connection, in one read or many."""
        first, self._next = self._next, self._next + INNER_FRAMES
        reads = []
        for index in range(first, self._next):
            frames = [encode(Token(" word", index), n + 1) for n in range(CONNECTIONS)]
            reads += [b"".join(frames)] if step else frames
        begun = time.process_time()
        for read in reads:
            self._connection.data_received(read)
        return (time.process_time() - begun) / (INNER_FRAMES * CONNECTIONS) * 1e6


async def inner() -> dict[str, list[float]]:
    """Return what telemetry adds to a frame in us, by kind of row: the median and its bounds."""
    turns, found = [("on", Inner(Counts())), ("off", Inner(None))], dict[str, list[float]]()
    for _ in range(INNER_TURNS):
        for kind, _ in KINDS:
            spent = {name: one.us_per_frame(step=kind == "step") for name, one in turns}
            found.setdefault(kind, []).append(spent["on"] - spent["off"])
        turns.reverse()
        await asyncio.sleep(0)
    return {kind: [round(each, 3) for each in median_interval(v)] for kind, v in found.items()}


# ---- two processes, with all that a client has of them ----


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for number in range(options.lives):
        await one_life(found, options.seconds, on_first=number % 2 == 0)
        print(f"life {number + 1} of {options.lives}", file=sys.stderr)
    return report(found)


async def one_life(found: dict[str, list[float]], seconds: float, *, on_first: bool) -> None:
    link, upstream = free_port(), free_port()
    source = (sys.executable, ROOT / "tests/bench/edge/source.py", link, upstream)
    async with AsyncExitStack() as running:
        origin = await running.enter_async_context(process(*source, core=OTHER_CORE))
        servers: dict[str, tuple[int, int]] = {}
        for name in ("on", "off") if on_first else ("off", "on"):
            port = free_port()
            flags = ("--http", f"127.0.0.1:{port}", "--origin", f"127.0.0.1:{link}")
            command = (sys.executable, "-m", "tailrace.cli", "edge", *flags)
            os.environ["TAILRACE_EDGE_TELEMETRY"] = "true" if name == "on" else "false"
            edge = await running.enter_async_context(process(*command, core=SERVER_CORE))
            servers[name] = edge.pid, port
        assert origin.stdout is not None
        await origin.stdout.readline()
        for _, port in servers.values():
            await answering(port)
        await asyncio.sleep(SETTLE_S)
        for number, (view, (kind_name, kind)) in enumerate(product(VIEWS, KINDS)):
            spent = await one_pair(servers, view, kind, number * CONNECTIONS, seconds)
            for name, each in spent.items():
                found.setdefault(f"{name}_{view}_{kind_name}", []).append(each)


async def one_pair(
    servers: dict[str, tuple[int, int]], view: str, kind: int, first: int, seconds: float
) -> dict[str, float]:
    """Microseconds of processor per frame of both, over the same seconds."""
    readers = {
        name: await connect(port, view, kind, CONNECTIONS, first)
        for name, (_, port) in servers.items()
    }

    def state() -> dict[str, tuple[float, int]]:
        return {
            name: (cpu_s(pid), sum(reader.frames for reader in readers[name]))
            for name, (pid, _) in servers.items()
        }

    async with asyncio.timeout(MOST_SETTLE_S):
        while min(frames for _, frames in state().values()) < SETTLED_FRAMES:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    before = state()
    await asyncio.sleep(seconds)
    after = state()
    for reader in chain.from_iterable(readers.values()):
        reader.close()
    spent = {}
    for name, (cpu_then, frames_then) in before.items():
        cpu_now, frames = after[name]
        assert frames > frames_then, f"{name}, {view}: nothing came"
        spent[name] = (cpu_now - cpu_then) / (frames - frames_then) * 1e6
    return spent


def report(found: dict[str, list[float]]) -> dict[str, Any]:
    overhead: dict[str, Any] = {}
    for name, with_it in found.items():
        if name.startswith("on_"):
            without = found[name.replace("on_", "off_", 1)]
            pairs = [on / off - 1 for on, off in zip(with_it, without, strict=True)]
            low, median, high = median_interval(pairs)
            is_sure = len(pairs) >= LEAST_LIVES and (high < MOST or low > MOST)
            bounds = {"median": median, "low": low, "high": high}
            overhead[name.removeprefix("on_")] = {
                **{word: round(value, 4) for word, value in bounds.items()},
                "under": high < MOST if is_sure else None,
            }
    return {
        **{f"{name}_us": round(statistics.median(v), 2) for name, v in sorted(found.items())},
        "overhead": overhead,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help="without the two processes")
    options = parser.parse_args()
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    added: dict[str, Any] = {"added_us": uvloop.run(inner())}
    print_line(added if options.quick else added | uvloop.run(measure(options)))


if __name__ == "__main__":
    main()
