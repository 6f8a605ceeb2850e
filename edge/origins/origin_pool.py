"""The links to all origins: which origin gets a request, and which one continues it after a loss.

`load_balancing` chooses the origin of a new request. When an origin is lost, another origin with
the same ledger continues its streams; if there is no such origin, the streams wait until the lost
one is back. If an origin refuses a request that it has not begun, for example because it is full,
the other origins are asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from tailrace.edge.flush import FlushBatch
from tailrace.edge.origins.load_balancing import PREFIX_CHARS, Needs, choose
from tailrace.edge.origins.open_requests import OpenRequests
from tailrace.edge.origins.origin import Origin, now
from tailrace.edge.origins.route import Route, route_of
from tailrace.edge.origins.sink import Sink
from tailrace.edge.origins.watchers import Watchers
from tailrace.edge.unread import UnreadDefault
from tailrace.ledger.errors import Overloaded, TailraceError
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.frame import (
    Call,
    Caller,
    Cancel,
    Credit,
    Frame,
    Heartbeat,
    Input,
    Open,
    Resume,
    Steer,
    StreamError,
    SwitchStages,
    decode,
    encode,
    error_frame,
)
from tailrace.ledger.links.cached_tokens import CACHED_TOKENS
from tailrace.ledger.links.token_count import TOKEN_COUNT
from tailrace.ledger.links.transport import Credentials, LinkAddress
from tailrace.ledger.process.tasks import background

LINK_TICK_S = 0.05
"""Interval between two checks of deadlines, in seconds. Each time, a group of clients gets
heartbeats."""
MAX_LINK_BUFFER_BYTES = 8 << 20
"""Maximum unsent bytes for one origin; with more, new requests for it are refused."""
MAX_HELD_BYTES = 64 << 20
"""Maximum total size of unanswered requests, in bytes; with more, new requests are refused."""

NO_CREDENTIALS = Credentials("edge.origin")
KINDS = ("open", "read", "resume", "cancel", "steer", "call")
"""Kinds of requests that are counted in the metrics."""


class OriginPool:
    """The links to the origins of an edge."""

    def __init__(
        self,
        *addresses: LinkAddress | tuple[str, int],
        credentials: Credentials = NO_CREDENTIALS,
        backoff: Backoff | None = None,
        batch: FlushBatch | None = None,
        open_requests: OpenRequests | None = None,
        unread: UnreadDefault | None = None,
    ) -> None:
        """Make the links, which `running` connects.

        Args:
            addresses: addresses of the origins, at least one; (host, port) means plain TCP.
            credentials: certificates and secret with which edge and origins identify themselves.
            backoff: delays between attempts to connect to an origin.
            batch: collects the sinks that have output, and is flushed after each read of a link.
            open_requests: counts the open requests of clients.
            unread: default policy for streams that nobody reads.
        """
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
        # Number of requests by clients of each kind.
        self.asked: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._watchers = Watchers()
        self._closing: TailraceError | None = None

    @property
    def address(self) -> str:
        """The address of the first connected origin; of the first origin if none is connected."""
        return next((o.address for o in self.origins if o.usable), self.origins[0].address)

    @property
    def up(self) -> bool:
        """True while an origin is connected."""
        return any(origin.usable for origin in self.origins)

    @property
    def heartbeat(self) -> Heartbeat:
        """The merged Heartbeat of the connected origins; not ready if none is connected."""
        heard = [o.relay.heartbeat for o in self.origins if o.usable and o.relay.heartbeat]
        if heard:
            return together(heard)
        places = ", ".join(origin.address for origin in self.origins)
        return Heartbeat(0, ready=False, reasons=(f"no link to the origin at {places}",))

    # ---- requests of clients ----

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
            # `Sink` does not require an `address`: the sinks of tests and of other programs that
            # embed this edge may have none.
            tenant = "" if (caller := caller_of(request)) is None else caller.tenant
            route.owner = self._open_requests.owner(getattr(sink, "address", ""), tenant)
            route.needs = needs_of(request) if only is None else Needs(only=only)
            # Without a candidate, the request waits for the link to the first origin.
            chosen = self._chosen(route) or self.origins[0]
            if (refusal := self._open_requests.refusal(route.owner)) is not None:
                pass
            elif chosen.usable and chosen.relay.is_full:
                refusal = Overloaded("too many streams are open at the origin")
            elif chosen.unsent_bytes > MAX_LINK_BUFFER_BYTES:
                refusal = Overloaded("the link to the origin is full")
            else:
                chosen.ask(route)
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
        """Stop reading a stream, which keeps running; ignored if the stream has closed already."""
        for origin in self.origins:
            if origin.relay.detach(sink, corr):
                break
        self._flush()

    def watch(self, sink: Sink) -> None:
        """Deliver heartbeats to this sink, and a StreamError at shutdown."""
        deliver(self._watchers.watch(sink))
        self._flush()

    def forget(self, sink: Sink) -> None:
        """Detach a client that has left from all its streams, which keep running."""
        self._watchers.forget(sink)
        for origin in self.origins:
            origin.relay.forget(sink)
        self._flush()

    def transfer(self, sink: Sink, to: Sink) -> None:
        """Deliver the frames of one sink's open requests to another sink from now on."""
        for origin in self.origins:
            origin.relay.transfer(sink, to)

    def left_by(self, sink: Sink) -> int:
        """Return the number of unanswered requests that a client has detached from."""
        return sum(origin.relay.left_by(sink) for origin in self.origins)

    @property
    def route_count(self) -> int:
        """The number of open requests."""
        return sum(origin.relay.route_count for origin in self.origins)

    def refuse_new(self, error: TailraceError) -> None:
        """Refuse new requests with `error`; open ones continue."""
        self._closing = error

    def refuse_all(self, error: TailraceError) -> None:
        """End every stream on this edge with `error`, and refuse new requests with it."""
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

    # ---- choice of an origin ----

    def _chosen(self, route: Route) -> Origin | None:
        """Return the origin to ask; None if every candidate has been tried."""
        at = now()
        candidates = [origin.candidate(at) for origin in self.origins]
        chosen = choose(candidates, route.needs, route.tried, route.ledger)
        if chosen is None:
            return None
        return next(origin for origin in self.origins if origin.address == chosen.address)

    def _move(self) -> None:
        """Move requests that wait for a lost origin to another origin that can continue them."""
        for origin in self.origins:
            if not any(other.usable for other in self.origins if other is not origin):
                continue
            for route in origin.relay.waiting():
                # A sent request may have begun a stream, which only origins with the lost origin's
                # ledger can continue.
                if route.sent:
                    route.ledger = origin.ledger
                other = self._chosen(route)
                if other is not None and other is not origin and other.usable:
                    origin.relay.release(route)
                    other.ask(route)

    def _ask_elsewhere(self, origin: Origin) -> None:
        """Send requests that this origin has refused to other origins."""
        for route, raw in origin.relay.refused():
            _, error = decode(raw)
            assert isinstance(error, StreamError)
            # Origins that share the refusing origin's ledger know the same streams.
            same = origin.ledger if error.code == "unknown_stream" else None
            route.tried |= {o.address for o in self.origins if o is origin or o.ledger == same}
            other = self._chosen(route)
            if other is None or not other.usable:
                route.sink.deliver(raw)
            else:
                route.sent = False
                other.ask(route)

    def _flush(self) -> None:
        """Send the frames of all relays, and move requests that a relay cannot serve to another."""
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

    # ---- start and end ----

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the links connected while the block runs."""
        async with background(origin.connect_forever() for origin in self.origins):
            self._tick()
            try:
                yield
            finally:
                self._ticking.cancel()

    def _tick(self) -> None:
        # A timer and not a task, which would wake the event loop twice per interval.
        self._ticking = asyncio.get_running_loop().call_later(LINK_TICK_S, self._tick)
        at = now()
        for origin in self.origins:
            origin.relay.expire(at)
            origin.look(at)
        self._flush()
        deliver(self._watchers.beat(at))
        self.batch.flush()


def deliver(frames: Iterable[tuple[Sink, bytes]]) -> None:
    """Deliver each frame to its sink."""
    for sink, raw in frames:
        sink.deliver(raw)


def together(heard: list[Heartbeat]) -> Heartbeat:
    """Merge the heartbeats of several origins; the result is ready if one of them is."""
    ready = [heartbeat for heartbeat in heard if heartbeat.ready]
    first = (ready or heard)[0]
    models = {model: None for heartbeat in heard for model in heartbeat.models}
    devices = {device: None for heartbeat in heard for device in heartbeat.devices}
    reasons = {} if ready else {reason: None for each in heard for reason in each.reasons}
    return Heartbeat(first.clock_ms, first.ready, tuple(reasons), tuple(models), tuple(devices))


def kind_of(request: Frame) -> str:
    """Return the kind of a request in the metrics; a Resume without a position is a `read`."""
    if isinstance(request, Resume):
        return "read" if request.after is None else "resume"
    return type(request).__name__.lower()


def caller_of(request: Frame) -> Caller | None:
    """Return the client that a request is made for, as far as the edge knows it."""
    match request:
        case Open() | Resume() | Cancel() | Steer() | Input() | SwitchStages() | Call():
            return request.caller
    return None


def needs_of(request: Frame) -> Needs:
    """Return what load balancing needs to know of a request."""
    match request:
        case Open(branch=branch) if branch is not None:
            return Needs(branch.stream)
        case Open():
            begins = request.prompt or "".join(f"{m.role}\n{m.content}\n" for m in request.messages)
            prefix = begins[:PREFIX_CHARS]
            key = f"{request.model}\n{prefix}".encode(errors="replace")
            has_prefix = len(prefix) == PREFIX_CHARS
            return Needs(key if has_prefix else None, request.model, spreads=True)
        case Resume() | Cancel() | Steer() | Input() | SwitchStages():
            return Needs(request.stream)
        case Call() if request.object == TOKEN_COUNT:
            return Needs(model=request.name, spreads=True)
        case Call() if request.object == CACHED_TOKENS:
            return Needs(bytes.fromhex(request.name))
        case Call():
            return Needs(f"{request.object} {request.name}".encode(errors="replace"), named=True)
    return Needs()
