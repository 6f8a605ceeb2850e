"""One HTTP response's end of a stream: a queue that the credit it grants keeps short.

The response takes all frames that are queued, sends them as one write, and takes again
when that write has drained; only then is credit renewed. A reader that stalls therefore
costs at most `WINDOW_FRAMES` frames here, and the origin parks it.
"""

from __future__ import annotations

import asyncio

from edge.link import Link
from ledger.frame import (
    LOGGED,
    Cancel,
    Credit,
    Heartbeat,
    Open,
    Opened,
    Resume,
    Status,
    Steer,
    StreamError,
    decode,
    encode,
    index_of,
    tag_of,
    to_error,
)

WINDOW_FRAMES = 256
"""Frames in flight per response; the `credit` that its Open or Resume must carry."""
CORR = 0
"""An HTTP body carries one stream, so its frames ride on corr 0."""


class Subscriber:
    """A `Sink` for one request; `close` it when the client has its answer or has gone."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._queue: list[bytes] = []
        self._filled = asyncio.Event()
        self._last: bytes | None = None  # the last logged frame taken
        self._limit = 0

    def deliver(self, raw: bytes) -> None:
        self._queue.append(raw)
        self._filled.set()

    @property
    def heartbeat(self) -> Heartbeat:
        """The origin's last word on its readiness."""
        return self.link.heartbeat

    def close(self) -> None:
        """Detach, if the stream is still open; it runs on without this reader."""
        self.link.forget(self)

    # ---- requests ----

    async def open(self, request: Open | Resume) -> Opened:
        """Send the request and wait for its Opened; raises what a StreamError says."""
        after = request.after if isinstance(request, Resume) else None
        self._limit = (0 if after is None else after + 1) + request.credit
        self.link.submit(self, encode(request, CORR))
        answer = await self._first()
        assert isinstance(answer, Opened), answer
        return answer

    async def ask(self, request: Cancel | Steer) -> Status:
        """Send the request and wait for its Status; raises what a StreamError says."""
        self.link.submit(self, encode(request, CORR))
        answer = await self._first()
        assert isinstance(answer, Status), answer
        return answer

    async def _first(self) -> object:
        await self._filled.wait()
        raw = self._queue.pop(0)
        self._settle()
        _, answer = decode(raw)
        if isinstance(answer, StreamError):
            raise to_error(answer)
        return answer

    # ---- frames ----

    async def wait(self, timeout_s: float) -> bool:
        """Whether there are frames to take, after at most `timeout_s` seconds."""
        if not self._queue:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
            except TimeoutError:
                return False
        return True

    def peek(self) -> bytes:
        """The next frame, which stays queued; call it when `wait` has said that there is one."""
        return self._queue[0]

    async def take(self, timeout_s: float | None = None) -> list[bytes]:
        """All queued frames, at least one; [] when `timeout_s` seconds bring none.

        Calling it again says that those of the last call are with the client.
        """
        self._renew_credit()
        if timeout_s is None:
            await self._filled.wait()
        elif not await self.wait(timeout_s):
            return []
        frames, self._queue = self._queue, []
        self._settle()
        for raw in reversed(frames):
            if tag_of(raw) in LOGGED:
                self._last = raw
                break
        return frames

    def _renew_credit(self) -> None:
        if self._last is None:
            return
        next_index = index_of(self._last) + 1
        if self._limit - next_index <= WINDOW_FRAMES // 2:
            self._limit = next_index + WINDOW_FRAMES
            self.link.submit(self, encode(Credit(self._limit), CORR))

    def _settle(self) -> None:
        if not self._queue:
            self._filled.clear()
