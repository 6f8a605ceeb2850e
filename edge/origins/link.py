"""The way to the origins for everything that the edge serves: who is asked, and who after that; and
one HTTP request's end of it.

A new request goes to the origin that `choice` names. When that one is lost, another origin of the
same ledger is asked for the rest, and where there is none, it itself when it is back. What an
origin refuses without having begun it, such as for want of room, the others are asked in turn.

A response takes all frames that are queued, sends them as one write, and takes again
when that write has drained; only then is credit renewed. A client that stalls therefore
costs at most a window of frames here, and the origin parks it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from tailrace.edge.origins.choice import PREFIX_CHARS, Wanted, choose
from tailrace.edge.origins.open_requests import OpenRequests
from tailrace.edge.origins.origin import Origin, now
from tailrace.edge.origins.relay import Route, Sink, route_of, under
from tailrace.edge.origins.watchers import Watchers
from tailrace.edge.server.flush import FlushBatch
from tailrace.edge.telemetry.request_metrics import current, note_error, note_stream, traced
from tailrace.edge.unread import UnreadDefault
from tailrace.ledger.errors import CallerError, Overloaded, TailraceError, TooLarge
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    LINK_CODEC,
    MAX_CALL_HEAD_BYTES,
    Answer,
    Body,
    BodyEnd,
    Call,
    Caller,
    Cancel,
    Credit,
    Frame,
    Heartbeat,
    Open,
    Opened,
    Resume,
    Status,
    Steer,
    StreamError,
    decode,
    encode,
    error_frame,
    tag_of,
    to_error,
)
from tailrace.ledger.links.transport import Credentials, LinkAddress
from tailrace.ledger.process.tasks import beside, first_of

LINK_TICK_S = 0.05
"""How late a deadline may be noticed, and how finely the heartbeats of clients are spread."""
MAX_LINK_BUFFER_BYTES = 8 << 20
"""Requests are refused while an origin leaves this much unread."""
MAX_HELD_BYTES = 64 << 20
"""Requests are refused while so many bytes of others wait for an answer, or for a link."""

NOTHING_SHOWN = Credentials("edge.origin")
KINDS = ("open", "read", "resume", "cancel", "steer", "call")
"""Of what clients ask."""


class Link:
    """`addresses` are those of origins, at least one; (host, port) is enough for plain TCP."""

    def __init__(
        self,
        *addresses: LinkAddress | tuple[str, int],
        credentials: Credentials = NOTHING_SHOWN,
        backoff: Backoff | None = None,
        batch: FlushBatch | None = None,
        open_requests: OpenRequests | None = None,
        unread: UnreadDefault | None = None,
    ) -> None:
        """`backoff` is how each origin is waited for that cannot be reached. Sinks may touch
        `batch` when they are delivered to: it is flushed when all of one read has been. `unread`
        holds for streams whose request says nothing of it."""
        self.batch = batch or FlushBatch()
        self.unread = unread or UnreadDefault()
        self._open_requests = open_requests or OpenRequests()
        self.origins = [
            Origin(
                LinkAddress(*address),
                self._flush,
                credentials,
                self.batch,
                None if backoff is None else replace(backoff),
                self._open_requests,
            )
            for address in addresses
        ]
        self.asked: Counter[str] = Counter(dict.fromkeys(KINDS, 0))  # by clients
        self._watchers = Watchers()
        self._closing: TailraceError | None = None

    @property
    def address(self) -> str:
        """Of the first origin that is connected, or else of the first."""
        return next((o.address for o in self.origins if o.usable), self.origins[0].address)

    @property
    def up(self) -> bool:
        """Whether an origin is connected."""
        return any(origin.usable for origin in self.origins)

    @property
    def heartbeat(self) -> Heartbeat:
        """The origins' last word on their readiness; without any link there is none."""
        heard = [o.relay.heartbeat for o in self.origins if o.usable and o.relay.heartbeat]
        if heard:
            return together(heard)
        places = ", ".join(origin.address for origin in self.origins)
        return Heartbeat(0, ready=False, reasons=(f"no link to the origin at {places}",))

    # ---- for views and sessions ----

    def ask(self, sink: Sink, corr: int, request: Frame, only: str | None = None) -> None:
        """Send a client's request to an origin; its answer, or a refusal, comes to the sink.

        Args:
            sink: takes the answer and the frames that follow it.
            corr: the client's correlation id of the request.
            request: the request.
            only: the address of the one origin to ask, even if it is not connected.
        """
        refusal = self._refusal()
        if refusal is None:
            self.asked[kind_of(request)] += 1
            route = route_of(sink, corr, request, now())
            # Sinks of tests and of embedders may not say where their client is.
            tenant = "" if (caller := caller_of(request)) is None else caller.tenant
            route.owner = self._open_requests.owner(getattr(sink, "address", ""), tenant)
            route.wanted = wanted_by(request) if only is None else Wanted(only=only)
            chosen = self._chosen(route) or self.origins[0]  # who waits there
            if (refusal := self._open_requests.refusal(route.owner)) is not None:
                pass
            elif chosen.usable and chosen.relay.is_full:
                refusal = Overloaded("too many streams are open at the origin")
            elif chosen.unsent_bytes > MAX_LINK_BUFFER_BYTES:
                refusal = Overloaded("the link to the origin is full")
            else:
                self._ask(chosen, route)
                self._flush()
        if refusal is not None:
            sink.deliver(encode(error_frame(refusal), corr))
            self.batch.flush()

    def credit(self, sink: Sink, corr: int, credit: Credit) -> None:
        """Give an origin credit for more frames; ignored if the stream has closed meanwhile."""
        for origin in self.origins:
            if origin.relay.credit(sink, corr, credit):
                break
        self._flush()

    def detach(self, sink: Sink, corr: int) -> None:
        """Ask for no more of a stream, which runs on; ignored if it has closed meanwhile."""
        for origin in self.origins:
            if origin.relay.detach(sink, corr):
                break
        self._flush()

    def watch(self, sink: Sink) -> None:
        """Deliver heartbeats to this sink too, and a StreamError at shutdown."""
        deliver(self._watchers.watch(sink))
        self._flush()

    def forget(self, sink: Sink) -> None:
        """The client has gone: detach its streams, which run on."""
        self._watchers.forget(sink)
        for origin in self.origins:
            origin.relay.forget(sink)
        self._flush()

    def transfer(self, sink: Sink, to: Sink) -> None:
        """Deliver to another sink what one has under way."""
        for origin in self.origins:
            origin.relay.transfer(sink, to)

    def left_by(self, sink: Sink) -> int:
        """Return how many requests a client has detached from that have no answer yet."""
        return sum(origin.relay.left_by(sink) for origin in self.origins)

    @property
    def route_count(self) -> int:
        """Requests that are under way."""
        return sum(origin.relay.route_count for origin in self.origins)

    def refuse_new(self, error: TailraceError) -> None:
        """Refuse what is asked from now on; what is under way goes on."""
        self._closing = error

    def refuse_all(self, error: TailraceError) -> None:
        """End every stream here with `error`, and refuse new ones with it."""
        self._closing = error
        for origin in self.origins:
            origin.relay.refuse_all(error)
        self._flush()
        for sink in self._watchers.all():
            sink.deliver(encode(error_frame(error)))
        self.batch.flush()

    def _refusal(self) -> TailraceError | None:
        if self._closing is not None:
            return self._closing
        if sum(origin.relay.held_bytes for origin in self.origins) > MAX_HELD_BYTES:
            return Overloaded("too many requests wait for the origin")
        return None

    # ---- who is asked ----

    def _chosen(self, route: Route) -> Origin | None:
        """None while there is nobody to ask who has not been."""
        at = now()
        candidates = [origin.candidate(at) for origin in self.origins]
        chosen = choose(candidates, route.wanted, route.tried, route.ledger)
        if chosen is None:
            return None
        return next(origin for origin in self.origins if origin.address == chosen.address)

    def _ask(self, origin: Origin, route: Route) -> None:
        origin.relay.adopt(route)
        origin.breaker.sent(now())
        if route.wanted.spreads:
            origin.opened += 1

    def _move(self) -> None:
        """Take what waits for an origin that is gone to another one that can go on with it."""
        for origin in self.origins:
            if not any(other.usable for other in self.origins if other is not origin):
                continue
            for route in origin.relay.waiting():
                if route.sent:  # or renewed: it is in that origin's ledger, if anywhere
                    route.ledger = origin.ledger
                other = self._chosen(route)
                if other is not None and other is not origin and other.usable:
                    origin.relay.release(route)
                    self._ask(other, route)

    def _ask_elsewhere(self, origin: Origin) -> None:
        """What this origin has refused, another one may take."""
        for route, raw in origin.relay.refused():
            _, error = decode(raw)
            assert isinstance(error, StreamError)
            # Who shares its ledger knows no other streams.
            same = origin.ledger if error.code == "unknown_stream" else None
            route.tried |= {o.address for o in self.origins if o is origin or o.ledger == same}
            other = self._chosen(route)
            if other is None or not other.usable:
                route.sink.deliver(raw)
            else:
                route.sent = False
                self._ask(other, route)

    def _flush(self) -> None:
        """Carry out what the relays have decided."""
        if any(origin.is_news for origin in self.origins):
            for origin in self.origins:
                origin.is_news = False
            self._move()
            deliver(self._watchers.heard(self.heartbeat if self.up else None))
        for origin in self.origins:
            self._ask_elsewhere(origin)
        for origin in self.origins:
            origin.send()
        self.batch.flush()

    # ---- its life ----

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the links up, as far as the origins let it, while the block runs."""
        async with beside(origin.connect_forever() for origin in self.origins):
            self._tick()
            try:
                yield
            finally:
                self._ticking.cancel()

    def _tick(self) -> None:
        # A timer's callback: a task that sleeps turns the event loop twice as often.
        self._ticking = asyncio.get_running_loop().call_later(LINK_TICK_S, self._tick)
        at = now()
        for origin in self.origins:
            origin.relay.expire(at)
            origin.look(at)
        self._flush()
        deliver(self._watchers.beat(at))
        self.batch.flush()


def deliver(frames: Iterable[tuple[Sink, bytes]]) -> None:
    for sink, raw in frames:
        sink.deliver(raw)


def together(heard: list[Heartbeat]) -> Heartbeat:
    """What clients are told of several origins: ready if one is."""
    ready = [heartbeat for heartbeat in heard if heartbeat.ready]
    first = (ready or heard)[0]
    models = {model: None for heartbeat in heard for model in heartbeat.models}
    devices = {device: None for heartbeat in heard for device in heartbeat.devices}
    reasons = {} if ready else {reason: None for each in heard for reason in each.reasons}
    return Heartbeat(first.clock_ms, first.ready, tuple(reasons), tuple(models), tuple(devices))


def kind_of(request: Frame) -> str:
    """For those who count: a Resume is one only where a reader has something already."""
    if isinstance(request, Resume):
        return "read" if request.after is None else "resume"
    return type(request).__name__.lower()


def caller_of(request: Frame) -> Caller | None:
    """Return the client that a request is made for, as far as the edge knows it."""
    match request:
        case Open() | Resume() | Cancel() | Steer() | Call():
            return request.caller
    return None


def wanted_by(request: Frame) -> Wanted:
    """What `choice` needs to know of a request."""
    match request:
        case Open():
            begins = request.prompt or "".join(f"{m.role}\n{m.content}\n" for m in request.messages)
            prefix = begins[:PREFIX_CHARS]
            key = f"{request.model}\n{prefix}".encode(errors="replace")
            has_prefix = len(prefix) == PREFIX_CHARS
            return Wanted(key if has_prefix else None, request.model, spreads=True)
        case Resume() | Cancel() | Steer():
            return Wanted(request.stream)
        case Call():
            return Wanted(f"{request.object} {request.name}".encode(errors="replace"), named=True)
    return Wanted()


WINDOW_FRAMES = 128
"""Frames in flight per response."""
WINDOW_BYTES = 8 << 10
"""Bytes of frames in flight per response. One frame may exceed them."""
WINDOW_BODIES = 16
"""Body frames in flight per response, of at most 16 KiB each."""
WINDOW_BODY_BYTES = 128 << 10
"""Bytes of them."""
MAX_WHOLE_BYTES = 8 << 20
"""Of an object's answer that is taken whole."""
CORR = 0
"""One HTTP request, one corr: nothing else rides on this sink."""

