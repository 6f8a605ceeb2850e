"""The origin's end of a link: frames of many streams over one TCP connection to an edge."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

import structlog

from tailrace.ledger.errors import (
    CallerError,
    FrameError,
    LedgerFailed,
    Overloaded,
    SchemaMismatch,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.flow.idle_timer import IdleTimer
from tailrace.ledger.frame import (
    EDGE,
    LINK_CODEC,
    MAX_LINK_FRAME_BYTES,
    SCHEMA_HASH,
    Call,
    Cancel,
    Challenge,
    Credit,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    Input,
    InputStored,
    Open,
    Opened,
    Pass,
    Proof,
    Renew,
    Resume,
    Splitter,
    Status,
    Steer,
    SwitchStages,
    encode,
    error_frame,
    hello_schema,
)
from tailrace.ledger.objects.object import ObjectResponse
from tailrace.ledger.wire.codec import patch_corrs
from tailrace.ledger.wire.handshake import PEER, Handshake, Side, refused
from tailrace.origin.edges.calls import C, CallRun
from tailrace.origin.edges.feed import INTERNAL_FAULT, Feed
from tailrace.origin.edges.peer_frame import ASKING, PEER_CODEC, PEER_SCHEMA_HASH, ObjectCall
from tailrace.origin.edges.peers import SOFTWARE
from tailrace.origin.generations.service import CORRS, Service

MAX_CORRS = CORRS + 4096
"""Maximum number of requests and streams that one link may have open. A request counts until it has
been carried out, even if the edge detaches before. The limit announced to edges (CORRS) is lower,
because an edge does not know which detached requests still count."""
MAX_TURN_FRAMES = 128
"""Maximum number of frames of one link that are handled in one turn of the event loop, so that
heartbeats, answers and other links get their turn while there is a backlog."""
SEND_HIGH_BYTES = 1024 * 1024
"""Number of unsent bytes from which a link counts as congested and its feeds wait."""
BULK_HIGH_BYTES = 64 * 1024
"""Number of unsent bytes from which answers of objects wait, because tokens would queue behind
them."""
UNSENT_IN_KERNEL_BYTES = 128 * 1024
"""Maximum bytes that the kernel buffers before it sends them (TCP_NOTSENT_LOWAT). Tokens can
overtake bulk data only in our own buffers, not in the kernel's."""
CALLS_HIGH_BYTES = 64 * 1024 * 1024
"""Total body size in bytes of unanswered Calls beyond which further Calls are refused."""
MAX_HELLO_BYTES = 4096
"""Maximum size in bytes of a frame during the greeting, before the peer is trusted."""
HELLO_S = 10.0
"""Timeout in seconds for the greeting, counted from the start of the connection."""
LONGEST_LOOK_S = 6.0
"""Maximum seconds that one check may add to an edge's silence, so that time in which this process
was stalled does not count as silence. The value is a little more than the interval between two
checks."""
TCP_NOTSENT_LOWAT = 25
"""Linux's number of this socket option, which Python's `socket` defines from 3.12 on."""

log = structlog.get_logger("link")


