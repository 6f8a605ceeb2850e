"""Processor time per relayed frame over HTTP/3, beside Caddy: frames that come apart, and a replay.

    python tests/bench/bench_http3.py [--seconds 8] [--rounds 3] [--profile FILE]

64 connections with a stream each, a frame every 50 ms; then replays of 500 frames at once. The
server is on one core, source and clients on another. Of a replay the peer's upstream writes one
event after another, as streaming servers do, and for `block` all in one write, as our origins do.
Then what readers hold in the edge that stall. It ends with one line of JSON; times in us, sizes
in KiB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.up import CertificateFiles, development_certificate  # noqa: E402
from tests.bench.http3.load import Load  # noqa: E402
from tests.bench.http3.source import BLOCK, BURST, BURST_FRAMES, PACED  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.bench.measured import cpu_s, process, resident_kib  # noqa: E402
from tests.e2e.processes import free_port  # noqa: E402

CONNECTIONS = 64
REPLAYS = 12
REPLAY_CONNECTIONS = 4
STALLED = 100
SERVER_CORE, OTHER_CORE = "0", "1"
TICKS = os.sysconf("SC_CLK_TCK")
CADDYFILE = """
{{
  admin off
  auto_https off
}}
https://localhost:{port} {{
  tls {certificate} {key}
  reverse_proxy 127.0.0.1:{upstream} {{
    flush_interval -1
  }}
}}
"""


def path(kind: int, number: int) -> str:
    return f"/v1/generate/{bytes([kind, *number.to_bytes(15, 'big')]).hex()}"


async def connected(port: int, cafile: str, count: int) -> list[Load]:
    made = []
    for _ in range(count):
        load = Load(port, cafile)
        load.connect()
        async with asyncio.timeout(30):
            await load.connected.wait()
        made.append(load)
    return made


async def paced(pid: int, port: int, cafile: str, seconds: float) -> float:
    """Measure processor time per frame of 64 streams whose frames come apart."""
    loads = await connected(port, cafile, CONNECTIONS)
    for n, load in enumerate(loads):
        load.ask(path(PACED, n))
    await asyncio.sleep(2.0)
    before, frames = cpu_s(pid), sum(load.frames for load in loads)
    began = monotonic()
    await asyncio.sleep(seconds)
    spent, came = cpu_s(pid) - before, sum(load.frames for load in loads) - frames
    expected = CONNECTIONS * 20 * (monotonic() - began)
    for load in loads:
        load.close()
    assert came > 0.7 * expected, f"only {came} of {expected:.0f} frames came: the cores are full"
    return spent / came * 1e6


async def replay(pid: int, port: int, cafile: str, kind: int) -> float:
    """Processor time per frame of replays, of 500 frames each."""
    loads = await connected(port, cafile, REPLAY_CONNECTIONS)
    before = cpu_s(pid)
    for n in range(REPLAYS):
        for load in loads:
            load.ask(path(kind, n))
        async with asyncio.timeout(60):
            await asyncio.gather(*(load.ended.wait() for load in loads))
    spent = cpu_s(pid) - before
    came = sum(load.frames for load in loads)
    for load in loads:
        load.close()
    assert came == REPLAYS * REPLAY_CONNECTIONS * (BURST_FRAMES + 1), came
    return spent / came * 1e6


async def stalled_kib(pid: int, port: int, cafile: str) -> float:
    """Return what a reader costs that takes and acknowledges nothing, above an idle connection."""
    held, loads = [], await connected(port, cafile, STALLED)
    for stalls in (False, False, True):
        held.append(resident_kib(pid))
        more = await connected(port, cafile, STALLED)
        for n, load in enumerate(more if stalls else ()):
            load.ask(path(BURST, n))
            load.stall()
        await asyncio.sleep(5.0)
        loads += more
    held.append(resident_kib(pid))
    for load in loads:
        load.close()
    _, before, idle, stalling = held
    return ((stalling - idle) - (idle - before)) / STALLED


async def answering(port: int, cafile: str) -> None:
    """Wait until a server answers HTTP/3, and its stream has begun."""
    async with asyncio.timeout(60):
        while True:
            load = Load(port, cafile)
            load.connect()
            try:
                async with asyncio.timeout(2):
                    await load.connected.wait()
                    load.ask(path(BURST, 0))
                    await load.ended.wait()
                    return
            except (TimeoutError, OSError):
                continue
            finally:
                load.close()


async def measure(
    files: CertificateFiles,
    folder: Path,
    seconds: float,
    rounds: int,
    profile_to: str | None = None,
) -> dict[str, object]:
    link, upstream, edge_port, caddy_port = (free_port() for _ in range(4))
    cafile = str(files.certificate)
    caddyfile = folder / "Caddyfile"
    caddyfile.write_text(
        CADDYFILE.format(
            port=caddy_port, certificate=files.certificate, key=files.key, upstream=upstream
        )
    )
    source = ROOT / "tests/bench/http3/source.py"
    edge_command = (
        *(sys.executable, "-m", "tailrace.cli", "edge", "--http", f"127.0.0.1:{free_port()}"),
        *("--https", f"127.0.0.1:{edge_port}", "--origin", f"127.0.0.1:{link}"),
        *("--certificate", files.certificate, "--key", files.key),
    )
    caddy_command = ("caddy", "run", "--adapter", "caddyfile", "--config", caddyfile)
    results: dict[str, list[float]] = {}
    async with (
        process(sys.executable, source, link, upstream, core=OTHER_CORE) as origin,
        process(*edge_command, core=SERVER_CORE) as edge,
        process(*caddy_command, core=SERVER_CORE) as caddy,
    ):
        assert origin.stdout is not None
        await origin.stdout.readline()
        for port in (edge_port, caddy_port):
            await answering(port, cafile)
        for _ in range(rounds):
            for name, pid, port in (
                ("edge", edge.pid, edge_port),
                ("caddy", caddy.pid, caddy_port),
            ):
                spent = await paced(pid, port, cafile, seconds)
                results.setdefault(f"{name}_paced_us", []).append(spent)
                for what, kind in (("replay", BURST), ("block", BLOCK)):
                    spent = await replay(pid, port, cafile, kind)
                    results.setdefault(f"{name}_{what}_us", []).append(spent)
        results["h3_stalled_reader_kib"] = [await stalled_kib(edge.pid, edge_port, cafile)]
        if profile_to is not None:
            await profile(edge.pid, edge_port, cafile, seconds, profile_to)
    return report(results)


async def profile(pid: int, port: int, cafile: str, seconds: float, to: str) -> None:
    """Record a py-spy profile of process `pid` while frames come apart."""
    recording = await asyncio.create_subprocess_exec(
        *("py-spy", "record", "-p", str(pid), "-d", str(int(seconds) + 1), "-r", "500"),
        *("-f", "raw", "-o", to),
        stdout=subprocess.DEVNULL,
    )
    await paced(pid, port, cafile, seconds)
    await recording.wait()


def report(results: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in results.items()}
    return {
        **{name: round(value, 1) for name, value in medians.items()},
        "h3_cpu_vs_caddy": round(medians["edge_paced_us"] / medians["caddy_paced_us"], 2),
        "h3_replay_vs_caddy": round(medians["edge_replay_us"] / medians["caddy_replay_us"], 2),
        "h3_block_vs_caddy": round(medians["edge_block_us"] / medians["caddy_block_us"], 2),
        "rounds": {name: [round(value) for value in each] for name, each in results.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", help="write what py-spy saw of the edge there")
    options = parser.parse_args()
    if shutil.which("caddy") is None:
        sys.exit("needs Caddy: apt install caddy")
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    with tempfile.TemporaryDirectory() as folder:
        files = development_certificate(Path(folder) / "certificate", datetime.now(UTC))
        work = measure(files, Path(folder), options.seconds, options.rounds, options.profile)
        print_line(uvloop.run(work))


if __name__ == "__main__":
    main()
