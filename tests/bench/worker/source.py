"""The source of frames: an origin for the Python edge, and the same frames over HTTP/1.1.

    python tests/bench/worker/source.py LINK_PORT HTTP_PORT

Over HTTP it answers as the edge does that the Worker is in front of, without one: a third process
on the way would be what is measured. A stream's id says by its first byte what it is: `FLOOD` has
as many frames as its reader takes, `THOUSAND` has one every millisecond, `SLOW` one a second.
A frame has 256 bytes, and its text begins with the time at which it was written. Frames of a write
are made together, for a source that costs what the edge costs is what would be measured.
"""

from __future__ import annotations

import asyncio
import sys
from base64 import b64encode
from functools import cache
from pathlib import Path
from time import monotonic

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tailrace.ledger.frame import FRAMES_TYPE, Opened, Resume, Token, encode
from tests.bench.ends import chunk, serve

FLOOD, THOUSAND, SLOW = range(3)
EVERY_S = {THOUSAND: 0.001, SLOW: 1.0}
FRAME_BYTES = 256
FLOOD_FRAMES = 64  # frames in one write
LAST_INDEX = 1 << 40
CORR_AT = 5

_HEAD = (
    "HTTP/1.1 200 OK\r\nContent-Type: {type}\r\nTailrace-Stream: {id}\r\n"
    "Tailrace-Opened: {opened}\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def stamp() -> bytes:
    """Tens of microseconds, modulo ten seconds: six digits."""
    return b"%06d" % (int(monotonic() * 1e5) % 1_000_000)


@cache
def template(width: int) -> bytes:
    """Return a frame whose index takes `width` bytes."""
    padding = "." * (FRAME_BYTES - 9 - 2 - 8 - width)  # header, length, mark, stamp and dot, index
    return encode(Token(f"~000000.{padding}", 1 << 7 * (width - 1) if width > 1 else 0))


def width_of(index: int) -> int:
    return max(1, -(-index.bit_length() // 7))


def frames(first: int, count: int, corr: int) -> bytes:
    """Return `count` frames from index `first` on, as `encode` makes them, stamped with now."""
    width = width_of(first)
    whole = min(count, (1 << 7 * width) - first)
    one = template(width)
    made = bytearray(one * whole)
    said = [(CORR_AT, corr.to_bytes(4, "little")), (one.index(b"~") + 1, stamp())]
    for start, field in said:
        for at, byte in enumerate(field, start):
            made[at::FRAME_BYTES] = bytes((byte,)) * whole
    for nth in range(width):
        shift, more = 7 * nth, 128 if nth < width - 1 else 0
        column = bytes([index >> shift & 127 | more for index in range(first, first + whole)])
        made[FRAME_BYTES - width + nth :: FRAME_BYTES] = column
    rest = frames(first + whole, count - whole, corr) if count > whole else b""
    return bytes(made) + rest


class Stream:
    """A stream to one peer, on a channel of a link or in chunks."""

    def __init__(
        self, transport: asyncio.Transport, kind: int, first: int, corr: int | None
    ) -> None:
        self._transport = transport
        self._every_s = EVERY_S.get(kind)
        self._corr = corr
        self._next = first
        self._passed_bytes = 0
        self.over = False
        self.floods = kind == FLOOD
        if self._every_s is not None:
            self._step(asyncio.get_running_loop().time())

    def _step(self, at: float) -> None:
        if self.over or self._transport.is_closing():
            return
        self._write(1)
        assert self._every_s is not None, "it has a pace"
        at += self._every_s
        asyncio.get_running_loop().call_at(at, self._step, at)

    def grant(self, limit: int, limit_bytes: int | None) -> None:
        count = limit - self._next
        if limit_bytes is not None:
            count = min(count, -((self._passed_bytes - limit_bytes) // FRAME_BYTES))
        if count > 0 and not self.over:
            self._passed_bytes += count * FRAME_BYTES
            self._write(count)

    def write_some(self) -> None:
        self._write(FLOOD_FRAMES)

    def _write(self, count: int) -> None:
        data = frames(self._next, count, self._corr or 0)
        self._next += count
        self._transport.write(data if self._corr is not None else chunk(data))


def to_edge(transport: asyncio.Transport, asked: Resume, corr: int) -> Stream:
    return Stream(transport, asked.stream[0], asked.start, corr)


def to_worker(transport: asyncio.Transport, target: str) -> Stream:
    """Answer a request of the Worker as the edge would."""
    path, _, query = target.partition("?")
    stream = path.rpartition("/")[2]
    after = query.partition("after=")[2]
    opened = Opened(bytes.fromhex(stream), 0, "", "demo", 0)
    said = b64encode(encode(opened)).decode()
    transport.write(_HEAD.format(type=FRAMES_TYPE, id=stream, opened=said).encode())
    kind = bytes.fromhex(stream)[0]
    return Stream(transport, kind, int(after) + 1 if after else 0, None)


if __name__ == "__main__":
    uvloop.run(serve(to_edge, to_worker, LAST_INDEX))
