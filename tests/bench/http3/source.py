"""Where the frames come from: an origin for the edge, and the same events over HTTP/1.1 for a peer.

    python tests/bench/http3/source.py LINK_PORT HTTP_PORT

A stream's id says what it is: `PACED` is a frame every 50 ms, each stream at a time of its own;
`BURST` is `BURST_FRAMES` at once and the end. To the peer those go as a streaming server writes
them, one by one; as `BLOCK` they are one write to it too.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import cast

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from edge.sse import event
from ledger.frame import (
    SCHEMA_HASH,
    Detach,
    FinishReason,
    Heartbeat,
    Hello,
    Opened,
    Resume,
    Splitter,
    StreamEnd,
    Token,
    decode,
    encode,
)

EVERY_S = 0.05
PACED, BURST, BLOCK = 0, 1, 2
BURST_FRAMES = 500
FRAMES = 1 << 14
TEXT = " token"
HEARTBEAT_S = 2.0
END = StreamEnd(BURST_FRAMES, FinishReason.LENGTH, BURST_FRAMES, 0)

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Pacer:
    """Calls each of its own every 50 ms, apart from the others."""

    def __init__(self) -> None:
        self._count = 0

    def begin(self, source: Paced) -> None:
        loop = asyncio.get_running_loop()
        self._count += 1
        phase = (self._count * 0.618 % 1.0) * EVERY_S
        loop.call_later(phase, self._step, source, loop.time() + phase)

    def _step(self, source: Paced, at: float) -> None:
        if source.step():
            loop = asyncio.get_running_loop()
            loop.call_at(at + EVERY_S, self._step, source, at + EVERY_S)


class Paced:
    """One stream to one peer."""

    def __init__(self, transport: asyncio.Transport, corr: int | None) -> None:
        self._transport = transport
        self._corr = corr
        self._index = 0
        self.over = False

    def step(self) -> bool:
        if self.over or self._transport.is_closing():
            return False
        frame = Token(TEXT, self._index)
        self._index += 1
        if self._corr is None:
            self._transport.write(chunk(event(frame)))
        else:
            self._transport.write(encode(frame, self._corr))
        return True


class LinkEnd(asyncio.Protocol):
    """An origin, as far as an edge needs one."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._splitter = Splitter()
        self._streams: dict[int, Paced] = {}

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
            if isinstance(frame, Detach) and corr in self._streams:
                self._streams.pop(corr).over = True
            if not isinstance(frame, Resume):
                continue
            self._transport.write(encode(Opened(frame.stream, FRAMES, "", "demo", 0), corr))
            if frame.stream[0] == PACED:
                self._streams[corr] = Paced(self._transport, corr)
                self._pacer.begin(self._streams[corr])
            else:
                self._burst(corr)

    def _burst(self, corr: int) -> None:
        # More than a window is a burst for the edge too: its credit is a replay's business.
        frames = [encode(Token(TEXT, n), corr) for n in range(BURST_FRAMES)]
        self._transport.write(b"".join((*frames, encode(END, corr))))


class HttpEnd(asyncio.Protocol):
    """The peer's upstream."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._head = b""
        self._paced: Paced | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" not in self._head:
            return
        path = self._head.split(b" ", 2)[1]
        self._head = b""
        stream = bytes.fromhex(path.rpartition(b"/")[2].decode())
        self._transport.write(HEAD)
        if stream[0] == PACED:
            self._paced = Paced(self._transport, None)
            self._pacer.begin(self._paced)
        else:
            chunks = [chunk(event(Token(TEXT, n))) for n in range(BURST_FRAMES)]
            chunks.append(chunk(event(END)) + b"0\r\n\r\n")
            for each in chunks if stream[0] == BURST else (b"".join(chunks),):
                self._transport.write(each)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._paced is not None:
            self._paced.over = True


async def main(link_port: int, http_port: int) -> None:
    loop = asyncio.get_running_loop()
    pacer = Pacer()
    await loop.create_server(lambda: LinkEnd(pacer), "127.0.0.1", link_port)
    await loop.create_server(lambda: HttpEnd(pacer), "127.0.0.1", http_port)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:])))
