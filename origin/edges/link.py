"""The origin's end of a link: frames of many streams over one TCP connection to an edge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import cast

import structlog

from ledger.errors import CallerError, FrameError, LedgerFailed, SchemaMismatch, TailraceError
from ledger.frame import (
    EDGE,
    LINK_CODEC,
    MAX_LINK_FRAME_BYTES,
    SCHEMA_HASH,
    Call,
    Cancel,
    Credit,
    Detach,
    Frame,
    Hello,
    Open,
    Resume,
    Splitter,
    Steer,
    encode,
    error_frame,
)
from ledger.window import Window
from origin.edges.calls import CallRun
from origin.edges.feed import Feed
from origin.edges.peers import SOFTWARE
from origin.generations.service import Service

MAX_CORRS = 65_536
"""Streams and Calls at once on one link."""
SEND_HIGH_BYTES = 1024 * 1024
"""A link with so many unsent bytes is congested: its feeds wait."""
CALLS_HIGH_BYTES = 64 * 1024 * 1024
"""Nothing more is read from a link while Calls of so many bytes have no answer yet."""

log = structlog.get_logger("link")


class EdgeLink(asyncio.Protocol):
    """One connected edge, or origin. `links` is the set of live ones, `fatal` ends the origin."""

    def __init__(
        self, service: Service, links: set[EdgeLink], fatal: Callable[[LedgerFailed], None]
    ) -> None:
        self.congested = False
        self._service = service
        self._links = links
        self._fatal = fatal
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter(MAX_LINK_FRAME_BYTES, EDGE)
        self._greeted = False
        self._handle = service.call
        self._feeds: dict[int, Feed] = {}
        self._calls: dict[int, CallRun] = {}
        self._held_bytes = 0  # of Calls without an answer, detached ones too
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: list[bytes] = []

    # ---- the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=SEND_HIGH_BYTES)
        self.send(encode(Hello(SCHEMA_HASH, SOFTWARE)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._links.discard(self)
        self._transport = None
        # Requests under way are carried out: a stream that was created must be started too,
        # or its idempotency key would name one that never runs.
        for sender in self._senders():
            sender.detach()
        self._feeds.clear()
        self._calls.clear()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        for sender in self._senders():
            sender.pump()

    def data_received(self, data: bytes) -> None:
        try:
            for raw in self._splitter.feed(data):
                self._take(raw)
        except TailraceError as error:
            self._refuse(error)

    def send(self, data: bytes) -> None:
        """Queue bytes; all that one turn of the event loop queues goes out in one write."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(data)

    def closed(self, corr: int) -> None:
        self._feeds.pop(corr, None)
        self._calls.pop(corr, None)

    def release(self, size: int) -> None:
        self._hold(-size)

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def _refuse(self, error: TailraceError) -> None:
        """The connection itself is at fault: say why and close it."""
        log.warning("link.refused", error=str(error))
        self.send(encode(error_frame(error)))
        self.close()

    # ---- frames ----

    def _take(self, raw: bytes) -> None:
        try:
            corr, frame = LINK_CODEC.decode(raw)
        except FrameError as error:
            self._answer_bad_frame(raw, error)
            return
        if not self._greeted:
            self._greet(frame)
        else:
            self._dispatch(corr, frame)

    def _answer_bad_frame(self, raw: bytes, error: FrameError) -> None:
        """A bad payload costs its own stream only: the framing around it is sound."""
        corr = int.from_bytes(raw[5:9], "little")
        if not self._greeted or corr == 0:
            raise error
        self._fail(corr, error)

    def _greet(self, frame: Frame) -> None:
        if not isinstance(frame, Hello) or frame.schema != SCHEMA_HASH:
            raise SchemaMismatch(
                "the first frame must be a Hello of this schema",
                hint=f"schema {SCHEMA_HASH.hex()}; run the same version at both ends",
            )
        self._greeted = True
        if frame.software == SOFTWARE:
            self._handle = self._service.peer_call
        self._links.add(self)
        self.send(encode(self._service.heartbeat()))

    def _dispatch(self, corr: int, frame: Frame) -> None:
        match frame:
            case Credit():
                if (sender := self._feeds.get(corr) or self._calls.get(corr)) is not None:
                    sender.grant(frame.limit, frame.bytes)
            case Detach():
                self._detach(corr)
            case Open():
                feed = self._feed(corr, frame)
                self._spawn(corr, self._open(corr, frame, feed))
            case Resume():
                feed = self._feed(corr, frame, follow=frame.follow)
                self._spawn(corr, self._resume(corr, frame, feed))
            case Cancel():
                self._spawn(corr, self._cancel(corr, frame))
            case Call():
                self._check_free(corr)
                self._call(corr, frame)
            case Steer():
                self._check_free(corr)
                self._spawn(corr, self._steer(corr, frame))
            case _:
                raise FrameError("not expected here", field=type(frame).__name__, offset=4)

    def _feed(self, corr: int, wanted: Open | Resume, *, follow: bool = True) -> Feed:
        """The feed is known before its stream is: a Credit may overtake the answer."""
        self._check_free(corr)
        window = Window.starting(wanted.start, wanted.credit, credit_bytes=wanted.credit_bytes)
        service = self._service
        feed = Feed(self, corr, window, service.ledger, service.runs.readers, follow=follow)
        self._feeds[corr] = feed
        return feed

    def _senders(self) -> list[Feed | CallRun]:
        return [*self._feeds.values(), *self._calls.values()]

    def _check_free(self, corr: int) -> None:
        if corr == 0 or corr in self._feeds or corr in self._calls:
            raise CallerError(f"corr {corr} is in use", code="corr_in_use", field="corr")
        if len(self._feeds) + len(self._calls) >= MAX_CORRS:
            raise CallerError(f"over {MAX_CORRS} streams on one link", status=429, field="corr")

    def _detach(self, corr: int) -> None:
        if (sender := self._feeds.pop(corr, None) or self._calls.pop(corr, None)) is not None:
            sender.detach()

    async def _open(self, corr: int, frame: Open, feed: Feed) -> None:
        opened = await self._service.open(frame)
        self._begin(corr, feed, encode(opened, corr), opened.stream, opened.next_index)

    async def _resume(self, corr: int, frame: Resume, feed: Feed) -> None:
        opened = await self._service.resume(frame)
        self._begin(corr, feed, encode(opened, corr), opened.stream, opened.next_index)

    def _begin(self, corr: int, feed: Feed, opened: bytes, stream: bytes, released: int) -> None:
        if self._feeds.get(corr) is feed:  # not detached meanwhile
            self.send(opened)
            feed.attach(stream, released)

    async def _cancel(self, corr: int, frame: Cancel) -> None:
        self.send(encode(await self._service.cancel(frame), corr))

    async def _steer(self, corr: int, frame: Steer) -> None:
        self.send(encode(await self._service.steer(frame), corr))

    # ---- calls ----

    def _call(self, corr: int, call: Call) -> None:
        run = CallRun(self, corr, call)
        self._calls[corr] = run
        self._hold(len(call.body))
        self._spawn(corr, run.run(self._handle))

    def _hold(self, size: int) -> None:
        """Count bytes of Calls in; what a link may have waiting here is bounded."""
        self._held_bytes += size
        if self._transport is None:
            return
        if self._held_bytes > CALLS_HIGH_BYTES:
            self._transport.pause_reading()
        elif size < 0 and not self._transport.is_reading():
            self._transport.resume_reading()

    # ---- tasks and errors ----

    def _spawn(self, corr: int, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(self._guard(corr, work))
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, corr))

    async def _guard(self, corr: int, work: Coroutine[None, None, None]) -> None:
        """An error of one request is that request's answer."""
        try:
            await work
        except LedgerFailed as error:
            self._fail(corr, error)
            self._fatal(error)
        except TailraceError as error:
            self._fail(corr, error)

    def _done(self, corr: int, task: asyncio.Task[None]) -> None:
        """A fault of ours ends its own request only, and is not hidden."""
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("request.failed", exc_info=fault)
            self._fail(corr, TailraceError("a fault of the origin's; its log says more"))

    def _fail(self, corr: int, error: TailraceError) -> None:
        self._detach(corr)
        self.send(encode(error_frame(error), corr))
