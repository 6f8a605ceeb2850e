"""What clean-up costs producers, and what cold segments save.

    python tests/bench/bench_retention.py [--mib 200] [--streams 10000] [--folder DIR]

A producer appends 64 frames of 64 streams every 5 ms, class `process`, and notes how long
each append took; first alone, then while streams that expired at once are removed, then
while ended streams are packed. It ends with one line of JSON; times are in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ledger.frame import Durability, FinishReason, StreamEnd, Token, encode  # noqa: E402
from ledger.interface import Append, NewStream, Record  # noqa: E402
from ledger.sqlite.ledger import SqliteLedger  # noqa: E402
from ledger.sqlite.retention import MIB, RetentionSettings  # noqa: E402
from tests.bench.machine import cpu, disk  # noqa: E402

LINES = 64
PACE_S = 0.005
ALONE_S = 5.0
TTL_S = 3_600.0
COLD_AFTER_S = 300.0
FRAME_TEXT = "x" * 1_000
FRAMES_PER_APPEND = 64
PACKED_STREAMS = 2_000
STREAM_TOKENS = 500
WORDS = tuple((__doc__ or "").split())


@dataclass(slots=True)
class Figures:
    """How long the appends of one phase took."""

    seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        ordered = sorted(self.seconds)
        places = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
        found = {name: ordered[int(len(ordered) * share)] for name, share in places.items()}
        found["max"] = ordered[-1]
        return {name: round(value * 1_000, 2) for name, value in found.items()}


class Bench:
    """One ledger, whose clock stands until it is moved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_ms = 1_700_000_000_000
        self.phases: dict[str, Figures] = {}
        self.took_s: dict[str, float] = {}
        self._numbers = iter(range(1, sys.maxsize))
        self._lines: list[tuple[bytes, list[int]]] = []
        self.ledger: SqliteLedger

    async def open(self) -> None:
        self.ledger = await SqliteLedger.open(
            self.path, lambda: self.now_ms, retention=RetentionSettings(cold_after_s=COLD_AFTER_S)
        )
        for _ in range(LINES):
            self._lines.append((await self.create(TTL_S), [0]))

    async def create(self, ttl_s: float) -> bytes:
        stream = next(self._numbers).to_bytes(16, "big")
        await self.ledger.create(NewStream(stream, "{}", Durability.PROCESS, ttl_s))
        return stream

    async def fill(self, count: int, frames: int, ttl_s: float) -> None:
        """Ended streams of so many frames, written side by side as in life."""
        for begin in range(0, count, LINES):
            some = [await self.create(ttl_s) for _ in range(min(LINES, count - begin))]
            for at in range(0, frames + 1, FRAMES_PER_APPEND):
                beyond = min(at + FRAMES_PER_APPEND, frames + 1)
                for stream in some:
                    await self.ledger.append(
                        [Append(stream, 1, n, _record(n, frames)) for n in range(at, beyond)]
                    )

    async def store(self, records: list[Record]) -> None:
        stream = await self.create(TTL_S)
        await self.ledger.append([Append(stream, 1, n, record) for n, record in enumerate(records)])

    async def produce(self, name: str, during: Callable[[], Awaitable[object]]) -> None:
        """Append at an even pace until `during` has ended."""
        figures = self.phases[name] = Figures()
        begun = time.perf_counter()
        work = asyncio.ensure_future(during())
        while not work.done():
            batch = []
            for stream, index in self._lines:
                batch.append(
                    Append(stream, 1, index[0], Record(encode(Token(" the", index[0])), (7,)))
                )
                index[0] += 1
            before = time.perf_counter()
            await self.ledger.append(batch)
            took = time.perf_counter() - before
            figures.seconds.append(took)
            await asyncio.sleep(max(0.0, PACE_S - took))
        await work
        self.took_s[name] = round(time.perf_counter() - begun, 2)


def _record(index: int, frames: int) -> Record:
    if index == frames:
        return Record(encode(StreamEnd(frames, FinishReason.STOP, index, 0)), ())
    return Record(encode(Token(FRAME_TEXT, index)), (index & 0xFFFF,))


def _sentence(seed: int) -> list[Record]:
    random = Random(seed)
    words = [random.choice(WORDS) for _ in range(STREAM_TOKENS)]
    records = [Record(encode(Token(f" {w}", n)), (len(w),)) for n, w in enumerate(words)]
    return [*records, _record(STREAM_TOKENS, STREAM_TOKENS)]


async def measure(folder: Path, mib: int, streams: int) -> dict[str, object]:
    path = folder / "ledger.db"
    bench = Bench(path)
    await bench.open()
    frames = 1_000
    await bench.fill(max(1, mib * MIB // (frames * 1_020)), frames, ttl_s=100)
    await bench.fill(streams, 4, ttl_s=200)
    filled = path.stat().st_size
    gc.collect()
    gc.freeze()  # what the bench has filled memory with is not collected during the phases
    await bench.produce("alone", lambda: asyncio.sleep(ALONE_S))
    bench.now_ms += 150_000
    await bench.produce("removing_large", bench.ledger.expire)
    after_large = path.stat().st_size
    bench.now_ms += 100_000
    await bench.produce("removing_many", bench.ledger.expire)
    for number in range(PACKED_STREAMS):
        await bench.store(_sentence(number))
    bench.now_ms += 2 * int(COLD_AFTER_S * 1_000)
    await bench.produce("packing", bench.ledger.expire)
    await bench.produce("alone_again", lambda: asyncio.sleep(ALONE_S))
    left = path.stat().st_size
    await bench.ledger.close()
    return {
        **{name: figures.summary() for name, figures in bench.phases.items()},
        "took_s": bench.took_s,
        "filled_mib": round(filled / MIB, 1),
        "after_large_mib": round(after_large / MIB, 1),
        "after_all_mib": round(left / MIB, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=200, help="of streams that expire at once")
    parser.add_argument("--streams", type=int, default=10_000, help="short ones that do")
    parser.add_argument("--folder", type=Path, default=None, help="where the ledger lies")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        print(f"{cpu()}, {disk(Path(name))}, load {os.getloadavg()[0]:.1f}")
        found = uvloop.run(measure(Path(name), options.mib, options.streams))
    for phase, figures in found.items():
        print(f"{phase:18} {figures}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
