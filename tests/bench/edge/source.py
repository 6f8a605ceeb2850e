"""The source of frames: an origin for the edge, and the same events over HTTP/1.1 for a peer.

    python tests/bench/edge/source.py LINK_PORT HTTP_PORT

A stream's id says by its first byte what it is: `PACED` has a frame every 50 ms, each stream at a
time of its own, as the timers of an event loop have it, to the millisecond; `APART` has it to the
microsecond, so that none comes with another; `STEP` has it when all others of its kind have theirs,
as of an engine's step; `FLOOD` has as many as its reader has credit for; `SILENT` has one, and then
none. A frame has 18 bytes, and its text is the time at which it was written.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tailrace.edge.sse import event
from tailrace.ledger.frame import Resume, Token, encode
from tests.bench.edge.readers import clock
from tests.bench.ends import chunk, serve
from tests.bench.http3.source import EVERY_S, HEAD, Pacer

PACED, STEP, FLOOD, SILENT, APART = range(5)
LAST_INDEX = 1 << 14
FLOOD_EVENTS = 64  # to a peer's upstream at a time


def stamp() -> str:
    """Return the time, for readers of `tests.bench.edge.readers`."""
    return f"{clock():06x}"


class Stream:
    """A stream to one peer."""

    def __init__(self, transport: asyncio.Transport, kind: int, corr: int | None) -> None:
        self._transport = transport
        self._corr = corr
        self.floods = kind == FLOOD
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

    def write_some(self) -> None:
        self._transport.write(b"".join([self.frame() for _ in range(FLOOD_EVENTS)]))

    def grant(self, limit: int, limit_bytes: int | None) -> None:
        frames: list[bytes] = []
        while self._index < limit and (limit_bytes is None or self._passed_bytes < limit_bytes):
            frames.append(self.frame())
            self._passed_bytes += len(frames[-1])
        if frames and not self.over:
            self._transport.write(b"".join(frames))


class Timer:
    """A timer to the microsecond; an event loop's own timers are due to the millisecond.

    It calls `fired` for each time that has passed. It uses timerfd_create(2), which Python has had
    since 3.13.
    """

    def __init__(self, fired: Callable[[], None]) -> None:
        self._fired = fired
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        assert self._fd >= 0, os.strerror(ctypes.get_errno())
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def every(self, seconds: float) -> None:
        """From now on; never, of 0."""
        nanoseconds = round(seconds * 1e9)
        spec = (ctypes.c_long * 4)(0, nanoseconds, 0, nanoseconds)
        failed = self._libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None)
        assert not failed, os.strerror(ctypes.get_errno())

    def _read(self) -> None:
        try:
            times = int.from_bytes(os.read(self._fd, 8), sys.byteorder)
        except BlockingIOError:  # the timer was set again since the loop looked
            return
        for _ in range(times):
            self._fired()


class Queue:
    """Send a frame on each stream of that kind every 50 ms, one stream after the other."""

    def __init__(self) -> None:
        self._streams: deque[Stream] = deque()
        self._timer: Timer | None = None

    def begin(self, stream: Stream) -> None:
        self._timer = self._timer or Timer(self._step)
        self._streams.append(stream)
        self._timer.every(EVERY_S / len(self._streams))

    def _step(self) -> None:
        if not self._streams:
            return
        stream = self._streams.popleft()
        if stream.step():
            self._streams.append(stream)
        elif self._timer is not None:
            self._timer.every(EVERY_S / len(self._streams) if self._streams else 0.0)


class Steps:
    """Send a frame on all streams of that kind every 50 ms, with one write for each connection."""

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


class Begin:
    """Begins streams, which keep time together."""

    def __init__(self) -> None:
        self._pacer = Pacer()
        self._steps = Steps()
        self._queue = Queue()

    def to_edge(self, transport: asyncio.Transport, asked: Resume, corr: int) -> Stream:
        return self._begun(asked.stream[0], transport, corr)

    def to_peer(self, transport: asyncio.Transport, target: str) -> Stream:
        transport.write(HEAD)
        return self._begun(bytes.fromhex(target.rpartition("/")[2])[0], transport, None)

    def _begun(self, kind: int, transport: asyncio.Transport, corr: int | None) -> Stream:
        stream = Stream(transport, kind, corr)
        if kind == PACED:
            self._pacer.begin(stream)
        elif kind == STEP:
            self._steps.add(stream, transport)
        elif kind == APART:
            self._queue.begin(stream)
        elif kind == SILENT:
            stream.step()
        return stream


if __name__ == "__main__":
    begin = Begin()
    uvloop.run(serve(begin.to_edge, begin.to_peer, 1))
