"""Measure an edge beside nginx: processor time per relayed frame, waits and memory of clients.

    python tests/bench/bench_edge.py [--seconds 4] [--rounds 3] [--tree FOLDER] [--only PART]

The server runs on one core, the source and the clients on another. Frames have 18 bytes. Each of 64
and of 512 connections gets 20 frames a second, in one of four patterns:

- `staggered`: each connection has its own times, to the millisecond of an event loop's timers, so
  that about ten frames of 512 connections come together
- `apart`: the frames of 512 connections come one by one, to the microsecond
- `step`: all frames come at once, as an engine's step makes them
- `saturated`: as many frames as there is credit for

nginx streams the same events over HTTP/1.1 and HTTP/2 without buffering, with one upstream
connection per client. `p50_vs_nginx` is measured `apart`: of ten frames that come together each
would wait for those before it, while nginx gets them one after the other. Where npm is installed,
workerd passes the events on in JavaScript; `…_vs_workerd_js` is the number of frames that the edge
relays in the processor time that workerd takes for one.

- `p99_beside_stalled`: latency of 64 readers beside 500 that read nothing, as a multiple of their
  latency without those; the worst of three response formats
- `gc_pause_ms`: longest garbage collection while 2,000 idle WebSockets connect, plain or over TLS;
  `gc_whole_ms`: duration of a full collection with all of them connected
- `flood_p99_ms`: latency of frames of 64 readers while four connections flood the edge with
  unproductive input, for the worst flood of tests/bench/edge/floods.py (`flood_worst`);
  `flood_…_hung_up`: number of times that the edge closed a flooding connection
- `stalled_reader_kib`: memory of a stalled reader, less that of a reader that gets no frames

`--tree` is another checkout whose edge is measured, with tests/bench/edge copied into it. Each
figure is the median of the rounds. bench_http3.py measures HTTP/3 in more detail, and
bench_links.py (part `links`) how long 50,000 readers wait when their link is cut. The last line is
JSON: times in us or ms as the names say, sizes in KiB of the edge and of the kernel's TCP buffers
together, null for a figure that was not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import ssl
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.up import development_certificate  # noqa: E402
from tests.bench import bench_http3, bench_links  # noqa: E402
from tests.bench.edge import floods  # noqa: E402
from tests.bench.edge.readers import (  # noqa: E402
    FRAMES,
    H2,
    SSE,
    WS,
    Reader,
    connect,
    stalled,
    trusting,
)
from tests.bench.edge.source import APART, FLOOD, PACED, SILENT, STEP  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.bench.measured import PAGE_KIB, cpu_s, process, resident_kib  # noqa: E402
from tests.e2e.processes import free_port  # noqa: E402
from tests.npm import installed  # noqa: E402
from tests.worker.workerd import FOLDER, runtime  # noqa: E402

SERVER_CORE, OTHER_CORE = "0", "1"
CONNECTIONS = (64, 512)
PER_S = 20
SETTLE_S = 1.0
ROWS = (
    *(("nginx", SSE), ("edge", SSE), ("edge", FRAMES), ("edge", WS)),
    *(("nginx", H2), ("edge", H2), ("workerd", SSE)),
)
VIEWS = (SSE, FRAMES, WS)
PARTS = ("frames", "storm", "idle", "stalled", "floods", "http3", "links")
IDLE, STALLED, STORM = 2000, 500, 1000
NEIGHBOUR_S = 6.0
"""Duration for which readers beside stalled ones are measured, in seconds."""
FLOOD_S = 3.0
"""Duration of each flood. Its clients connect again whenever the edge has hung up on them."""
MOST_SETTLE_S, IDLE_CPU_S = 60, 0.05
NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    listen 127.0.0.1:{h2_port} http2 backlog=2048;
    location / {{
      proxy_pass http://127.0.0.1:{upstream}; proxy_http_version 1.1; proxy_buffering off;
    }}
  }}
}}
"""


