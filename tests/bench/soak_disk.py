"""A disk that others fill, first for some seconds and then for longer: what becomes of the streams.

    python tests/bench/soak_disk.py [--short-s 12] [--long-s 40] [--streams 10]

The ledger lies on a tmpfs of 160 MiB that is mounted for it, so this needs root and Linux. Streams
run at 20 frames of 8 KiB a second each, so that the space reserved for the WAL is used up after
some seconds, and producers are paused. Twice, another file takes all space that is left, and while
it is there somebody opens another stream. A disk that is full for `--short-s` must end no stream;
one that is full for `--long-s` ends them as failed and retryable, once the grace of the ledger is
over. Afterwards every frame that a reader got is read again from the ledger. It ends with one line
of JSON, and exits with 1 if any of this is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.origin.producer import About, End, Output, Request, Resumption, Text  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.e2e.processes import Edge, Origin, running  # noqa: E402
from tests.e2e.sse import SSE, Event, events  # noqa: E402

DISK_MIB = 160
WORD_S = 0.05
WORD_BYTES = 8 << 10
SETTLE_S = 3.0
"""Time between two phases."""
SETTINGS = """
[origin]
producer = "tests.bench.soak_disk:Metronome"
"""


class Metronome:
    """A producer of numbered words, one every `WORD_S` seconds, until it is cancelled."""

    about = About("metronome", "metronome 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield as many words as the request asks for."""
        for number in range(request.recipe.max_tokens):
            yield Text(f"{number} ".rjust(WORD_BYTES))
            await asyncio.sleep(WORD_S)
        yield End(total_tokens=request.recipe.max_tokens)

    async def close(self) -> None:
        """Hold nothing."""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder on a disk of its own."""
    size = f"size={DISK_MIB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(file: Path) -> int:
    """Take all the space that is left on the disk; return the MiB taken."""
    taken = 0
    with file.open("wb", buffering=0) as into:
        for size in (1 << 20, 1 << 12):
            while True:
                try:
                    taken += into.write(bytes(size))
                except OSError:
                    break
    return taken >> 20


class Reader:
    """A stream, and what its reader has received."""

    def __init__(self) -> None:
        self.stream = ""
        self.events: list[Event] = []

    @property
    def count(self) -> int:
        """Return the number of words so far."""
        return sum(event.name == "message" for event in self.events)

    @property
    def last(self) -> Event | None:
        """Return the event that ended the stream, if it has ended."""
        return self.events[-1] if self.events and self.events[-1].name != "message" else None

    async def read(self, client: httpx.AsyncClient, edge: Edge, words: int) -> None:
        """Open a stream of that many words and read it to its end."""
        body = {"model": "metronome", "prompt": "tick", "max_tokens": words}
        url = f"{edge.url}/v1/generate"
        async with client.stream("POST", url, json=body, headers=SSE) as response:
            assert response.status_code == 200, await response.aread()
            self.stream = response.headers["Tailrace-Stream"]
            async for event in events(response):
                self.events.append(event)

    async def is_stored(self, client: httpx.AsyncClient, edge: Edge) -> bool:
        """Return True if the ledger has what the reader got, in the same order."""
        again = []
        url = f"{edge.url}/v1/generate/{self.stream}"
        async with client.stream("GET", url, headers=SSE) as response:
            async for event in events(response):
                again.append(event)
                if len(again) == len(self.events):
                    break
        return again == self.events


async def phase(
    client: httpx.AsyncClient, edge: Edge, disk: Path, full_s: float, readers: list[Reader]
) -> dict[str, Any]:
    """Fill the disk for that many seconds; return what happened to the readers meanwhile."""
    before = [reader.count for reader in readers]
    began = time.monotonic()
    taken = await asyncio.to_thread(fill, disk / "others")
    await asyncio.sleep(full_s / 2)
    body = {"model": "metronome", "prompt": "tick", "max_tokens": 2}
    opened = await client.post(f"{edge.url}/v1/generate", json=body)
    ended_s = None
    while time.monotonic() - began < full_s:
        if ended_s is None and all(reader.last is not None for reader in readers):
            ended_s = round(time.monotonic() - began, 1)
        await asyncio.sleep(WORD_S)
    ended = [reader.last for reader in readers if reader.last is not None]
    (disk / "others").unlink()
    return {
        "full_s": full_s,
        "taken_mib": taken,
        "open_answered": opened.status_code,
        "words_meanwhile": sum(r.count for r in readers) - sum(before),
        "ended": len(ended),
        "ended_after_s": ended_s,
        "retryable": sum(bool(last.data.get("retryable")) for last in ended),
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run both phases on a disk at `folder`; return the figures."""
    words = int((options.short_s + options.long_s + 60) / WORD_S)
    settings = folder / "tailrace.toml"
    settings.write_text(SETTINGS)
    (folder / "disk").mkdir()
    with small_disk(folder / "disk") as disk:
        origin = Origin(disk / "data", config=settings)
        edge = Edge(origin)
        async with running(origin, edge), httpx.AsyncClient(timeout=httpx.Timeout(60.0)) as client:
            readers = [Reader() for _ in range(options.streams)]
            reading = [asyncio.create_task(each.read(client, edge, words)) for each in readers]
            await asyncio.sleep(SETTLE_S)
            short = await phase(client, edge, disk, options.short_s, readers)
            print(short, file=sys.stderr)
            await asyncio.sleep(SETTLE_S)
            moved_on = all(reader.last is None for reader in readers)
            long = await phase(client, edge, disk, options.long_s, readers)
            print(long, file=sys.stderr)
            await asyncio.gather(*reading)
            await asyncio.sleep(SETTLE_S)
            stored = [await reader.is_stored(client, edge) for reader in readers]
            after = Reader()
            await after.read(client, edge, 5)
            is_alive = origin.is_up
    return {
        "short": short,
        "long": long,
        "streams": options.streams,
        "went_on_after_short": moved_on,
        "stored_as_read": sum(stored),
        "new_stream_afterwards": after.count,
        "origin_alive": is_alive,
    }


def main() -> None:
    """Run both phases and print the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short-s", type=float, default=12.0, help="seconds that end no stream")
    parser.add_argument("--long-s", type=float, default=40.0, help="seconds that end them all")
    parser.add_argument("--streams", type=int, default=10, help="streams that run meanwhile")
    options = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0:
        sys.exit("needs Linux and root: it mounts a small disk for the ledger")
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    print_line(found)
    is_right = (
        found["short"]["ended"] == 0
        and found["went_on_after_short"]
        and found["long"]["ended"] == found["long"]["retryable"] == options.streams
        and found["stored_as_read"] == options.streams
        and found["origin_alive"]
    )
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
