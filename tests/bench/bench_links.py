"""Measure how long readers of one link wait when it is cut and when its origin is killed.

    python tests/bench/bench_links.py [--readers 50000] [--streams 1]

There are one origin and one edge, with 250 readers on each WebSocket. The streams run, and every
reader gives credit for one frame more as soon as the link is cut: `renew_50000_s` is the time from
the cut until the last reader has that frame. Then the origin is killed and started again;
`renew_50000_killed_s` counts from the kill, and `origin_start_s` is the part of it until the new
origin listens. `links_lost` counts the links that the edge gave up besides these two, in the
`HELD_S` seconds after each as well: 0 if all is well. `neighbour_max_s` is the longest that an HTTP
request for a stream took during and after the cut. `renew_origin_cpu_us` and `renew_edge_cpu_us`
are processor time per reader. The readers' process shares a core with the origin, the edge has its
own. With `--streams 1`, the default, all read one stream, which is the hardest case. It ends with
one line of JSON; sizes are in MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any, cast

import httpx
import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.frame import (  # noqa: E402
    LOGGED,
    SCHEMA_HASH,
    Credit,
    Hello,
    Open,
    Opened,
    Resume,
    StreamError,
    decode,
    encode,
    index_of,
    split,
    tag_and_corr_of,
)
from tests.bench.edge.readers import WS_HANDSHAKE, message  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.bench.measured import cpu_s, resident_kib  # noqa: E402
from tests.e2e.fault_proxy import FaultProxy  # noqa: E402
from tests.e2e.processes import Edge, Origin, running  # noqa: E402

READERS = 50_000
PER_SOCKET = 250
STREAMS = 1
"""At most 64, which a worker runs at a time."""
FIRST_FRAMES = 2
HELD_S = 20.0
MOST_S = 300.0
"""Timeout of each step."""
PROBE_EVERY_S, LOOK_S = 0.2, 0.02
EDGE_CORE, OTHER_CORE = "0", "1"
PRODUCER = "tests.bench.edge.waiting:waiting"
END_OF_HEAD = b"\r\n\r\n"
BINARY, PING, PONG = 0x82, 0x89, 0x8A


class Socket(asyncio.Protocol):
    """A WebSocket with many readers; `frames` counts the frames of each, by channel."""

    def __init__(self, opens: list[Open], reads: list[bytes]) -> None:
        self.frames: dict[int, int] = dict.fromkeys(range(1, len(reads) + 1), 0)
        self.opened: list[bytes] = []
        self.errors: list[str] = []
        self.is_lost = False
        self.is_in_order = True
        self._asked = [encode(request, n + 1) for n, request in enumerate(opens)]
        self._asked += [
            encode(Resume(stream, credit=FIRST_FRAMES), n + 1) for n, stream in enumerate(reads)
        ]
        self._buffer = bytearray()
        self._has_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        asked = encode(Hello(SCHEMA_HASH, "bench")) + b"".join(self._asked)
        self._transport.write(WS_HANDSHAKE + message(asked))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def grant(self, limit: int) -> None:
        credits = b"".join(encode(Credit(limit), corr) for corr in self.frames)
        self._transport.write(message(credits))

    def has(self, frames: int) -> bool:
        return all(count >= frames for count in self.frames.values())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._has_head:
            head, found, rest = bytes(self._buffer).partition(END_OF_HEAD)
            if not found:
                return
            assert head.startswith(b"HTTP/1.1 101"), head
            self._buffer, self._has_head = bytearray(rest), True
        while (whole := self._next_message()) is not None:
            kind, payload = whole
            if kind == PING:
                self._transport.write(bytes((PONG, 0x80 | len(payload))) + bytes(4) + payload)
            elif kind == BINARY:
                for raw in split(payload):
                    self._take(raw)

    def _next_message(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        size, at = buffer[1], 2
        if size >= 126:
            at += 2 if size == 126 else 8
            size = int.from_bytes(buffer[2:at])
        if len(buffer) < at + size:
            return None
        kind, payload = buffer[0], bytes(buffer[at : at + size])
        del buffer[: at + size]
        return kind, payload

    def _take(self, raw: bytes) -> None:
        tag, corr = tag_and_corr_of(raw)
        if tag in LOGGED:
            # A frame that came twice, or a gap, would be a fault of the edge's.
            self.is_in_order &= index_of(raw) == self.frames[corr]
            self.frames[corr] += 1
        elif tag == StreamError.tag:
            _, error = decode(raw)
            assert isinstance(error, StreamError)
            self.errors.append(error.code)
        elif tag == Opened.tag and not self.frames:
            _, opened = decode(raw)
            assert isinstance(opened, Opened)
            self.opened.append(opened.stream)


class Bench:
    """The readers of one edge."""

    def __init__(self, edge: Edge, streams: int) -> None:
        self.edge = edge
        self._streams = streams
        self.sockets: list[Socket] = []
        self.waits_s: list[float] = []

    async def connect(self, opens: list[Open], reads: list[bytes]) -> Socket:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: Socket(opens, reads), "127.0.0.1", self.edge.port
        )
        return made

    async def until(self, what: str, sockets: list[Socket], frames: int) -> None:
        """Wait until every reader has `frames` frames."""
        waiting = list(sockets)
        try:
            async with asyncio.timeout(MOST_S):
                while waiting:
                    waiting = [each for each in waiting if not each.has(frames)]
                    bad = [code for each in sockets for code in each.errors]
                    assert not bad, f"{what}: {len(bad)} readers were refused, first {bad[0]}"
                    assert not any(each.is_lost for each in sockets), f"{what}: closed"
                    assert all(each.is_in_order for each in sockets), f"{what}: a wrong frame"
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            late = sum(c < frames for each in waiting for c in each.frames.values())
            raise TimeoutError(f"{what}: {late} readers wait after {MOST_S:g} s") from error

    async def streams(self) -> list[bytes]:
        """Open the streams that all read; their own connection reads nothing of them."""
        opener = await self.connect(
            [Open("waiting", prompt=str(n)) for n in range(self._streams)], []
        )
        async with asyncio.timeout(MOST_S):
            while len(opener.opened) < self._streams:
                assert not opener.errors, opener.errors
                await asyncio.sleep(LOOK_S)
        return opener.opened

    async def read(self, streams: list[bytes], readers: int) -> None:
        for first in range(0, readers, PER_SOCKET):
            reads = [streams[(first + n) % len(streams)] for n in range(PER_SOCKET)]
            self.sockets.append(await self.connect([], reads))
            await self.until("open", self.sockets[-1:], FIRST_FRAMES)

    def grant(self, limit: int) -> None:
        for socket in self.sockets:
            socket.grant(limit)

    async def probe(self, stream: bytes) -> None:
        """Ask for the end of a stream again and again, until cancelled."""
        url = f"{self.edge.url}/v1/generate/{stream.hex()}?after=4"
        async with httpx.AsyncClient(timeout=MOST_S) as client:
            while True:
                began = monotonic()
                answer = await client.get(url)
                self.waits_s.append(monotonic() - began)
                assert answer.status_code == 200, answer.text
                await asyncio.sleep(PROBE_EVERY_S)


async def measure(
    folder: Path,
    readers: int = READERS,
    streams: int = STREAMS,
    held_s: float = HELD_S,
    *,
    pinned: bool = True,
) -> dict[str, Any]:
    """Raise where a reader gets an error or a wrong frame; `pinned` processes have a core each."""
    origin = Origin(folder / "data", producer=PRODUCER)
    again = Origin(folder / "data", origin.port, producer=PRODUCER)
    proxy = FaultProxy(origin.port)
    async with proxy.serving():
        edge = Edge(origin, links=proxy.link)
        if pinned:
            for each, core in ((origin, OTHER_CORE), (again, OTHER_CORE), (edge, EDGE_CORE)):
                each.command = ["taskset", "-c", core, *each.command]
        async with running(origin, edge, late=[again]):
            return await _measured(Bench(edge, streams), proxy, origin, again, readers, held_s)


async def _measured(
    bench: Bench,
    proxy: FaultProxy,
    origin: Origin,
    again: Origin,
    readers: int,
    held_s: float,
) -> dict[str, Any]:
    edge = bench.edge
    streams = await bench.streams()
    began = monotonic()
    await bench.read(streams, readers)
    found: dict[str, Any] = {"readers": readers, f"open_{readers}_s": monotonic() - began}

    probing = asyncio.create_task(bench.probe(streams[0]))
    before = cpu_s(origin.pid), cpu_s(edge.pid)
    began = monotonic()
    proxy.cut()
    bench.grant(FIRST_FRAMES + 1)
    await bench.until("cut", bench.sockets, FIRST_FRAMES + 1)
    found[f"renew_{readers}_s"] = monotonic() - began
    found["renew_origin_cpu_us"] = (cpu_s(origin.pid) - before[0]) / readers * 1e6
    found["renew_edge_cpu_us"] = (cpu_s(edge.pid) - before[1]) / readers * 1e6
    await asyncio.sleep(held_s)
    probing.cancel()
    found["neighbour_max_s"] = max(bench.waits_s)

    began = monotonic()
    await origin.kill()
    bench.grant(FIRST_FRAMES + 2)
    await again.start()
    await again.saw("origin.listening")
    found["origin_start_s"] = monotonic() - began
    await bench.until("killed", bench.sockets, FIRST_FRAMES + 2)
    found[f"renew_{readers}_killed_s"] = monotonic() - began
    await asyncio.sleep(held_s)
    found["links_lost"] = edge.count("origin link down") - 2
    found["edge_mib"] = resident_kib(edge.pid) / 1024
    found["origin_mib"] = resident_kib(again.pid) / 1024
    return {name: round(value, 2) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument("--streams", type=int, default=STREAMS)
    options = parser.parse_args()
    os.sched_setaffinity(0, {int(OTHER_CORE)})
    with tempfile.TemporaryDirectory() as folder:
        print_line(uvloop.run(measure(Path(folder), options.readers, options.streams)))


if __name__ == "__main__":
    main()
