"""Sends one reader's frames from the ledger to its link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

import structlog

from tailrace.ledger.errors import TailraceError, unknown_stream
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import Status, StreamEnd, StreamState, encode, error_frame
from tailrace.ledger.interface import Ledger, LiveTail
from tailrace.ledger.wire.codec import TAG_OFFSET
from tailrace.origin.generations.presence import Readers
from tailrace.origin.generations.service import status

INTERNAL_FAULT = "the origin has a fault; its log has the details"

log = structlog.get_logger("link")


class Outlet(Protocol):
    """The part of a link that frames are written to."""

    @property
    def congested(self) -> bool: ...

    def send(self, data: bytes) -> None: ...

    def relay(self, frames: Sequence[bytes], corr: int) -> None:
        """Send logged frames under a correlation id."""

    def closed(self, corr: int) -> None:
        """Free a correlation id after its closing frame."""


class Feed:
    """Sends a stream's frames to one reader as its credit allows.

    Frames come from memory, or from storage if the reader is behind. `attach` starts the feed.
    `pump` is called whenever more might be sent: after a release of frames, a grant of credit, or
    when the link has drained. A feed holds no frames, so a feed that is stopped loses nothing.
    """

    def __init__(
        self,
        outlet: Outlet,
        corr: int,
        window: Window,
        ledger: Ledger,
        readers: Readers,
        *,
        follow: bool = True,
    ) -> None:
        self._window = window
        self._follow = follow
        self._readers = readers
        self._reads = False  # True while the reader is counted in `readers`
        self._was_at_tip = False
        self._outlet = outlet
        self._corr = corr
        self._ledger = ledger
        self._stream: bytes | None = None
        self._tail: LiveTail | None = None  # the stream's latest frames, in memory
        self._stop_at: int | None = None
        self._reading: asyncio.Task[None] | None = None

    def attach(self, stream: bytes, released: int, first: int = 0) -> None:
        """Start to read `stream` from index `first` on; `released` is the stream's next index."""
        self._stream = stream
        self._window.begin_at(first)
        self._readers.join(stream, self._reach)
        self._stop_at = None if self._follow else released
        self._attend(stream)
        self._ledger.watch(stream, self.pump)
        self._tail = self._ledger.tail(stream)
        if self._window.next >= released:
            self._wait_for(partial(self._begin_at_tip, stream))
        else:
            self.pump()

    def detach(self) -> None:
        """Stop at once; nothing more is sent."""
        if self._stream is not None:
            self._ledger.unwatch(self._stream, self.pump)
            if self._reads:
                self._readers.end(self._stream)
            self._readers.leave(self._stream, self._reach, self._window.next)
            self._stream = self._tail = None
        if self._reading not in (None, asyncio.current_task()):
            self._reading.cancel()

    def _reach(self, released: int) -> int:
        """Return the index before which the reader will have all frames after the next release.

        The next release covers the frames before `released`. A reader that is up to date and has
        credit is sent them at once, so the stored usage of an ending stream counts them already.
        """
        window, tail = self._window, self._tail
        is_at_tip = tail is not None and self._reading is None and window.next >= tail.released
        if is_at_tip and window.open and self._follow and not self._outlet.congested:
            return max(window.next, min(released, window.limit))
        return window.next

    def grant(self, limit: int, limit_bytes: int | None) -> None:
        self._window.grant(limit, limit_bytes)
        if self._stream is not None:
            self._attend(self._stream)
        self.pump()

    def _attend(self, stream: bytes) -> None:
        """Update the reader's presence: a reader without credit for the next frame is absent."""
        if self._reads != self._window.open:
            self._reads = not self._reads
            (self._readers.begin if self._reads else self._readers.end)(stream)

    def pump(self) -> None:
        """Send the frames that credit and the link allow now."""
        window = self._window
        while (
            (tail := self._tail) is not None
            and self._reading is None
            and not self._outlet.congested
        ):
            assert self._stream is not None
            if tail.gone:
                self._close(encode(error_frame(unknown_stream(self._stream)), self._corr))
                return
            released = tail.released
            if self._stop_at is not None and self._stop_at < released:
                released = self._stop_at
            wanted = window.wanted(released)
            if wanted == 0:
                self._finish_snapshot()
                return
            frames = tail.take(window.next, wanted)
            if frames is None:
                self._wait_for(partial(self._read, self._stream, wanted))
                return
            self._was_at_tip = True
            self._send(frames)
            if window.next == released and self._stop_at is None:
                return  # all released frames were sent, so another pass would send nothing

    def _wait_for(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self._reading = asyncio.create_task(self._guard(work))

    async def _guard(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run a read; if it fails, close this feed with the error. Other readers continue."""
        try:
            await work()
        except TailraceError as error:
            self._close(encode(error_frame(error), self._corr))
        except Exception as fault:
            log.error("read.failed", exc_info=fault)
            self._close(encode(error_frame(TailraceError(INTERNAL_FAULT)), self._corr))

    async def _read(self, stream: bytes, wanted: int) -> None:
        frames = await self._ledger.frames(stream, self._window.next, wanted)
        if not frames:  # another origin of a shared ledger has deleted the stream
            raise unknown_stream(stream)
        self._reading = None
        self._readers.replayed(len(frames), self._was_at_tip)
        self._was_at_tip = False
        self._send(frames)
        self.pump()

    def _send(self, frames: Sequence[bytes]) -> None:
        frames = self._window.passing(frames)
        self._outlet.relay(frames, self._corr)
        if self._stream is not None:
            self._attend(self._stream)
        if frames[-1][TAG_OFFSET] == StreamEnd.tag:
            self._close(b"")

    async def _begin_at_tip(self, stream: bytes) -> None:
        """Begin a feed whose reader already has all frames; close it if the stream has ended."""
        info = await self._ledger.info(stream)
        if info.ended and self._window.next >= info.next_index:
            self._close(encode(status(info), self._corr))
        else:
            self._reading = None
            self.pump()

    def _finish_snapshot(self) -> None:
        """Close the feed of a reader that does not follow, once it has all frames up to `_stop_at`.

        The closing Status shows the stream as of `attach`: its `next_index` is the index from which
        the reader can continue.
        """
        if self._stop_at is not None and self._window.next >= self._stop_at:
            assert self._stream is not None  # `pump`, the caller, asserts it too
            was = Status(self._stream, StreamState.RUNNING, self._stop_at)
            self._close(encode(was, self._corr))

    def _close(self, last: bytes) -> None:
        self.detach()
        if last:
            self._outlet.send(last)
        self._outlet.closed(self._corr)
