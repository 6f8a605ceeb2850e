"""Where the frames come from: an origin for the edge, and the same events over HTTP/1.1 for a peer.

    python tests/bench/edge/source.py LINK_PORT HTTP_PORT

A stream's id says by its first byte what it is: `PACED` has a frame every 50 ms, each stream at a
time of its own; `STEP` has it when all others of its kind have theirs, as of an engine's step;
`FLOOD` has as many as its reader has credit for; `SILENT` has one, and then none. A frame has 18
bytes, and its text is the time at which it was written.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from time import monotonic
from typing import cast

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from edge.sse import event
from ledger.frame import (
    SCHEMA_HASH,
    Credit,
    Detach,
    Heartbeat,
    Hello,
    Opened,
    Resume,
    Splitter,
    Token,
    decode,
    encode,
)
from tests.bench.http3.source import EVERY_S, HEAD, HEARTBEAT_S, Pacer, chunk

PACED, STEP, FLOOD, SILENT = range(4)
LAST_INDEX = 1 << 14
FLOOD_EVENTS = 64  # to a peer's upstream at a time


def stamp() -> str:
    """Tens of microseconds, modulo ten seconds: six digits."""
    return f"{int(monotonic() * 1e5) % 1_000_000:06}"


class Stream:
    """One stream to one peer; a `Paced` of the pacer's."""

    def __init__(self, transport: asyncio.Transport, corr: int | None) -> None:
        self._transport = transport
        self._corr = corr
        self._index = 0
        self._passed_bytes = 0
        self.over = False

    def frame(self) -> bytes:
        # Two bytes of index, as most frames of a long stream have.
        token = Token(stamp(), 128 + self._index % (LAST_INDEX - 128))
        self._index += 1
        return chunk(event(token)) if self._corr is None else encode(token, self._corr)

    def step(self) -> bool:
        if self.over or self._transport.is_closing():
            return False
        self._transport.write(self.frame())
        return True

    def flood(self, limit: int, limit_bytes: int | None) -> None:
        """As many as there is credit for."""
        frames: list[bytes] = []
        while self._index < limit and (limit_bytes is None or self._passed_bytes < limit_bytes):
            frames.append(self.frame())
            self._passed_bytes += len(frames[-1])
        if frames and not self.over:
            self._transport.write(b"".join(frames))


class Steps:
    """All streams of that kind, every 50 ms: those of one connection in one write."""

    def __init__(self) -> None:
        self._streams: dict[Stream, asyncio.Transport] = {}

    def add(self, stream: Stream, transport: asyncio.Transport) -> None:
        self._streams[stream] = transport
        if len(self._streams) == 1:
            self._step(asyncio.get_running_loop().time() + EVERY_S)

    def _step(self, at: float) -> None:
        writes: dict[asyncio.Transport, list[bytes]] = {}
        for stream, transport in list(self._streams.items()):
            if stream.over or transport.is_closing():
                del self._streams[stream]
            else:
                writes.setdefault(transport, []).append(stream.frame())
        for transport, frames in writes.items():
            transport.write(b"".join(frames))
        if self._streams:
            asyncio.get_running_loop().call_at(at, self._step, at + EVERY_S)


class Source:
    """What both ends have together."""

    def __init__(self) -> None:
        self.pacer = Pacer()
        self.steps = Steps()

    def begin(self, kind: int, stream: Stream, transport: asyncio.Transport) -> None:
        if kind == PACED:
            self.pacer.begin(stream)  # type: ignore[arg-type]  # it has what is called
        elif kind == STEP:
            self.steps.add(stream, transport)
        elif kind == SILENT:
            stream.step()


class LinkEnd(asyncio.Protocol):
    """An origin, as far as an edge needs one."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._splitter = Splitter()
        self._streams: dict[int, tuple[int, Stream]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(encode(Hello(SCHEMA_HASH, "bench")))
        self._beat()

    def _beat(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode(Heartbeat(1, True, (), ("demo",), ("none",), 30_000)))
            asyncio.get_running_loop().call_later(HEARTBEAT_S, self._beat)

    def data_received(self, data: bytes) -> None:
        for raw in self._splitter.feed(data):
            corr, frame = decode(raw)
            if isinstance(frame, Resume):
                self._transport.write(encode(Opened(frame.stream, 1, "", "demo", 0), corr))
                kind, stream = frame.stream[0], Stream(self._transport, corr)
                self._streams[corr] = kind, stream
                self._source.begin(kind, stream, self._transport)
                if kind == FLOOD:
                    stream.flood(frame.credit, frame.credit_bytes)
            elif isinstance(frame, Credit) and corr in self._streams:
                kind, stream = self._streams[corr]
                if kind == FLOOD:
                    stream.flood(frame.limit, frame.bytes)
            elif isinstance(frame, Detach) and corr in self._streams:
                self._streams.pop(corr)[1].over = True


class HttpEnd(asyncio.Protocol):
    """The peer's upstream."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._head = b""
        self._stream: Stream | None = None
        self._floods = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" not in self._head:
            return
        path = self._head.split(b" ", 2)[1]
        self._head = b""
        kind = bytes.fromhex(path.rpartition(b"/")[2].decode())[0]
        self._transport.write(HEAD)
        self._stream = Stream(self._transport, None)
        self._source.begin(kind, self._stream, self._transport)
        if kind == FLOOD:
            self._floods = True
            self._flood()

    def _flood(self) -> None:
        stream = self._stream
        if not self._floods or stream is None or self._transport.is_closing():
            return
        self._transport.write(b"".join([stream.frame() for _ in range(FLOOD_EVENTS)]))
        asyncio.get_running_loop().call_soon(self._flood)

    def pause_writing(self) -> None:
        self._floods = False

    def resume_writing(self) -> None:
        self._floods = True
        self._flood()

    def connection_lost(self, exc: Exception | None) -> None:
        self._floods = False
        if self._stream is not None:
            self._stream.over = True


async def main(link_port: int, http_port: int) -> None:
    loop = asyncio.get_running_loop()
    source = Source()
    await loop.create_server(lambda: LinkEnd(source), "127.0.0.1", link_port, backlog=2048)
    await loop.create_server(lambda: HttpEnd(source), "127.0.0.1", http_port, backlog=2048)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:])))
