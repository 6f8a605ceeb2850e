"""Where the frames come from: an origin for the Python edge, and the same frames over HTTP/1.1.

    python tests/bench/worker/source.py LINK_PORT HTTP_PORT

Over HTTP it answers as the edge does that the Worker is in front of, without one: a third process
on the way would be what is measured. A stream's id says by its first byte what it is: `FLOOD` has
as many frames as its reader takes, `THOUSAND` has one every millisecond, `SLOW` one a second.
A frame has 256 bytes, and its text begins with the time at which it was written.
"""

from __future__ import annotations

import asyncio
import sys
from base64 import b64encode
from pathlib import Path
from time import monotonic
from typing import cast

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ledger.frame import (
    FRAMES_TYPE,
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
from tests.bench.http3.source import HEARTBEAT_S, chunk

FLOOD, THOUSAND, SLOW = range(3)
EVERY_S = {THOUSAND: 0.001, SLOW: 1.0}
FRAME_BYTES = 256
FLOOD_FRAMES = 64  # of one write
PADDING = "." * (FRAME_BYTES - 9 - 2 - 7 - 2)  # header, length, mark and stamp, index
_TOKEN = encode(Token(f"~000000{PADDING}", 128))[:11]
"""What a frame of this size begins with: only stamp and index differ."""

_HEAD = (
    "HTTP/1.1 200 OK\r\nContent-Type: {type}\r\nTailrace-Stream: {id}\r\n"
    "Tailrace-Opened: {opened}\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def stamp() -> bytes:
    """Tens of microseconds, modulo ten seconds: six digits."""
    return b"~%06d" % (int(monotonic() * 1e5) % 1_000_000)


def frame(index: int, corr: int) -> bytes:
    if index < 128 or index >= 1 << 14:
        return encode(Token(f"{stamp().decode()}{PADDING}", index), corr)
    head = _TOKEN[:5] + corr.to_bytes(4, "little") + _TOKEN[9:]
    return b"%b%b%b%c%c" % (head, stamp(), PADDING.encode(), index & 127 | 128, index >> 7)


class Stream:
    """One stream to one peer, under a corr of a link or in chunks."""

    def __init__(
        self, transport: asyncio.Transport, kind: int, first: int, corr: int | None
    ) -> None:
        self._transport = transport
        self._kind = kind
        self._corr = corr
        self._next = first
        self._passed_bytes = 0
        self.over = False

    def begin(self) -> None:
        if self._kind in EVERY_S:
            loop = asyncio.get_running_loop()
            self._step(loop.time())

    def _step(self, at: float) -> None:
        if self.over or self._transport.is_closing():
            return
        self._write([self._frame()])
        every_s = EVERY_S[self._kind]
        asyncio.get_running_loop().call_at(at + every_s, self._step, at + every_s)

    def flood(self, limit: int, limit_bytes: int | None) -> None:
        """As many as there is credit for."""
        frames: list[bytes] = []
        while self._next < limit and (limit_bytes is None or self._passed_bytes < limit_bytes):
            frames.append(self._frame())
            self._passed_bytes += len(frames[-1])
        if frames and not self.over:
            self._write(frames)

    def write_some(self) -> None:
        self._write([self._frame() for _ in range(FLOOD_FRAMES)])

    def _frame(self) -> bytes:
        raw = frame(self._next, self._corr or 0)
        self._next += 1
        return raw

    def _write(self, frames: list[bytes]) -> None:
        data = b"".join(frames)
        self._transport.write(data if self._corr is not None else chunk(data))


class LinkEnd(asyncio.Protocol):
    """An origin, as far as an edge needs one."""

    def __init__(self) -> None:
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
            corr, asked = decode(raw)
            if isinstance(asked, Resume):
                self._transport.write(encode(Opened(asked.stream, 1 << 40, "", "demo", 0), corr))
                kind = asked.stream[0]
                stream = Stream(self._transport, kind, asked.start, corr)
                self._streams[corr] = kind, stream
                stream.begin()
                if kind == FLOOD:
                    stream.flood(asked.start + asked.credit, asked.credit_bytes)
            elif isinstance(asked, Credit) and corr in self._streams:
                kind, stream = self._streams[corr]
                if kind == FLOOD:
                    stream.flood(asked.limit, asked.bytes)
            elif isinstance(asked, Detach) and corr in self._streams:
                self._streams.pop(corr)[1].over = True

    def connection_lost(self, exc: Exception | None) -> None:
        for _, stream in self._streams.values():
            stream.over = True


class HttpEnd(asyncio.Protocol):
    """The edge that the Worker reads of."""

    def __init__(self) -> None:
        self._head = b""
        self._stream: Stream | None = None
        self._floods = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" not in self._head:
            return
        target = self._head.split(b" ", 2)[1].decode()
        self._head = b""
        path, _, query = target.partition("?")
        stream_id = path.rpartition("/")[2]
        after = query.partition("after=")[2]
        kind = bytes.fromhex(stream_id)[0]
        opened = Opened(bytes.fromhex(stream_id), 0, "", "demo", 0)
        said = b64encode(encode(opened)).decode()
        head = _HEAD.format(type=FRAMES_TYPE, id=stream_id, opened=said)
        self._transport.write(head.encode())
        self._stream = Stream(self._transport, kind, int(after) + 1 if after else 0, None)
        self._stream.begin()
        self._floods = kind == FLOOD
        self._flood()

    def _flood(self) -> None:
        stream = self._stream
        if not self._floods or stream is None or self._transport.is_closing():
            return
        stream.write_some()
        asyncio.get_running_loop().call_soon(self._flood)

    def pause_writing(self) -> None:
        self._floods = False

    def resume_writing(self) -> None:
        self._floods = self._stream is not None
        self._flood()

    def connection_lost(self, exc: Exception | None) -> None:
        self._floods = False
        if self._stream is not None:
            self._stream.over = True


async def main(link_port: int, http_port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(LinkEnd, "127.0.0.1", link_port, backlog=2048)
    await loop.create_server(HttpEnd, "127.0.0.1", http_port, backlog=2048)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:])))
