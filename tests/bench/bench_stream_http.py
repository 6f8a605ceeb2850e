"""Time appends to durable streams over HTTP: `POST /v1/stream/NAME` through an edge and an origin.

    python tests/bench/bench_stream_http.py [--seconds 5] [--rounds 3] [--writers 50] [--bytes 256]

Each writer has a connection and a stream of its own, and sends its next append when the last one is
acknowledged (closed loop). Edge, origin and writers share the machine. The Durable Streams
reference server (Node, file-backed; each append waits for the disk) is measured in turn with ours,
by the same writers, without an edge in front. Each figure is the median of the rounds. The last
line is JSON: appends/s, p50 and p99 in ms for each server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.bench_edge import answering  # noqa: E402
from tests.bench.bench_ledger_work import Missing  # noqa: E402
from tests.bench.machine import cpu, disk, print_line  # noqa: E402
from tests.bench.measured import process  # noqa: E402
from tests.bench.peers.durable_streams import SCRIPT, VERSION, installed_server  # noqa: E402
from tests.bench.peers.server import Server  # noqa: E402
from tests.e2e.processes import free_port  # noqa: E402

OURS = ("process", "power")
PEER = "reference"
READY_S = 60.0
SETTLE_S = 0.5
"""Time between the first append of a run and the first that counts."""

Measured = tuple[float, float, float]
"""Appends a second, p50 and p99 in ms."""


@asynccontextmanager
async def tailrace(durability: str, folder: Path) -> AsyncIterator[int]:
    """Run an origin and an edge; give the edge's port."""
    link, port = f"127.0.0.1:{free_port()}", free_port()
    os.environ["TAILRACE_STREAMS_DURABILITY"] = durability
    run = (sys.executable, "-m", "tailrace.cli")
    origin = process(*run, "origin", "--link", link, "--data", folder, tree=ROOT)
    edge = process(*run, "edge", "--http", f"127.0.0.1:{port}", "--origin", link, tree=ROOT)
    async with origin, edge:
        await answering(port)
        yield port


@asynccontextmanager
async def reference(folder: Path) -> AsyncIterator[int]:
    """Run the reference server; give its port."""
    port = free_port()
    data = folder / "data"
    data.mkdir()
    server = await asyncio.to_thread(
        Server, ["node", SCRIPT, await asyncio.to_thread(installed_server), port, data], "ready"
    )
    try:
        yield port
    finally:
        await asyncio.to_thread(server.stop)


async def answered(reader: asyncio.StreamReader) -> int:
    """Read one answer; return its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    for line in lines:
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.partition(b":")[2]))
        if line.startswith(b"transfer-encoding:"):
            await reader.readuntil(b"0\r\n\r\n")
    return int(head.split(b" ", 2)[1])


async def write(port: int, number: int, size: int, until_s: float, took_s: list[float]) -> None:
    """Create a stream and append to it until the time is over; note how long each append took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path = f"/v1/stream/bench-{os.getpid()}-{number}"
    kind = "Host: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
    writer.write(f"PUT {path} HTTP/1.1\r\n{kind}Content-Length: 0\r\n\r\n".encode())
    while await answered(reader) == 503:  # no origin yet
        await asyncio.sleep(SETTLE_S)
        writer.write(f"PUT {path} HTTP/1.1\r\n{kind}Content-Length: 0\r\n\r\n".encode())
    request = f"POST {path} HTTP/1.1\r\n{kind}Content-Length: {size}\r\n\r\n".encode()
    request += bytes(size)
    begins_s = time.perf_counter() + SETTLE_S
    while (began_s := time.perf_counter()) < until_s:
        writer.write(request)
        status = await answered(reader)
        if status not in (200, 204):
            raise RuntimeError(f"the append was answered {status}")
        if began_s >= begins_s:
            took_s.append(time.perf_counter() - began_s)
    writer.close()


async def measure(port: int, writers: int, size: int, seconds: float) -> Measured:
    took_s: list[float] = []
    until_s = time.perf_counter() + seconds + SETTLE_S
    async with asyncio.TaskGroup() as group:
        for number in range(writers):
            group.create_task(write(port, number, size, until_s, took_s))
    took_s.sort()
    p50, p99 = (took_s[len(took_s) * share // 100] * 1e3 for share in (50, 99))
    return len(took_s) / seconds, p50, p99


async def rounds(options: argparse.Namespace) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for number in range(options.rounds):
        for name in (*OURS, PEER):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                serving = tailrace(name, Path(folder)) if name in OURS else reference(Path(folder))
                try:
                    async with serving as port:
                        one = await measure(port, options.writers, options.bytes, options.seconds)
                except Missing as missing:
                    print(f"{name}: needs {missing}", file=sys.stderr)
                    continue
            found.setdefault(name, []).append(one)
            said = f"{one[0]:,.0f} appends/s, p50 {one[1]:.2f} ms, p99 {one[2]:.2f} ms"
            print(f"round {number + 1}, {name}: {said}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writers", type=int, default=50)
    parser.add_argument("--bytes", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="where ledgers and files are kept")
    options = parser.parse_args()
    place = options.folder or Path(tempfile.gettempdir())
    print(f"{cpu()}; {disk(place)}; peer: Durable Streams reference server {VERSION}")
    found = uvloop.run(rounds(options))
    line: dict[str, object] = {"writers": options.writers, "bytes": options.bytes}
    for name, all_rounds in found.items():
        rate, p50, p99 = (statistics.median(column) for column in zip(*all_rounds, strict=True))
        line |= {f"{name}_appends_per_s": round(rate)}
        line |= {f"{name}_p50_ms": round(p50, 2), f"{name}_p99_ms": round(p99, 2)}
    print_line(line)


if __name__ == "__main__":
    main()
