"""One subscriber's frames on their way from the ledger to a corr of a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

from ledger.errors import NotFound, TailraceError
from ledger.frame import Status, StreamState, Tag, encode, error_frame, tag_of, with_corr
from ledger.interface import Ledger
from ledger.subscriber import Subscriber
from origin.service import status


class Outlet(Protocol):
    """The link's side that a feed writes to."""

    congested: bool

    def send(self, data: bytes) -> None: ...

    def closed(self, corr: int) -> None:
        """The feed has sent a closing frame; its corr is free."""
        ...


class Feed:
    """Sends what its subscriber has credit for, from memory or storage, never both at once.

    `attach` begins it; `pump` is called whenever something may have changed: a release, a
    credit, a link that drains. It holds no frames: one that cannot send forgets nothing.
    """

    def __init__(self, outlet: Outlet, corr: int, subscriber: Subscriber, ledger: Ledger) -> None:
        self.subscriber = subscriber
        self._outlet = outlet
        self._corr = corr
        self._ledger = ledger
        self._stream: bytes | None = None
        self._stop_at: int | None = None
        self._reading: asyncio.Task[None] | None = None

    def attach(self, stream: bytes, released: int) -> None:
        """Begin to read `stream`, whose next index is `released` now."""
        self._stream = stream
        self._stop_at = None if self.subscriber.follow else released
        self._ledger.watch(stream, self.pump)
        if self.subscriber.next >= released:
            self._wait_for(partial(self._begin_at_tip, stream))
        else:
            self.pump()

    def detach(self) -> None:
        """Stop at once; nothing more is sent."""
        if self._stream is not None:
            self._ledger.unwatch(self._stream, self.pump)
            self._stream = None
        if self._reading not in (None, asyncio.current_task()):
            self._reading.cancel()

    def grant(self, limit: int) -> None:
        self.subscriber.grant(limit)
        self.pump()

    def pump(self) -> None:
        """Send what may be sent now."""
        while self._stream is not None and self._reading is None and not self._outlet.congested:
            try:
                wanted = self.subscriber.wanted(self._released())
            except NotFound as error:  # it was deleted
                self._close(encode(error_frame(error), self._corr))
                return
            if wanted == 0:
                self._finish_snapshot()
                return
            frames = self._ledger.tip(self._stream, self.subscriber.next, wanted)
            if frames is None:
                self._wait_for(partial(self._read, self._stream, wanted))
                return
            self._send(frames)

    def _released(self) -> int:
        assert self._stream is not None
        released = self._ledger.released(self._stream)
        return released if self._stop_at is None else min(released, self._stop_at)

    def _wait_for(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self._reading = asyncio.create_task(self._guard(work))

    async def _guard(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await work()
        except TailraceError as error:
            self._close(encode(error_frame(error), self._corr))

    async def _read(self, stream: bytes, wanted: int) -> None:
        frames = await self._ledger.frames(stream, self.subscriber.next, wanted)
        self._reading = None
        self._send(frames)
        self.pump()

    def _send(self, frames: Sequence[bytes]) -> None:
        corr = self._corr
        self._outlet.send(b"".join([with_corr(frame, corr) for frame in frames]))
        self.subscriber.sent(len(frames))
        if tag_of(frames[-1]) == Tag.STREAM_END:
            self._close(b"")

    async def _begin_at_tip(self, stream: bytes) -> None:
        """A reader that has all of an ended stream is told so; nothing else would come."""
        info = await self._ledger.info(stream)
        if info.ended and self.subscriber.next >= info.next_index:
            self._close(encode(status(info), self._corr))
        else:
            self._reading = None
            self.pump()

    def _finish_snapshot(self) -> None:
        """A subscriber that does not follow is done when it has all that there was.

        The status is of that moment too, so that its `next_index` is where to go on.
        """
        if self._stop_at is not None and self.subscriber.next >= self._stop_at:
            assert self._stream is not None  # pump has looked
            was = Status(self._stream, StreamState.RUNNING, self._stop_at)
            self._close(encode(was, self._corr))

    def _close(self, last: bytes) -> None:
        self.detach()
        if last:
            self._outlet.send(last)
        self._outlet.closed(self._corr)
