"""Measure what 8,000 quick WebSockets, 20,000 odd requests and 200 slow heads leave in an edge.

    python tests/bench/soak_edge.py [--websockets 8000] [--requests 20000] [--slow 200]

The WebSockets open a stream and leave with a close, a FIN or a reset. The requests are of all
kinds, most of them wrong, and some clients leave in the middle. The slow clients send one byte of a
head a second for as long as they are allowed to. The edge is a process of its own; its origin runs
in this process.

The last line is JSON: memory before and after in MiB, the number of slow connections open after
their time, and lines of the log with a traceback. The exit status is 1 if any of these is out of
bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.edge.config import EdgeConfig  # noqa: E402
from tailrace.ledger.frame import SCHEMA_HASH, Hello, Open, encode  # noqa: E402
from tests.bench.edge.readers import message  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.bench.measured import resident_kib  # noqa: E402
from tests.e2e.processes import Edge, Origin  # noqa: E402
from tests.edge.scripted_origin import STREAM, ScriptedOrigin  # noqa: E402

AT_ONCE = 32
WARM = 500  # of each kind, before memory is measured first
MOST_GROWN = 1.2
ANSWER_S = 30.0
"""For an answer, or for the edge to hang up."""
CLIENT_S = 0.5
"""Timeout of a client that waits for the answer to an odd request, in seconds."""
SETTLE_S = 1.0
"""Time for ended connections to be cleared away before memory is measured, in seconds."""
SLACK_S = 15.0
"""Tolerance for a late disconnection of a slow head on a busy machine, in seconds."""
HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
GONE = OSError, EOFError, TimeoutError


class Clients:
    """The clients of one edge; `seen` counts their outcomes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._random = Random(8)
        self.seen: Counter[str] = Counter()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def many(self, one: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
        left = iter(range(count))

        async def some() -> None:
            for _ in left:
                try:
                    async with asyncio.timeout(ANSWER_S):
                        await one()
                except GONE as error:
                    self.seen[type(error).__name__] += 1

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    async def websocket(self) -> None:
        """Open a session and a stream, read some of it, and leave in one of three ways."""
        reader, writer = await self._connected()
        wanted = Open("demo", prompt="Once", credit=self._random.randrange(100))
        asked = encode(Hello(SCHEMA_HASH, "soak")) + encode(wanted, 1)
        writer.write(HANDSHAKE + message(asked))
        head = await reader.readuntil(b"\r\n\r\n")
        self.seen["websocket " + head[9:12].decode()] += 1
        await reader.read(4096)
        how = self._random.randrange(3)
        if how == 0:
            writer.write(b"\x88\x80" + bytes(4))
        elif how == 1:
            writer.write_eof()
        if how == 2:
            writer.transport.abort()
        else:
            while await reader.read(4096):
                pass
            writer.close()

    async def request(self) -> None:
        """Something that is no proper request, or a proper one for a thing that is not there."""
        data, leaves = self._odd()
        reader, writer = await self._connected()
        writer.write(data)
        if leaves:
            writer.transport.abort()
            self.seen["left"] += 1
            return
        try:
            async with asyncio.timeout(CLIENT_S):
                answer = await reader.read(65_536)
            is_http = answer.startswith(b"HTTP/1.1 ")
            self.seen["answered " + (answer[9:12].decode() if is_http else "otherwise")] += 1
        finally:
            writer.close()

    def _odd(self) -> tuple[bytes, bool]:
        """Return its bytes, and whether the client leaves without waiting for an answer."""
        draw = self._random
        method = draw.choice((b"GET", b"POST", b"PUT", b"HEAD", b"DELETE", b"OPTIONS", b"G\xffT"))
        stream = STREAM.hex().encode()
        path = draw.choice(
            (
                *(b"/", b"*", b"//", b"/%00", b"/v1/generate", b"/v1/generate/zz", b"/v1/ws"),
                *(b"/v1/generate/" + stream, b"/v1/stream/a%2Fb", b"/\xc3\xa9", b"/" + b"x" * 9000),
                *(b"/v1/generate/" + stream + b"?after=x", b"/v1/responses", b"/healthz"),
            )
        )
        body = draw.choice((b"", b"{", b'{"model": "demo"}', b"\0" * 5000, draw.randbytes(300)))
        fields = draw.sample(
            (
                *(b"Host: localhost", b"Host:", b"Transfer-Encoding: chunked", b"Upgrade: h2c"),
                *(
                    b"Content-Length: %d" % len(body),
                    b"Content-Length: -1",
                    b"Expect: 100-continue",
                ),
                *(b"Origin: https://x.example", b"Accept: text/event-stream", b" folded: x"),
                *(b"Last-Event-ID: ", b"X: " + b"y" * 20_000, b"Tailrace-Token: no"),
            ),
            draw.randrange(6),
        )
        whole = b"%b %b HTTP/1.1\r\n%b\r\n\r\n%b" % (method, path, b"\r\n".join(fields), body)
        kind = draw.randrange(10)
        if kind == 0:
            return draw.randbytes(draw.randrange(1, 3000)), False
        if kind == 1:
            return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(200), False
        if kind == 2:
            return whole[: draw.randrange(1, len(whole))], draw.random() < 0.5
        return whole * draw.randrange(1, 3), kind == 3

    async def slow_head(self) -> float:
        """Return how long the edge let it go on, in seconds."""
        loop = asyncio.get_running_loop()
        reader, writer = await self._connected()
        began = loop.time()
        writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        with suppress(*GONE):
            while not reader.at_eof():
                writer.write(b"a")
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await reader.read(4096)
        writer.close()
        return loop.time() - began


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    origin = ScriptedOrigin(100)
    origin.patience_ms = 3_600_000
    async with origin.listening():
        edge = Edge(cast(Origin, SimpleNamespace(link=f"127.0.0.1:{origin.port}")))
        await edge.ready()
        try:
            clients = Clients(edge.port)
            await clients.many(clients.websocket, WARM)
            await clients.many(clients.request, WARM)
            await asyncio.sleep(SETTLE_S)
            before, clients.seen = resident_kib(edge.pid), Counter()
            slow = [asyncio.create_task(clients.slow_head()) for _ in range(options.slow)]
            await clients.many(clients.websocket, options.websockets)
            await clients.many(clients.request, options.requests)
            most_s = EdgeConfig().header_timeout_s + SLACK_S
            done, still_open = await asyncio.wait(slow, timeout=most_s) if slow else (set(), set())
            await asyncio.sleep(2 * SETTLE_S)
            after = resident_kib(edge.pid)
            lines = [json.dumps(event) for event in edge.events]
        finally:
            await edge.stop()
    lasted = sorted(task.result() for task in done)
    return {
        **dict(sorted(clients.seen.items())),
        "before_mib": round(before / 1024, 1),
        "after_mib": round(after / 1024, 1),
        "slow_open": sum(value > most_s for value in lasted) + len(still_open),
        "slow_longest_s": round(lasted[-1], 1) if lasted else None,
        "tracebacks": sum("Traceback" in line or "exc_info" in line for line in lines),
        "log_lines": len(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--websockets", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--slow", type=int, default=200)
    found = uvloop.run(soak(parser.parse_args()))
    print_line(found)
    grown = found["after_mib"] > MOST_GROWN * found["before_mib"]
    sys.exit(1 if grown or found["slow_open"] or found["tracebacks"] else 0)


if __name__ == "__main__":
    main()
