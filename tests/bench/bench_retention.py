"""Measure how clean-up delays producers.

    python tests/bench/bench_retention.py [--rounds 6] [--mib 200] [--streams 10000]
                                          [--packed 2000] [--folder DIR]

A producer appends 64 frames of 64 streams every 5 ms, class `process`, and notes how long each
append took. Three kinds of clean-up are measured: the removal of large streams, the removal of many
small ones, and packing. Each round does its share of each kind and leaves the producer alone for as
long, just before or just after, in turn. Both times therefore meet the same load from the rest of
the machine, and have as many appends.

The last line is JSON, with times in ms. `worst` is how much longer the longest append took during
clean-up than alone, over all rounds. `worst_of_round` is the median over rounds of the same
difference, which one hiccup of the machine does not decide.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, Token, encode  # noqa: E402
from tailrace.ledger.interface import Append, NewStream, Record  # noqa: E402
from tailrace.ledger.sqlite import compaction  # noqa: E402
from tailrace.ledger.sqlite.capacity import MIB  # noqa: E402
from tailrace.ledger.sqlite.disk.file import SqliteFile  # noqa: E402
from tailrace.ledger.sqlite.disk.wal import Wal  # noqa: E402
from tailrace.ledger.sqlite.ledger import SqliteLedger  # noqa: E402
from tailrace.ledger.sqlite.retention import RetentionSettings  # noqa: E402
from tailrace.ledger.sqlite.storage import Commit, SegmentRow  # noqa: E402
from tests.bench.machine import cpu, disk, print_line  # noqa: E402

LINES = 64
PACE_S = 0.005
STEP_S = 100.0
"""Between two clean-ups, by the ledger's clock."""
COLD_AFTER_S = 100_000.0
KEPT_S = 10 * COLD_AFTER_S
LARGE_FRAMES = 1_000
SMALL_FRAMES = 4
FRAME_TEXT = "x" * 1_000
FRAME_BYTES = 1_020
FRAMES_PER_APPEND = 64
FIRST_ALONE_S = 2.0
SETTLE_S = 0.1
"""Before each phase, for the new streams to be stored."""
STREAM_TOKENS = 500
WORDS = tuple((__doc__ or "").split())


@dataclass(slots=True)
class Figures:
    """Durations of appends in all rounds, and the longest of each round."""

    seconds: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)
    lasted_s: float = 0.0

    def add(self, seconds: list[float], lasted_s: float) -> None:
        self.seconds += seconds
        self.longest.append(max(seconds))
        self.lasted_s += lasted_s

    def summary(self) -> dict[str, object]:
        ordered = sorted(self.seconds)
        places = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
        found = {name: ordered[int(len(ordered) * share)] for name, share in places.items()}
        found["max"] = ordered[-1]
        rounded: dict[str, object] = {n: round(value * 1_000, 2) for n, value in found.items()}
        rounded["longest"] = [round(value * 1_000, 2) for value in self.longest]
        return rounded | {"appends": len(ordered), "lasted_s": round(self.lasted_s, 1)}