RELAY = """
export default {
  async fetch(request) {
    const from = await fetch(`http://127.0.0.1:UPSTREAM${new URL(request.url).pathname}`);
    const source = from.body.getReader();
    const body = new ReadableStream({
      async pull(controller) {
        const { done, value } = await source.read();
        if (done) controller.close();
        else controller.enqueue(value);
      },
    }, { highWaterMark: 0 });
    return new Response(body, { headers: from.headers });
  },
};
"""
CAPNP = """using Workerd = import "/workerd/workerd.capnp";
const config :Workerd.Config = (
  services = [
    (name = "relay", worker = (
      modules = [(name = "relay.js", esModule = embed "relay.js")],
      compatibilityDate = "2026-11-01",
    )),
    (name = "internet", network = (allow = ["private"])),
  ],
  sockets = [(name = "http", http = (), service = "relay")],
);
"""


def kernel_kib() -> float:
    """Return the kernel's TCP buffers, of both ends of all connections here."""
    line = next(x for x in Path("/proc/net/sockstat").read_text().splitlines() if x[:4] == "TCP:")
    fields = line.split()
    return int(fields[fields.index("mem") + 1]) * PAGE_KIB


async def answering(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return


def worker_of(pid: int) -> int:
    """Nginx's own child, which does the work."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@asynccontextmanager
async def relaying_worker(folder: Path, upstream: int) -> AsyncIterator[tuple[int, int] | None]:
    """Workerd with `RELAY`, its process and port; None where there is no npm to have it from."""
    if shutil.which("npm") is None:
        yield None
        return
    port = free_port()
    (folder / "relay.js").write_text(RELAY.replace("UPSTREAM", str(upstream)))
    config = folder / "relay.capnp"
    config.write_text(CAPNP)
    installed(FOLDER)
    serve = (runtime(), "serve", config, "config", "-s", f"http=127.0.0.1:{port}")
    async with process(*serve, core=SERVER_CORE) as worker:
        await answering(port)
        yield worker.pid, port


class Bench:
    """The servers, and the figures measured on them."""

    def __init__(
        self,
        edge: tuple[int, int],
        nginx: tuple[int, int],
        nginx_h2_port: int,
        edge_tls_port: int,
        collections: Path,
    ) -> None:
        """Take the process id and the port of each server."""
        self.servers = {"edge": edge, "nginx": nginx}
        self._nginx_h2_port = nginx_h2_port
        self._edge_tls_port = edge_tls_port
        self._collections = collections
        self.found: dict[str, list[float]] = {}
        self._next = 0

    @property
    def rows(self) -> list[tuple[str, str]]:
        return [(server, view) for server, view in ROWS if server in self.servers]

    def note(self, name: str, value: float) -> None:
        self.found.setdefault(name, []).append(value)

    async def connect(self, server: str, view: str, kind: int | None, count: int) -> list[Reader]:
        self._next += count
        port = self.servers[server][1]
        if (server, view) == ("nginx", H2):  # nginx serves HTTP/2 on a port of its own
            port = self._nginx_h2_port
        return await connect(port, view, kind, count, self._next)

    async def paced(
        self, server: str, view: str, kind: int, count: int, seconds: float, name: str
    ) -> None:
        """Processor time per frame, and how late frames are."""
        pid = self.servers[server][0]
        readers = await self.connect(server, view, kind, count)
        await asyncio.sleep(SETTLE_S)
        before, frames = cpu_s(pid), sum(reader.frames for reader in readers)
        for reader in readers:
            reader.latencies_s.clear()
        await asyncio.sleep(seconds)
        spent, came = cpu_s(pid) - before, sum(reader.frames for reader in readers) - frames
        late = sorted(value for reader in readers for value in reader.latencies_s)
        for reader in readers:
            reader.close()
        await asyncio.sleep(0.2)
        assert came > 0, f"{name}: nothing came"
        self.note(f"{name}_us", spent / came * 1e6)
        self._note_waits(name, late)
        if kind != FLOOD:
            self.note(f"{name}_share", came / (count * PER_S * seconds))

    def _note_waits(self, name: str, waits_s: list[float]) -> None:
        """Sorted; of a run so short that nothing was timed nothing is noted."""
        if waits_s:
            self.note(f"{name}_p50_ms", waits_s[len(waits_s) // 2] * 1e3)
            self.note(f"{name}_p99_ms", waits_s[len(waits_s) * 99 // 100] * 1e3)

    async def idle(self) -> None:
        """Measure the memory of idle sessions and the garbage collection pauses of their edge."""
        await self._idle("ws", self.servers["edge"][1], None)
        await self._idle("wss", self._edge_tls_port, trusting())

    async def _idle(self, name: str, port: int, tls: ssl.SSLContext | None) -> None:
        pid = self.servers["edge"][0]
        warm = await connect(port, WS, None, 100, tls=tls)
        await asyncio.sleep(SETTLE_S)
        for reader in warm:
            reader.close()
        before, collected = self._held_kib(), len(self._pauses_s())
        idle = await connect(port, WS, None, IDLE, tls=tls)
        await asyncio.sleep(SETTLE_S)
        self.note(f"idle_{name}_kib", (self._held_kib() - before) / IDLE)
        pauses_s = self._pauses_s()
        os.kill(pid, signal.SIGUSR1)
        await self._settled()
        whole_s = self._pauses_s()[len(pauses_s) :]
        self.note(f"gc_pause_{name}_ms", max(pauses_s[collected:], default=0.0) * 1e3)
        self.note(f"gc_whole_{name}_ms", max(whole_s) * 1e3)
        for reader in idle:
            reader.close()
        await self._settled()

    def _pauses_s(self) -> list[float]:
        return [float(line) for line in self._collections.read_text().split()]

    def _held_kib(self) -> float:
        return resident_kib(self.servers["edge"][0]) + kernel_kib()

    async def stalled(self) -> None:
        """Measure the memory of stalled readers and the latency of other readers beside them."""
        ways = [("", view, self.servers["edge"][1]) for view in VIEWS]
        for over, view, port in (*ways, ("tls_", SSE, self._edge_tls_port)):
            accepts = b"text/event-stream" if view == SSE else b"application/vnd.tailrace.frames"
            ask = partial(stalled, port, view, tls=trusting() if over else None)
            warm = [ask(SILENT, n, accepts) for n in range(STALLED // 5)]
            await self._neighbours(f"{over}beside_no_{view}")
            held = [self._held_kib()]
            clients = []
            for kind in (SILENT, FLOOD):
                clients += [ask(kind, n, accepts) for n in range(STALLED)]
                await self._settled()
                held.append(self._held_kib())
            silent, stalling = held[1] - held[0], held[2] - held[1]
            self.note(f"{over}silent_{view}_kib", silent / STALLED)
            self.note(f"{over}stalled_{view}_kib", (stalling - silent) / STALLED)
            await self._neighbours(f"{over}beside_stalled_{view}")
            for each in clients[STALLED:]:
                each.close()
            await self._settled()
            await self._neighbours(f"{over}beside_no_{view}")
            for each in (*warm, *clients):
                each.close()

    async def floods(self) -> None:
        """Measure the latency of other readers' frames while four connections flood the edge."""
        pid, port = self.servers["edge"]
        readers = await self.connect("edge", SSE, PACED, CONNECTIONS[0])
        await asyncio.sleep(SETTLE_S)
        await self._neighbours("beside_no_flood")
        for name in floods.NAMES:
            for reader in readers:
                reader.latencies_s.clear()
            before = cpu_s(pid)
            command = (sys.executable, floods.__file__, str(port), name, str(FLOOD_S))
            flooding = await asyncio.create_subprocess_exec(
                # With the least priority: it shares its core with the readers that are timed.
                *("nice", "-n", "19", "taskset", "-c", OTHER_CORE, *command),
                stdout=asyncio.subprocess.PIPE,
            )
            said, _ = await flooding.communicate()
            hung_up, sent = map(int, said.split())
            await asyncio.sleep(SETTLE_S)  # for the frames that are late
            waits = sorted(value for reader in readers for value in reader.latencies_s)
            self._note_waits(f"flood_{name}", waits or [FLOOD_S])
            self.note(f"flood_{name}_hung_up", hung_up)
            self.note(f"flood_{name}_mb", sent / 1e6)
            self.note(f"flood_{name}_cpu_s", cpu_s(pid) - before)
        for reader in readers:
            reader.close()

    async def _settled(self) -> None:
        """Wait until the edge has handled its requests, which takes a while on a busy machine."""
        pid = self.servers["edge"][0]
        await asyncio.sleep(5 * SETTLE_S)
        for _ in range(MOST_SETTLE_S):
            before = cpu_s(pid)
            await asyncio.sleep(1)
            if cpu_s(pid) - before < IDLE_CPU_S:
                break

    async def _neighbours(self, name: str) -> None:
        await self.paced("edge", SSE, PACED, CONNECTIONS[0], NEIGHBOUR_S, name)

    async def storm(self) -> None:
        """Resume a thousand streams at once and time the first frame of each."""
        pid, port = self.servers["edge"]
        before = cpu_s(pid)
        self._next += STORM
        made = await asyncio.gather(*(connect(port, SSE, SILENT, 1, n) for n in range(STORM)))
        readers = [reader for each in made for reader in each]
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.gather(*(reader.begun.wait() for reader in readers))
        waits = sorted(reader.first_s for reader in readers if reader.first_s is not None)
        self.note("storm_served", len(waits))
        self._note_waits("storm", waits)
        self.note("storm_cpu_ms", (cpu_s(pid) - before) / STORM * 1e3)
        for reader in readers:
            reader.close()


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    link, upstream, edge_port, nginx_port, nginx_h2_port, tls_port = (free_port() for _ in range(6))
    files = development_certificate(folder / "certificate", datetime.now(UTC))
    settings = folder / "nginx.conf"
    settings.write_text(
        NGINX.format(folder=folder, port=nginx_port, h2_port=nginx_h2_port, upstream=upstream)
    )
    # The origin speaks the schema of the tree that is measured.
    source = options.tree / "tests/bench/edge/source.py"
    watched, collections = options.tree / "tests/bench/edge/watched.py", folder / "collections"
    edge_command = (
        *(sys.executable, watched, collections, "edge", "--http", f"127.0.0.1:{edge_port}"),
        *("--https", f"127.0.0.1:{tls_port}", "--origin", f"127.0.0.1:{link}"),
        *("--certificate", files.certificate, "--key", files.key),
    )
    async with (
        process(
            sys.executable, source, link, upstream, core=OTHER_CORE, tree=options.tree
        ) as origin,
        process(*edge_command, core=SERVER_CORE, tree=options.tree) as edge,
        process("nginx", "-p", folder, "-c", settings, core=SERVER_CORE) as nginx,
        relaying_worker(folder, upstream) as worker,
    ):
        assert origin.stdout is not None
        await origin.stdout.readline()
        for port in (edge_port, nginx_port):
            await answering(port)
        await asyncio.sleep(SETTLE_S)
        peer = (worker_of(nginx.pid), nginx_port)
        bench = Bench((edge.pid, edge_port), peer, nginx_h2_port, tls_port, collections)
        if worker is not None:
            bench.servers["workerd"] = worker
        parts = PARTS if options.only is None else (options.only,)
        for _ in range(options.rounds if "frames" in parts else 0):
            await one_round(bench, options)
        for part in (bench.storm, bench.idle, bench.stalled, bench.floods):
            if part.__name__ in parts:
                await part()
    over_http3: dict[str, Any] = {}
    if "http3" in parts and shutil.which("caddy") is not None:
        found = await bench_http3.measure(files, folder, options.seconds, options.rounds)
        over_http3 = {name: value for name, value in found.items() if name.startswith("h3_")}
    over_links: dict[str, Any] = {}
    if "links" in parts:
        over_links = await bench_links.measure(folder)
    return {**report(bench.found), **over_http3, **over_links}


async def one_round(bench: Bench, options: argparse.Namespace) -> None:
    for count in CONNECTIONS:
        for name, kind in (("staggered", PACED), ("step", STEP)):
            for server, view in bench.rows:
                label = f"{server}_{view}_{count}_{name}"
                await bench.paced(server, view, kind, count, options.seconds, label)
    for server, view in bench.rows:
        label = f"{server}_{view}_{CONNECTIONS[-1]}_apart"
        await bench.paced(server, view, APART, CONNECTIONS[-1], options.seconds, label)
    for server, view in bench.rows:
        label = f"{server}_{view}_saturated"
        await bench.paced(server, view, FLOOD, CONNECTIONS[0], options.seconds, label)


def report(found: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in found.items()}

    def worst(begins: str) -> float | None:
        values = [medians[name] for name in medians if name.startswith(begins)]
        return round(max(values), 1) if values else None

    def neighbours(unit: str) -> float | None:
        """Return the worst ratio of latency beside stalled readers to latency alone."""
        pairs = [(f"beside_stalled_{view}_{unit}", f"beside_no_{view}_{unit}") for view in VIEWS]
        known = [pair for pair in pairs if {*pair} <= {*medians}]
        found = [medians[one] / medians[other] for one, other in known]
        return round(max(found), 2) if found else None

    def ratio(what: str, name: str, unit: str = "us", of: str = "sse") -> float | None:
        ours, theirs = f"edge_{what}_{name}_{unit}", f"nginx_{of}_{name}_{unit}"
        known = ours in medians and theirs in medians
        return round(medians[ours] / medians[theirs], 2) if known else None

    def over_workerd(name: str) -> float | None:
        """Return the number of frames that the edge relays in workerd's time for one."""
        ours, theirs = (medians.get(f"{server}_sse_{name}_us") for server in ("edge", "workerd"))
        return None if ours is None or theirs is None else round(theirs / ours, 2)

    most = CONNECTIONS[-1]
    flooded = {
        name: medians[f"flood_{name}_p99_ms"]
        for name in floods.NAMES
        if f"flood_{name}_p99_ms" in medians
    }
    worst_flood = max(flooded, key=lambda name: flooded[name], default=None)
    return {
        **{name: round(value, 2) for name, value in sorted(medians.items())},
        "ws_cpu_vs_nginx": ratio("ws", f"{most}_staggered"),
        "ws_step_cpu_vs_nginx": ratio("ws", f"{most}_step"),
        "h1_cpu_vs_nginx": ratio("sse", f"{most}_staggered"),
        "h1_step_cpu_vs_nginx": ratio("sse", f"{most}_step"),
        "h2_cpu_vs_nginx": ratio("h2", f"{most}_staggered", of="h2"),
        "h2_step_cpu_vs_nginx": ratio("h2", f"{most}_step", of="h2"),
        "ws_apart_cpu_vs_nginx": ratio("ws", f"{most}_apart"),
        "h1_apart_cpu_vs_nginx": ratio("sse", f"{most}_apart"),
        "h2_apart_cpu_vs_nginx": ratio("h2", f"{most}_apart", of="h2"),
        "p50_vs_nginx": ratio("sse", f"{most}_apart", "p50_ms"),
        "p99_vs_nginx": ratio("sse", f"{most}_apart", "p99_ms"),
        "p50_staggered_vs_nginx": ratio("sse", f"{most}_staggered", "p50_ms"),
        "p99_staggered_vs_nginx": ratio("sse", f"{most}_staggered", "p99_ms"),
        "h3_cpu_vs_caddy": None,  # without Caddy
        "h3_replay_vs_caddy": None,
        "frames_vs_workerd_js": over_workerd("saturated"),
        "frames_step_vs_workerd_js": over_workerd(f"{most}_step"),
        "frames_apart_vs_workerd_js": over_workerd(f"{most}_staggered"),
        "p99_beside_stalled": neighbours("p99_ms"),
        "idle_ws_kib": worst("idle_ws_"),
        "idle_wss_kib": worst("idle_wss_"),
        "gc_pause_ms": worst("gc_pause_"),
        "gc_whole_ms": worst("gc_whole_"),
        "stalled_reader_kib": worst("stalled_"),
        "tls_stalled_reader_kib": worst("tls_stalled_"),
        "storm_p99_ms": worst("storm_p99_ms"),
        "flood_p99_ms": None if worst_flood is None else round(flooded[worst_flood], 1),
        "flood_worst": worst_flood,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose edge is measured")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    options = parser.parse_args()
    if shutil.which("nginx") is None:
        sys.exit("needs nginx: apt install nginx-light")
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    with tempfile.TemporaryDirectory() as folder:
        print_line(uvloop.run(measure(Path(folder), options)))


if __name__ == "__main__":
    main()
