"""The Worker in workerd beside the Python edge: the same origin, the same work, a reader a stream.

    python tests/bench/bench_worker.py [--seconds 4] [--rounds 3] [--disk FOLDER]

Frames of 256 bytes over HTTP/1.1, in the frames view. The Worker commits each to SQLite on the disk
before anybody sees it; the Python edge keeps none. Server, source and readers share the machine's
cores. `frames_per_s` is of 20 streams that have as many frames as are taken, `cpu_us` what a server
takes of the processor for each of those, which others on the machine change least; `p50_ms` of one
stream that has 1,000 a second; `stream_kib` is what each of a hundred streams with a reader costs
beside a hundred others, at a frame a second; `flood_mib` is the most that workerd held while a
reader that does not read could have had any number of frames; `fsync_ms` is the median on that
disk. Each figure is the median of the rounds. It ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, cast

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.frame import FRAMES_TYPE  # noqa: E402
from tests.bench.bench_edge import answering  # noqa: E402
from tests.bench.edge.readers import FRAMES, stalled, stream_id  # noqa: E402
from tests.bench.machine import disk, print_line  # noqa: E402
from tests.bench.measured import cpu_s, process, resident_kib  # noqa: E402
from tests.bench.worker.source import FLOOD, SLOW, THOUSAND  # noqa: E402
from tests.e2e.processes import free_port  # noqa: E402
from tests.worker.workerd import Workerd  # noqa: E402

STREAMS = 20
HELD = 100
SETTLE_S = 1.0
FLOOD_S = 5.0
FSYNCS = 200
REQUEST = "GET /v1/generate/{id} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n"
_STAMP = re.compile(rb"~([0-9]{6})\.")


class Reader(asyncio.Protocol):
    """One connection with one stream."""

    def __init__(self, stream: bytes) -> None:
        self._stream = stream
        self.frames = 0
        self.begun = asyncio.Event()
        self.latencies_s: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        request = REQUEST.format(id=self._stream.hex(), accept=FRAMES_TYPE)
        self._transport.write(request.encode())

    def data_received(self, data: bytes) -> None:
        found = _STAMP.findall(data)
        if found:
            self.frames += len(found)
            self.begun.set()
            late = (int(monotonic() * 1e5) - int(found[-1])) % 1_000_000
            self.latencies_s.append(late / 1e5)

    def close(self) -> None:
        self._transport.abort()


class Bench:
    """One server with readers of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._last = 0

    async def readers(self, kind: int, count: int) -> list[Reader]:
        loop = asyncio.get_running_loop()
        made: list[Reader] = []
        for _ in range(count):
            self._last += 1
            make = partial(Reader, stream_id(kind, self._last))
            _, reader = await loop.create_connection(make, "127.0.0.1", self._port)
            made.append(reader)
        return made

    async def flood(self, seconds: float, pid: int) -> tuple[float, float]:
        """Frames a second, and the microseconds of processor time that the server takes of each."""
        readers = await self.readers(FLOOD, STREAMS)
        await asyncio.sleep(SETTLE_S)
        before, begun, spent = sum(reader.frames for reader in readers), monotonic(), cpu_s(pid)
        await asyncio.sleep(seconds)
        came, took = sum(reader.frames for reader in readers) - before, monotonic() - begun
        spent = cpu_s(pid) - spent
        for reader in readers:
            reader.close()
        await asyncio.sleep(SETTLE_S)
        return came / took, spent / came * 1e6

    async def p50_ms(self, seconds: float) -> float:
        (reader,) = await self.readers(THOUSAND, 1)
        await asyncio.sleep(SETTLE_S)
        reader.latencies_s.clear()
        await asyncio.sleep(seconds)
        reader.close()
        return statistics.median(reader.latencies_s) * 1e3

    async def stream_kib(self, pid: int) -> float:
        warm = await self.readers(SLOW, HELD)
        await asyncio.gather(*(reader.begun.wait() for reader in warm))
        await asyncio.sleep(2 * SETTLE_S)
        before = resident_kib(pid)
        held = await self.readers(SLOW, HELD)
        await asyncio.gather(*(reader.begun.wait() for reader in held))
        await asyncio.sleep(2 * SETTLE_S)
        grown = resident_kib(pid) - before
        for reader in (*warm, *held):
            reader.close()
        return grown / HELD


def most_resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def fsync_ms(folder: Path) -> float:
    """Return what one page more costs on this disk."""
    took: list[float] = []
    with (folder / "fsync").open("wb", buffering=0) as file:
        for _ in range(FSYNCS):
            file.write(bytes(4096))
            begun = perf_counter()
            os.fsync(file.fileno())
            took.append(perf_counter() - begun)
    return statistics.median(took) * 1e3


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    link, upstream, edge_port = (free_port() for _ in range(3))
    edge_command = (
        *(sys.executable, "-m", "tailrace.cli", "edge", "--http", f"127.0.0.1:{edge_port}"),
        *("--origin", f"127.0.0.1:{link}"),
    )
    found: dict[str, list[float]] = {}
    source = ROOT / "tests/bench/worker/source.py"
    origin_url = f"http://127.0.0.1:{upstream}"
    async with (
        process(sys.executable, source, link, upstream) as origin,
        process(*edge_command) as edge,
        Workerd(origin_url, folder / "rounds") as worker,
    ):
        assert origin.stdout is not None
        await origin.stdout.readline()
        await answering(edge_port)
        ours, theirs = Bench(worker.port), Bench(edge_port)
        for _ in range(options.rounds):
            found.setdefault("fsync_ms", []).append(fsync_ms(folder))
            servers = (("object", ours, worker.pid), ("python", theirs, edge.pid))
            for name, bench, pid in servers:
                rate, cpu_us = await bench.flood(options.seconds, pid)
                found.setdefault(f"{name}_frames_per_s", []).append(rate)
                found.setdefault(f"{name}_cpu_us", []).append(cpu_us)
                late = await bench.p50_ms(options.seconds)
                found.setdefault(f"{name}_p50_ms", []).append(late)
        async with Workerd(origin_url, folder / "memory") as fresh:
            found["stream_kib"] = [await Bench(fresh.port).stream_kib(fresh.pid)]
        async with Workerd(origin_url, folder / "flood") as fresh:
            with stalled(fresh.port, FRAMES, FLOOD, 1, FRAMES_TYPE.encode()):
                await asyncio.sleep(FLOOD_S)
            found["flood_mib"] = [most_resident_mib(fresh.pid)]
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        **{name: round(value, 2) for name, value in medians.items()},
        "python_vs_object": round(
            medians["python_frames_per_s"] / medians["object_frames_per_s"], 2
        ),
        "python_vs_object_cpu": round(medians["object_cpu_us"] / medians["python_cpu_us"], 2),
        "disk": disk(folder),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, help="of the objects; default: of temporary files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        print_line(uvloop.run(measure(Path(folder), options)))


if __name__ == "__main__":
    main()
