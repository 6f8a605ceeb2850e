"""Half an hour of mixed load on one origin: memory, fairness and the latency target.

    python tests/bench/soak_engine.py [--minutes 30] [--load 0.5] [--chart docs/soak.svg]

A real origin (supervisor, ledger, one worker on the CPU) and readers in this process, over the
origin link. First it measures how many tokens a second sixteen streams get; then streams of the
three classes arrive at random so that this share of it is asked for, and every `BURST_S` a burst
of batch streams that alone would keep it busy for a minute. It ends with one line of JSON:
`*_rss_growth` is how much a process's memory grew from the second fifth of the time to the last;
`in_target` the share of the waits between two frames of a stream that were no longer than a step of
the engine should be (`--step-ms`), and `in_two_targets` than two; `class_wait_s_*` the longest
time in which a class had streams open and got no frame; `waited` the streams that got none for
`LONG_WAIT_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.edge.origins.origin_pool import OriginPool  # noqa: E402
from tailrace.ledger.frame import Priority  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.bench.soak_chart import draw  # noqa: E402
from tests.bench.soak_load import Readers, Seen, class_wait_s  # noqa: E402
from tests.e2e.processes import Origin  # noqa: E402

CALIBRATION_STREAMS = 16
CALIBRATION_TOKENS = 400
BURST_S = 300.0
BURST_TOKENS = 500
LONG_WAIT_S = 60.0
SAMPLE_S = 1.0
SEED = 5


@dataclass(slots=True)
class Memory:
    """Resident MiB of a process, over time."""

    pid: int
    at_s: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def sample(self, now_s: float) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.at_s.append(now_s)
        self.mib.append(pages * 4096 / 2**20)

    def growth(self) -> float:
        """From the second fifth to the last one, in medians, as a share."""
        fifth = max(1, len(self.mib) // 5)
        early = statistics.median(self.mib[fifth : 2 * fifth])
        return statistics.median(self.mib[-fifth:]) / early - 1


class Heard:
    """A sink that waits for the origin's first word."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()

    def deliver(self, raw: bytes) -> None:
        self.heard.set()

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        """Nothing is streamed to it."""


async def sample(memories: Sequence[Memory], readers: Readers) -> None:
    while True:
        for memory in memories:
            memory.sample(readers.now_s)
        await asyncio.sleep(SAMPLE_S)


async def burst(readers: Readers, capacity: float, until_s: float) -> None:
    """Batch streams that ask for a minute's tokens at once."""
    while readers.now_s + BURST_S < until_s:
        await asyncio.sleep(BURST_S)
        for _ in range(max(1, int(capacity * 60 / BURST_TOKENS))):
            readers.ask(Priority.BATCH, BURST_TOKENS)


async def calibrate(readers: Readers) -> float:
    """Tokens per second of sixteen streams."""
    await readers.ask(Priority.STANDARD, CALIBRATION_TOKENS)  # warms up
    began = readers.now_s
    streams = [
        readers.ask(Priority.STANDARD, CALIBRATION_TOKENS) for _ in range(CALIBRATION_STREAMS)
    ]
    await asyncio.gather(*streams)
    return CALIBRATION_STREAMS * CALIBRATION_TOKENS / (readers.now_s - began)


async def soak(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        origin = Origin(Path(folder))
        await origin.ready()
        try:
            link = OriginPool(("127.0.0.1", origin.port))
            async with link.running():
                return await measure(origin, link, options)
        finally:
            await origin.stop()


async def measure(
    origin: Origin, link: OriginPool, options: argparse.Namespace
) -> dict[str, object]:
    first = Heard()
    link.watch(first)
    await first.heard.wait()
    link.forget(first)
    capacity = await calibrate(Readers(link, SEED))
    print(f"{capacity:.0f} tok/s over {CALIBRATION_STREAMS} streams", file=sys.stderr)
    readers, until_s = Readers(link, SEED + 1), options.minutes * 60
    memories = [Memory(origin.worker_pid()), Memory(origin.pid)]
    sampling = asyncio.create_task(sample(memories, readers))
    bursts = asyncio.create_task(burst(readers, capacity, until_s))
    await readers.arrive(capacity * options.load, until_s)
    await readers.drain()
    for task in (sampling, bursts):
        task.cancel()
    await asyncio.gather(sampling, bursts, return_exceptions=True)
    if options.chart is not None:
        draw(options.chart, readers.seen, memories[0], memories[1], options.step_ms)
    return summary(readers.seen, memories, capacity, options)


def summary(
    seen: Sequence[Seen], memories: Sequence[Memory], capacity: float, options: argparse.Namespace
) -> dict[str, object]:
    worker, supervisor = memories
    gaps = sorted(gap for one in seen for _, gap in one.gaps())
    target_s = options.step_ms / 1000
    found: dict[str, object] = {
        "minutes": options.minutes,
        "load": options.load,
        "capacity_tok_s": round(capacity),
        "streams": len(seen),
        "failed": sum(one.failure is not None for one in seen),
        "failures": [one.failure for one in seen if one.failure is not None][:5],
        "tokens": sum(len(one.frames_s) for one in seen),
        "worker_mib": round(worker.mib[-1], 1),
        "worker_rss_growth": round(worker.growth(), 4),
        "supervisor_mib": round(supervisor.mib[-1], 1),
        "supervisor_rss_growth": round(supervisor.growth(), 4),
        "itl_p50_ms": round(statistics.median(gaps) * 1e3, 1),
        "itl_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1),
        "in_target": round(bisect_right(gaps, target_s) / len(gaps), 4),
        "in_two_targets": round(bisect_right(gaps, 2 * target_s) / len(gaps), 4),
        "step_ms": options.step_ms,
        "waited": sum(_waited(one) for one in seen),
    }
    for priority in Priority:
        some = [one for one in seen if one.priority is priority]
        times = sorted(t for one in some if (t := one.ttft_s))
        own = sorted(gap for one in some for _, gap in one.gaps())
        found[f"itl_p99_ms_{priority.word}"] = round(own[int(len(own) * 0.99)] * 1e3, 1)
        found[f"in_target_{priority.word}"] = round(bisect_right(own, target_s) / len(own), 4)
        found[f"class_wait_s_{priority.word}"] = round(class_wait_s(some), 3)
        found[f"ttft_p50_ms_{priority.word}"] = round(statistics.median(times) * 1e3, 1)
        found[f"ttft_p99_ms_{priority.word}"] = round(times[int(len(times) * 0.99)] * 1e3, 1)
    return found


def _waited(seen: Seen) -> bool:
    """Nothing came for long, at first or in between."""
    ended = [] if seen.ended_s is None else [seen.ended_s]
    moments = [seen.asked_s, *seen.frames_s, *ended]
    return seen.ended_s is None or any(b - a > LONG_WAIT_S for a, b in pairwise(moments))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.5, help="share of the capacity")
    parser.add_argument("--step-ms", type=float, default=50.0, help="the engine's target")
    parser.add_argument("--chart", type=Path, default=None, help="SVG to draw")
    print_line(uvloop.run(soak(parser.parse_args())))


if __name__ == "__main__":
    main()