A = TypeVar("A", bound=Frame)
R = TypeVar("R", bound=Open | Resume)


def credited(request: R, frames: int = WINDOW_FRAMES) -> R:
    """The request, with credit for what a response may have in flight."""
    return replace(request, credit=frames, credit_bytes=WINDOW_BYTES)


def link_of(request: Request) -> Link:
    """The way to the origins of the edge that a request came to."""
    link: Link = request.app.state.link
    return link


class Reader:
    """A `Sink` for one request; `close` it when the client has its answer or has gone.

    With `only`, the origin of this address is asked, and no other.
    """

    def __init__(self, link: Link, only: str | None = None) -> None:
        self.link = link
        self._only = only
        metrics = current.get()
        self.protocol = "other" if metrics is None else metrics.protocol
        self.address = "" if metrics is None else metrics.address
        self._queue: list[bytes] = []
        self._filled = asyncio.Event()
        self._window = Window(0, 0)
        self._most_bytes = 0

    def deliver(self, raw: bytes) -> None:
        self._queue.append(raw)
        self._filled.set()

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        for raw in under(run, corr):
            self.deliver(raw)

    def close(self) -> None:
        """Detach, if the answer is not whole: a stream runs on without this reader."""
        self.link.forget(self)

    # ---- requests: each waits for its answer, and raises what a StreamError says ----

    def hand_over(self, sink: Sink) -> tuple[list[bytes], Window]:
        """Let another sink take what follows; return the frames that wait, and the window."""
        self.link.transfer(self, sink)
        frames, self._queue = self._queue, []
        return frames, self._window

    async def open(self, request: Open | Resume, frames: int = WINDOW_FRAMES) -> Opened:
        """The stream's frames follow, at first at most so many."""
        request = credited(self.link.unread.applied(request), frames)
        self._window = Window.starting(
            request.start, request.credit, WINDOW_FRAMES, request.credit_bytes
        )
        self._most_bytes = WINDOW_BYTES
        return await self._ask(traced(request), Opened)

    async def ask(self, request: Cancel | Steer) -> Status:
        return await self._ask(request, Status)

    async def call(self, call: Call) -> Answer:
        """The pieces of its body follow."""
        call = replace(call, credit=WINDOW_BODIES, credit_bytes=WINDOW_BODY_BYTES)
        if len(LINK_CODEC.encode(replace(call, body=b""))) > MAX_CALL_HEAD_BYTES:
            raise CallerError(
                "the request's headers are too large",
                code="headers_too_large",
                status=431,
                hint=f"at most {MAX_CALL_HEAD_BYTES} bytes with the URL",
            )
        self._window = Window.starting(0, call.credit, WINDOW_BODIES, call.credit_bytes)
        self._most_bytes = WINDOW_BODY_BYTES
        return await self._ask(call, Answer)

    async def _ask(self, request: Frame, kind: type[A]) -> A:
        self.link.ask(self, CORR, request, self._only)
        await self._filled.wait()
        _, answer = decode(self._queue.pop(0))
        self._settle()
        if isinstance(answer, StreamError):
            raise to_error(answer)
        assert isinstance(answer, kind), answer
        if isinstance(answer, Opened | Status):
            note_stream(answer.stream)
        return answer

    # ---- what follows: taking again says that what was taken last is with the client ----

    async def wait(self, timeout_s: float) -> bool:
        """Whether there are frames to take, after at most `timeout_s` seconds."""
        if not self._queue:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
            except TimeoutError:
                return False
        return True

    async def take(self, timeout_s: float | None = None) -> list[bytes]:
        """All queued frames of a stream, at least one; [] when `timeout_s` seconds bring none."""
        self._renew_credit()
        if timeout_s is None:
            await self._filled.wait()
        elif not await self.wait(timeout_s):
            return []
        frames, self._queue = self._queue, []
        self._settle()
        if tag_of(frames[-1]) == StreamError.tag:
            _, error = decode(frames[-1])
            assert isinstance(error, StreamError)
            note_error(error.code)
        # All of them are logged, but for one that closes the stream: no credit follows it.
        self._window.passed(len(frames), sum(map(len, frames)))
        return frames

    async def take_piece(self) -> tuple[bytes, bool]:
        """What has come of an answer's body, at least a frame, and whether that was its end.

        Raises what a StreamError says.
        """
        self._renew_credit()
        await self._filled.wait()
        parts: list[bytes] = []
        while self._queue:
            _, frame = decode(self._queue[0])
            if isinstance(frame, Body):
                parts.append(frame.data)
                self._window.passed(1, len(self._queue[0]))
            elif isinstance(frame, BodyEnd):
                return b"".join(parts), True
            elif parts:
                break  # what came before the error is the client's
            else:
                assert isinstance(frame, StreamError), frame
                raise to_error(frame)
            del self._queue[0]
        self._settle()
        return b"".join(parts), False

    def _renew_credit(self) -> None:
        if self._window.renew(self._most_bytes):
            credit = Credit(self._window.limit, self._window.limit_bytes)
            self.link.credit(self, CORR, credit)

    def _settle(self) -> None:
        if not self._queue:
            self._filled.clear()


async def whole_answer(link: Link, call: Call, only: str | None = None) -> tuple[int, bytes]:
    """The status and the body of an object's answer; raises what is said instead of one."""
    body, ended = bytearray(), False
    with closing(Reader(link, only)) as reader:
        answer = await reader.call(call)
        while not ended:
            data, ended = await reader.take_piece()
            body += data
            if len(body) > MAX_WHOLE_BYTES:
                raise TooLarge("the origin's answer is too large")
    return answer.status, bytes(body)


T = TypeVar("T")


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, if the client goes.

    The request's body must have been read: what `receive` still gives is thrown away.
    """
    return cast(T, await first_of(work, _disconnect(receive)))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