class EdgeLink(asyncio.Protocol):
    """The link to one connected edge, or to another origin.

    `links` is the set of live links, which this one joins after its greeting. `fatal` ends the
    origin when its ledger has failed.
    """

    def __init__(
        self,
        service: Service,
        links: set[EdgeLink],
        fatal: Callable[[LedgerFailed], None],
        secret: bytes | None = None,
    ) -> None:
        self._service = service
        self._links = links
        self._fatal = fatal
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter(MAX_HELLO_BYTES, EDGE)
        self._secret = secret
        self._codec = LINK_CODEC
        self._handshake = Handshake(Side.ORIGIN, secret)
        self._hello: Hello | None = None
        self._greeted = False
        self._deadline: asyncio.TimerHandle | None = None  # deadline of the greeting
        self._silence = IdleTimer(0.0, LONGEST_LOOK_S)
        self._silence_timeout_s = 0.0  # 0 until the edge announces a timeout
        self._feeds: dict[int, Feed] = {}
        self._calls: dict[int, CallRun[Any]] = {}
        self._answers: set[int] = set()  # correlation ids of Cancels and Steers in progress
        self._carried_out: dict[int, asyncio.Task[None]] = {}  # tasks of open requests, by corr
        self._detached = 0  # number of requests that still run although the edge detached them
        self._backlog: deque[bytes] = deque()  # frames that have arrived and are not handled yet
        self._is_due = False  # True while a call of `_handle_backlog` is scheduled
        self._held_bytes = 0  # body bytes of unanswered Calls, including detached ones
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: list[bytes] = []
        self._bulk: list[bytes] = []
        self._queued = 0  # bytes in `_out` and `_bulk`
        # (byte offset in `_out`, new correlation id) of each frame that `_flush` patches
        self._places: list[tuple[int, int]] = []
        self._out_bytes = 0
        self._paused = False  # True while the transport has BULK_HIGH_BYTES unsent

    # ---- the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not instances of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=BULK_HIGH_BYTES)
        leave_unsent_to_us(self._transport)
        self._deadline = asyncio.get_running_loop().call_later(HELLO_S, self._give_up)
        self.send(encode(Hello(SCHEMA_HASH, SOFTWARE)))
        if (challenge := self._handshake.challenge) is not None:
            self.send(encode(challenge))

    def connection_lost(self, exc: Exception | None) -> None:
        self._links.discard(self)
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()
        # Requests in progress are completed without their link. For example, a stream that was
        # created must also be started, or its idempotency key would lead to a stream that never
        # runs.
        for sender in self._senders():
            sender.detach()
        self._feeds.clear()
        self._calls.clear()
        self._backlog.clear()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def data_received(self, data: bytes) -> None:
        self._silence.broken()
        try:
            while not self._greeted:
                raw = self._splitter.feed_one(data)
                if raw is None:
                    return
                self._greet(raw)
                data = b""
            self._backlog += self._splitter.feed(data)
        except TailraceError as error:
            self._refuse(error)
        else:
            if not self._is_due:
                self._handle_backlog()

    def _handle_backlog(self) -> None:
        """Handle the next frames, and pause reading from the edge while others are left."""
        backlog, was_due, self._is_due = self._backlog, self._is_due, False
        if self._transport is None or self._transport.is_closing():
            backlog.clear()
            return
        try:
            for _ in range(min(len(backlog), MAX_TURN_FRAMES)):
                self._take(backlog.popleft())
        except TailraceError as error:
            backlog.clear()
            self._refuse(error)
            return
        if backlog:
            self._silence.broken()  # reading is paused, so the edge must not count as silent
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._handle_backlog)
        if self._is_due != was_due and not self.gone:
            assert self._transport is not None
            (self._transport.pause_reading if backlog else self._transport.resume_reading)()

    @property
    def congested(self) -> bool:
        """True if feeds must wait."""
        return (self._unsent if self._paused else self._queued) >= SEND_HIGH_BYTES

    @property
    def bulk_congested(self) -> bool:
        """True if everything except token streams must wait."""
        return self._unsent >= BULK_HIGH_BYTES

    @property
    def _unsent(self) -> int:
        if self._paused and self._transport is not None:
            return self._queued + self._transport.get_write_buffer_size()
        return self._queued

    def send(self, data: bytes) -> None:
        """Queue bytes; everything queued in one turn of the event loop goes out in one write."""
        self._queue(len(data))
        self._out.append(data)
        self._out_bytes += len(data)

    def relay(self, frames: Sequence[bytes], corr: int) -> None:
        """Queue logged frames like `send`, and note where `_flush` must patch `corr` into them."""
        at = before = self._out_bytes
        add_place = self._places.append
        for frame in frames:
            add_place((at, corr))
            at += len(frame)
        self._queue(at - before)
        self._out += frames
        self._out_bytes = at

    def send_bulk(self, data: bytes) -> None:
        """Queue bytes after everything that `send` queues in this turn."""
        self._queue(len(data))
        self._bulk.append(data)

    def _queue(self, size: int) -> None:
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queued += size

    def closed(self, corr: int) -> None:
        self._feeds.pop(corr, None)
        self._calls.pop(corr, None)

    def release(self, size: int) -> None:
        self._held_bytes -= size

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    @property
    def gone(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def described(self) -> dict[str, object]:
        """Return the peer's address, its software and its number of requests, for operators."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return {
            "address": ":".join(map(str, peer[:2])) if isinstance(peer, tuple) else None,
            "software": None if self._hello is None else self._hello.software,
            "streams": len(self._feeds),
            "calls": len(self._calls),
            "unsent_bytes": self._unsent,
        }

    def look(self, now: float) -> None:
        """Close the link if its edge has been silent for longer than the timeout it announced."""
        silent_s = self._silence.seconds(now)
        if self._transport is not None and 0 < self._silence_timeout_s < silent_s:
            log.warning("link.silent", seconds=round(silent_s, 1))
            self._transport.abort()

    def _flush(self) -> None:
        if self._queued and self._transport is not None and not self._transport.is_closing():
            data = bytearray().join((*self._out, *self._bulk))
            patch_corrs(data, self._places)
            self._transport.write(data)
        was_full = self._queued >= BULK_HIGH_BYTES
        self._out.clear()
        self._bulk.clear()
        self._places.clear()
        self._queued = self._out_bytes = 0
        if was_full and not self._paused:  # answers that waited for space can continue
            self._pump()

    def _pump(self) -> None:
        for sender in self._senders():
            sender.pump()

    def _refuse(self, error: TailraceError) -> None:
        """Close the connection because the peer broke the protocol, and send it the reason."""
        log.warning("link.refused", error=str(error))
        self.send(encode(error_frame(error)))
        self.close()

    # ---- the greeting ----

    def _give_up(self) -> None:
        why = f"no Hello within {HELLO_S:g} s" if self._hello is None else "no proof of the secret"
        self._refuse(Unavailable(why, code="timeout", status=408))

    def _greet(self, raw: bytes) -> None:
        """Handle a frame of the greeting: first a Hello, then the proof of the link secret."""
        try:
            _, frame = self._codec.decode(raw)
        except FrameError:
            if hello_schema(raw) not in (None, SCHEMA_HASH, PEER_SCHEMA_HASH):
                raise _other_schema() from None
            raise
        match frame:
            case Hello() if self._hello is None and frame.schema == SCHEMA_HASH:
                self._hello = frame
            case Hello() if self._hello is None and frame.schema == PEER_SCHEMA_HASH:
                self._hello = frame
                self._greet_origin()
            case _ if self._hello is None:
                raise _other_schema()
            case Challenge():
                self.send(encode(self._handshake.answer(frame)))
            case Proof():
                self._handshake.check(frame)
            case _ if self._hello.schema == PEER_SCHEMA_HASH:
                raise refused("the other side calls itself an origin, but has not proven it", PEER)
            case _:
                raise refused(
                    "this origin has a link secret, but the other side sent no proof of it"
                )
        if self._handshake.done:
            self._begin_service(self._hello)

    def _greet_origin(self) -> None:
        """Challenge a peer to prove that it is an origin, as it has said in its Hello."""
        secrets = self._service.keys.peer_secrets(self._secret)
        self._handshake = Handshake(Side.ORIGIN, *secrets, shared=PEER)
        self._splitter.tags, self._codec = ASKING, PEER_CODEC
        self.send(encode(Hello(PEER_SCHEMA_HASH, SOFTWARE)))
        assert self._handshake.challenge is not None
        self.send(encode(self._handshake.challenge))

    def _begin_service(self, hello: Hello) -> None:
        self._greeted = True
        self._splitter.max_frame_bytes = MAX_LINK_FRAME_BYTES
        if self._deadline is not None:
            self._deadline.cancel()
        self._silence = IdleTimer(asyncio.get_running_loop().time(), LONGEST_LOOK_S)
        self._links.add(self)
        self.send(encode(self._service.heartbeat()))

    # ---- frames ----

    def _take(self, raw: bytes) -> None:
        try:
            corr, frame = self._codec.decode(raw)
        except FrameError as error:
            # The framing is valid, so a malformed payload ends only its own stream.
            if (corr := int.from_bytes(raw[5:9], "little")) == 0:
                raise
            self._fail(corr, error)
            return
        try:
            self._dispatch(corr, frame)
        except Overloaded as error:
            self.send(encode(error_frame(error), corr))

    def _dispatch(self, corr: int, frame: Frame) -> None:
        match frame:
            case Credit():
                if (sender := self._feeds.get(corr) or self._calls.get(corr)) is not None:
                    sender.grant(frame.limit, frame.bytes)
            case Detach():
                self._detach(corr)
            case Heartbeat():
                self._silence_timeout_s = frame.patience_ms / 1000
            case Challenge() if self._handshake.challenge is None:
                self._handshake.answer(frame)  # raises an error, as this origin has no secret
            case Open():
                feed = self._feed(corr, frame)
                self._spawn(corr, self._begin(corr, feed, self._service.open(frame)))
            case Resume() | Renew():
                feed = self._feed(corr, frame, follow=frame.follow)
                known = frame.mac if isinstance(frame, Renew) else None
                self._spawn(corr, self._begin(corr, feed, self._service.resume(frame), known))
            case Cancel() | Steer() | Input() | SwitchStages():
                self._check_free(corr)
                self._answers.add(corr)
                self._spawn(corr, self._answer(corr, self._change(frame)))
            case Call():
                self._call(corr, frame, self._service.call)
            case ObjectCall():
                self._call(corr, frame, self._service.peer_call)
            case _:
                raise FrameError(
                    "must not be sent to an origin", field=type(frame).__name__, offset=4
                )

    def _feed(self, corr: int, wanted: Open | Resume | Renew, *, follow: bool = True) -> Feed:
        """Create the feed for a correlation id.

        The feed is created before the stream is looked up, because Credit for the feed may arrive
        in the meantime.
        """
        self._check_free(corr)
        window = Window.starting(wanted.start, wanted.credit, credit_bytes=wanted.credit_bytes)
        service = self._service
        feed = Feed(self, corr, window, service.ledger, service.runs.readers, follow=follow)
        self._feeds[corr] = feed
        return feed

    def _senders(self) -> list[Feed | CallRun[Any]]:
        return [*self._feeds.values(), *self._calls.values()]

    def _check_free(self, corr: int) -> None:
        feeds, calls, answers = self._feeds, self._calls, self._answers
        if corr == 0 or corr in feeds or corr in calls or corr in self._carried_out:
            raise CallerError(f"corr {corr} is in use", code="corr_in_use", field="corr")
        if len(feeds) + len(calls) + len(answers) + self._detached >= MAX_CORRS:
            raise self._overloaded(f"{MAX_CORRS} requests and streams are open on this link")

    def _overloaded(self, why: str) -> Overloaded:
        return Overloaded(why)

    def _detach(self, corr: int) -> None:
        self._answers.discard(corr)
        if self._carried_out.pop(corr, None) is not None:
            self._detached += 1
        if (sender := self._feeds.pop(corr, None) or self._calls.pop(corr, None)) is not None:
            sender.detach()

    async def _begin(
        self,
        corr: int,
        feed: Feed,
        opening: Coroutine[None, None, Opened],
        known: bytes | None = None,
    ) -> None:
        """Answer a request to read, and start its feed.

        A Pass frame gives the edge a MAC with which it may resume the stream without a token.
        `known` is the MAC that the edge has already, if any; an equal MAC is not sent again.
        """
        opened = await opening
        if self._feeds.get(corr) is feed:  # the edge has not detached meanwhile
            mac = self._service.keys.pass_for(opened.stream)
            if mac != known:
                self.send(encode(Pass(mac), corr))
            self.send(encode(opened, corr))
            feed.attach(opened.stream, opened.next_index, opened.first)

    async def _answer(self, corr: int, answering: Coroutine[None, None, Frame]) -> None:
        answer = await answering
        if self._carries_out(corr):
            self.send(encode(answer, corr))

    # ---- calls ----

    def _call(self, corr: int, call: C, handle: Callable[[C], Awaitable[ObjectResponse]]) -> None:
        """Start a Call, or refuse it if too many bytes of unanswered Calls are held.

        Reading from the edge is not paused instead, because credit and new streams that arrive
        after a Call must not wait for it.
        """
        self._check_free(corr)
        self._hold(len(call.body))
        run = CallRun(self, corr, call)
        self._calls[corr] = run
        self._spawn(corr, run.run(handle))

    def _hold(self, size: int) -> None:
        """Count the bytes of a request that waits for an object; raises Overloaded if too many do.

        `release` subtracts them.
        """
        if self._held_bytes and self._held_bytes + size > CALLS_HIGH_BYTES:
            raise self._overloaded("too many requests wait for their objects")
        self._held_bytes += size

    async def _change(self, frame: Cancel | Steer | Input | SwitchStages) -> Status | InputStored:
        """Carry out a request that changes a stream, and return the answer."""
        match frame:
            case Cancel():
                return await self._service.cancel(frame)
            case Steer():
                return await self._service.steer(frame)
            case SwitchStages():
                return await self._service.switch_stages(frame)
        self._hold(len(frame.data))
        try:
            return await self._service.input(frame)
        finally:
            self.release(len(frame.data))

    # ---- tasks and errors ----

    def _spawn(self, corr: int, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(self._guard(corr, work))
        self._tasks.add(task)
        self._carried_out[corr] = task
        task.add_done_callback(partial(self._done, corr))

    def _carries_out(self, corr: int) -> bool:
        """Return True if the current task may answer `corr`, which the edge has not detached."""
        return self._carried_out.get(corr) is asyncio.current_task()

    async def _guard(self, corr: int, work: Coroutine[None, None, None]) -> None:
        """Run the work of a request; if it fails, send the error as the request's answer."""
        try:
            await work
        except TailraceError as error:
            if self._carries_out(corr):
                self._fail(corr, error)
            if isinstance(error, LedgerFailed):
                self._fatal(error)

    def _done(self, corr: int, task: asyncio.Task[None]) -> None:
        """Forget a finished request; an internal error is logged and ends that request only."""
        self._tasks.discard(task)
        is_open = self._carried_out.get(corr) is task
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("request.failed", exc_info=fault)
            if is_open:
                self._fail(corr, TailraceError(INTERNAL_FAULT))
                is_open = False
        if is_open:
            del self._carried_out[corr]
            self._answers.discard(corr)
        else:
            self._detached -= 1

    def _fail(self, corr: int, error: TailraceError) -> None:
        # The error must follow the queued part of the answer, so it goes into the same queue.
        send = self.send_bulk if corr in self._calls else self.send
        self._detach(corr)
        send(encode(error_frame(error), corr))


def _other_schema() -> SchemaMismatch:
    return SchemaMismatch(
        "the first frame must be a Hello of this schema",
        hint=f"this origin has schema {SCHEMA_HASH.hex()}; run the same version at both ends",
    )


def leave_unsent_to_us(transport: asyncio.Transport) -> None:
    """Keep the kernel's buffer small, so that tokens do not wait there behind bulk data."""
    link = transport.get_extra_info("socket")
    if link is not None and link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_IN_KERNEL_BYTES)
