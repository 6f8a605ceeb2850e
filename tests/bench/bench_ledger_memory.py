"""Measure the memory that idle streams and waiting subscribers take.

    python tests/bench/bench_ledger_memory.py CASE rss|traced

Each case runs in a process of its own, so that nothing else is counted: once for what the
process grows by (`rss`), once for what Python says it holds (`traced`, without SQLite's
share). It prints bytes per stream, or per subscriber, as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.flow.credit_window import Window  # noqa: E402
from tailrace.ledger.frame import Durability, Sampling  # noqa: E402
from tailrace.ledger.interface import Append, NewStream, Record  # noqa: E402
from tailrace.ledger.sqlite.ledger import SqliteLedger  # noqa: E402
from tailrace.origin.edges.feed import Feed  # noqa: E402
from tailrace.origin.generations.presence import Readers  # noqa: E402
from tailrace.origin.generations.recipe import Recipe, packed_ids  # noqa: E402
from tests.bench.bench_ledger_ours import TOKEN_ID, TTL_S, now_ms, stream_id  # noqa: E402
from tests.bench.bench_ledger_work import frame  # noqa: E402

STREAMS = 10_000
FRAMES = 20
GROUP = 64
"""Streams that are made and written at the same time."""
CREDIT = 256
PROMPT_IDS = 16
SWEEPS = 4
"""Calls of `expire`, which also evicts what was not used since the previous call."""
TURNS = 1_000
"""Turns of the event loop after each, in which tails become segments, some per commit."""


class Nowhere:
    """An outlet that drops everything."""

    congested = False

    def send(self, data: bytes) -> None:
        pass

    def relay(self, frames: Sequence[bytes], corr: int) -> None:
        pass

    def closed(self, corr: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per item of each case, resident and as Python counts them."""

    watched_rss: int
    watched_traced: int
    idle_rss: int
    idle_traced: int
    subscriber_rss: int
    subscriber_traced: int


async def watched(ledger: SqliteLedger) -> list[Feed]:
    """Idle streams, each with a subscriber that has all of it and waits for more."""
    feeds, readers = [], Readers()
    for streams in _groups():
        await _fill(ledger, streams)
        feeds += [_attach(ledger, stream, readers) for stream in streams]
    return feeds


async def idle(ledger: SqliteLedger) -> list[Feed]:
    """Idle streams that nobody reads."""
    for streams in _groups():
        await _fill(ledger, streams)
    return []


async def subscriber(ledger: SqliteLedger) -> list[Feed]:
    """Return `STREAMS` subscribers, all of one stream."""
    stream, readers = stream_id(0), Readers()
    await _fill(ledger, [stream])
    return [_attach(ledger, stream, readers) for _ in range(STREAMS)]


CASES: dict[str, Callable[[SqliteLedger], Awaitable[list[Feed]]]] = {
    "watched": watched,
    "idle": idle,
    "subscriber": subscriber,
}


def measure_all(folder: Path) -> Memory:
    """Run every case in both ways; files go into `folder`."""
    figures = {}
    for case in CASES:
        for way in ("rss", "traced"):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                command = [sys.executable, __file__, case, way, place]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{case} {way} failed:\n{done.stderr}")
            figures[f"{case}_{way}"] = int(json.loads(done.stdout.splitlines()[-1]))
    return Memory(**figures)


async def measure(case: str, way: str, folder: Path) -> int:
    ledger = await SqliteLedger.open(folder / "ledger.sqlite", now_ms)
    await _fill(ledger, [stream_id(10**9 + n) for n in range(GROUP)])  # warms up
    if way == "traced":
        tracemalloc.start()
    before = _bytes(way)
    kept = await CASES[case](ledger)
    for _ in range(SWEEPS):
        await ledger.expire()
        for _ in range(TURNS):
            await asyncio.sleep(0)
    grown = _bytes(way) - before
    for feed in kept:
        feed.detach()
    await ledger.close()
    return round(grown / STREAMS)


def _bytes(way: str) -> int:
    gc.collect()
    if way == "traced":
        return tracemalloc.get_traced_memory()[0]
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # memory that the C library keeps for later does not count
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _groups() -> list[list[bytes]]:
    ids = [stream_id(number) for number in range(STREAMS)]
    return [ids[at : at + GROUP] for at in range(0, STREAMS, GROUP)]


async def _fill(ledger: SqliteLedger, streams: Sequence[bytes]) -> None:
    new = [NewStream(stream, _recipe(), Durability.PROCESS, TTL_S) for stream in streams]
    await asyncio.gather(*[ledger.create(one) for one in new])
    for index in range(FRAMES):
        batch = [Append(stream, 1, index, _record(index)) for stream in streams]
        assert await ledger.append(batch) == []


def _record(index: int) -> Record:
    """Return a record all of its own, as an engine makes them: nothing in it is shared."""
    return Record(bytes(bytearray(frame(index))), (TOKEN_ID + index,))


def _recipe() -> str:
    """Return what a stream with a short prompt is continued from: about 770 bytes."""
    return Recipe(
        model="demo",
        fingerprint="0" * 64,
        prompt_ids=packed_ids(range(1000, 1000 + PROMPT_IDS)),
        prompt_sha256="0" * 64,
        max_tokens=256,
        stop=(),
        ignore_eos=False,
        priority="standard",
        sampling=Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=7),
    ).model_dump_json()


def _attach(ledger: SqliteLedger, stream: bytes, readers: Readers) -> Feed:
    feed = Feed(Nowhere(), 1, Window.starting(0, CREDIT), ledger, readers)
    feed.attach(stream, FRAMES)
    return feed


if __name__ == "__main__":
    _, case_name, way_name, place_name = sys.argv
    print(json.dumps(uvloop.run(measure(case_name, way_name, Path(place_name)))))
