"""The source of frames: an origin for the edge, and the same events over HTTP/1.1 for a peer.

    python tests/bench/http3/source.py LINK_PORT HTTP_PORT

A stream's id says what it is: `PACED` is a frame every 50 ms, each stream at a time of its own;
`BURST` is `BURST_FRAMES` at once and the end. To the peer those go as a streaming server writes
them, one by one; as `BLOCK` they are one write to it too.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Protocol

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tailrace.edge.sse import event
from tailrace.ledger.frame import FinishReason, Resume, StreamEnd, Token, encode
from tests.bench.ends import chunk, serve

EVERY_S = 0.05
PACED, BURST, BLOCK = 0, 1, 2
BURST_FRAMES = 500
FRAMES = 1 << 14
TEXT = " token"
END = StreamEnd(BURST_FRAMES, FinishReason.LENGTH, BURST_FRAMES, 0)

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class Stepping(Protocol):
    """A stream that writes one frame a step."""

    def step(self) -> bool:
        """Write a frame; whether there will be another."""


class Pacer:
    """Calls each of its own every 50 ms, apart from the others."""

    def __init__(self) -> None:
        self._count = 0

    def begin(self, source: Stepping) -> None:
        loop = asyncio.get_running_loop()
        self._count += 1
        phase = (self._count * 0.618 % 1.0) * EVERY_S
        loop.call_later(phase, self._step, source, loop.time() + phase)

    def _step(self, source: Stepping, at: float) -> None:
        if source.step():
            loop = asyncio.get_running_loop()
            loop.call_at(at + EVERY_S, self._step, source, at + EVERY_S)


class Stream:
    """A stream to one peer."""

    floods = False

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

    def grant(self, limit: int, limit_bytes: int | None) -> None:
        """More than a window is a burst for the edge too: its credit is a replay's business."""

    def write_some(self) -> None:
        """Nothing is written but at its time."""


class Begin:
    """Begins streams, which keep time together."""

    def __init__(self) -> None:
        self._pacer = Pacer()

    def to_edge(self, transport: asyncio.Transport, asked: Resume, corr: int) -> Stream:
        stream = Stream(transport, corr)
        if asked.stream[0] == PACED:
            self._pacer.begin(stream)
        else:
            frames = [encode(Token(TEXT, n), corr) for n in range(BURST_FRAMES)]
            transport.write(b"".join((*frames, encode(END, corr))))
        return stream

    def to_peer(self, transport: asyncio.Transport, target: str) -> Stream:
        stream, kind = Stream(transport, None), bytes.fromhex(target.rpartition("/")[2])[0]
        transport.write(HEAD)
        if kind == PACED:
            self._pacer.begin(stream)
            return stream
        chunks = [chunk(event(Token(TEXT, n))) for n in range(BURST_FRAMES)]
        chunks.append(chunk(event(END)) + b"0\r\n\r\n")
        for each in chunks if kind == BURST else (b"".join(chunks),):
            transport.write(each)
        return stream


if __name__ == "__main__":
    begin = Begin()
    uvloop.run(serve(begin.to_edge, begin.to_peer, FRAMES))