class Bench:
    """A ledger whose clock stands still until it is moved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 1_700_000_000.0
        self.before: dict[str, Figures] = {}
        self.after: dict[str, Figures] = {}
        self.cleaning: dict[str, Figures] = {}
        self.held: dict[str, dict[str, float]] = {}
        self._numbers = iter(range(1, sys.maxsize))
        self.ledger: SqliteLedger

    async def open(self) -> None:
        self.ledger = await SqliteLedger.open(
            self.path,
            lambda: int(self.now_s * 1_000),
            retention=RetentionSettings(cold_after_s=COLD_AFTER_S),
        )

    async def create(self, ttl_s: float) -> bytes:
        stream = next(self._numbers).to_bytes(16, "big")
        await self.ledger.create(NewStream(stream, "{}", Durability.PROCESS, ttl_s))
        return stream

    async def fill(self, count: int, frames: int, ttl_s: float) -> None:
        """Write ended streams of `frames` frames, side by side as in life."""
        for begin in range(0, count, LINES):
            some = [await self.create(ttl_s) for _ in range(min(LINES, count - begin))]
            for at in range(0, frames + 1, FRAMES_PER_APPEND):
                beyond = min(at + FRAMES_PER_APPEND, frames + 1)
                for stream in some:
                    await self.ledger.append(
                        [Append(stream, 1, n, _record(n, frames)) for n in range(at, beyond)]
                    )

    async def store(self, records: list[Record]) -> None:
        stream = await self.create(KEPT_S)
        await self.ledger.append([Append(stream, 1, n, record) for n, record in enumerate(records)])

    async def measure(self, kind: str, clean: Callable[[], Awaitable[object]]) -> None:
        """Run one round of one kind of clean-up, between two times of the same length without."""
        before, cleaning, after = (
            phases.setdefault(kind, Figures())
            for phases in (self.before, self.cleaning, self.after)
        )
        rounds = len(cleaning.longest)
        # Before the first round the duration of one is unknown.
        usual_s = cleaning.lasted_s / rounds if rounds else FIRST_ALONE_S
        await self._produce(before, lambda: asyncio.sleep(usual_s))
        lasted_s = cleaning.lasted_s
        with self._watch_holds(kind):
            await self._produce(cleaning, clean)
        await self._produce(after, lambda: asyncio.sleep(cleaning.lasted_s - lasted_s))

    @contextmanager
    def _watch_holds(self, kind: str) -> Iterator[None]:
        """Time the commits with clean-up in them, the ends of checkpoints, and packing."""
        apply, end, pack = SqliteFile._apply, Wal.finish_checkpoint, compaction._packed

        def timed_apply(file: SqliteFile, commit: Commit, *, full: bool) -> None:
            with self._held(kind, "commit") if commit.maintenance else nullcontext():
                apply(file, commit, full=full)

        def timed_end(wal: Wal) -> None:
            with self._held(kind, "checkpoint"):
                end(wal)

        def timed_pack(run: compaction.SegmentRun, name: str) -> SegmentRow | None:
            with self._held(kind, "pack"):
                return pack(run, name)

        with (
            patch.object(SqliteFile, "_apply", timed_apply),
            patch.object(Wal, "finish_checkpoint", timed_end),
            patch.object(compaction, "_packed", timed_pack),
        ):
            yield

    @contextmanager
    def _held(self, kind: str, what: str) -> Iterator[None]:
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        yield
        took, worked = time.perf_counter() - begun, time.thread_time() - begun_cpu
        longest = self.held.setdefault(kind, {})
        for name, seconds in ((what, took), (f"{what}_cpu", worked)):
            longest[name] = max(longest.get(name, 0.0), round(seconds * 1_000, 2))

    async def _produce(self, figures: Figures, during: Callable[[], Awaitable[object]]) -> None:
        """Append to new streams, at an even pace, until `during` has ended."""
        # Old ones would become long enough to be packed.
        lines = [await self.create(KEPT_S) for _ in range(LINES)]
        await asyncio.sleep(SETTLE_S)
        seconds: list[float] = []
        begun = time.perf_counter()
        work = asyncio.ensure_future(during())
        index = 0
        while not work.done():
            record = _word(index, WORDS[index % len(WORDS)])
            before = time.perf_counter()
            await self.ledger.append([Append(line, 1, index, record) for line in lines])
            took = time.perf_counter() - before
            seconds.append(took)
            index += 1
            await asyncio.sleep(max(0.0, PACE_S - took))
        await work
        figures.add(seconds, time.perf_counter() - begun)
        end = _record(index, index)
        await self.ledger.append([Append(line, 1, index, end) for line in lines])


def _record(index: int, frames: int) -> Record:
    if index == frames:
        return Record(encode(StreamEnd(frames, FinishReason.STOP, index, 0)), ())
    return Record(encode(Token(FRAME_TEXT, index)), (index & 0xFFFF,))


def _word(index: int, word: str) -> Record:
    return Record(encode(Token(f" {word}", index)), (len(word),))


def _sentence(seed: int) -> list[Record]:
    random = Random(seed)
    words = [random.choice(WORDS) for _ in range(STREAM_TOKENS)]
    records = [_word(index, word) for index, word in enumerate(words)]
    return [*records, _record(STREAM_TOKENS, STREAM_TOKENS)]


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    path, rounds = folder / "ledger.db", options.rounds
    bench = Bench(path)
    await bench.open()
    cold_at = []
    for _ in range(rounds):
        for number in range(options.packed // rounds):
            await bench.store(_sentence(number))
        cold_at.append(bench.now_s + COLD_AFTER_S)
        bench.now_s += STEP_S
    large = max(1, options.mib * MIB // (LARGE_FRAMES * FRAME_BYTES * rounds))
    for nth in range(rounds):
        await bench.fill(large, LARGE_FRAMES, ttl_s=(2 * nth + 1) * STEP_S)
        await bench.fill(options.streams // rounds, SMALL_FRAMES, ttl_s=(2 * nth + 2) * STEP_S)
    filled = path.stat().st_size
    gc.collect()
    gc.freeze()  # objects of the bench itself are not collected during the phases
    os.sync()  # nor written back
    for _ in range(rounds):
        for kind in ("large", "many"):
            bench.now_s += STEP_S
            await bench.measure(kind, bench.ledger.expire)
    removed = path.stat().st_size
    for when in cold_at:
        bench.now_s = when
        await bench.measure("packing", bench.ledger.expire)
    left = path.stat().st_size
    await bench.ledger.close()
    return {
        **{kind: _compared(bench, kind) for kind in bench.cleaning},
        "filled_mib": round(filled / MIB, 1),
        "after_removal_mib": round(removed / MIB, 1),
        "after_packing_mib": round(left / MIB, 1),
    }


def _compared(bench: Bench, kind: str) -> dict[str, object]:
    before, cleaning, after = bench.before[kind], bench.cleaning[kind], bench.after[kind]
    alone = max(before.seconds + after.seconds)
    rounds = [
        during - max(earlier, later)
        for earlier, during, later in zip(
            before.longest, cleaning.longest, after.longest, strict=True
        )
    ]
    return {
        "worst": round((max(cleaning.seconds) - alone) * 1_000, 2),
        "worst_of_round": round(statistics.median(rounds) * 1_000, 2),
        "noise": round(abs(max(before.seconds) - max(after.seconds)) * 1_000, 2),
        "held": bench.held.get(kind, {}),
        "before": before.summary(),
        "cleaning": cleaning.summary(),
        "after": after.summary(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--mib", type=int, default=200, help="of streams that expire")
    parser.add_argument("--streams", type=int, default=10_000, help="short ones that do")
    parser.add_argument("--packed", type=int, default=2_000, help="streams that become cold")
    parser.add_argument("--folder", type=Path, default=None, help="where the ledger lies")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        print(f"{cpu()}, {disk(Path(name))}, load {os.getloadavg()[0]:.1f}")
        found = uvloop.run(measure(Path(name), options))
    for kind in ("large", "many", "packing"):
        compared = found[kind]
        if isinstance(compared, dict):
            print(
                f"{kind}: {compared['worst']:+} ms, of a round {compared['worst_of_round']:+},"
                f" by chance {compared['noise']}, held {compared['held']}"
            )
            for phase in ("before", "cleaning", "after"):
                print(f"    {phase:8} {compared[phase]}")
    print_line(found)


if __name__ == "__main__":
    main()
