"""The way to the origins for everything that the edge serves: who is asked, and who after that.

A new request goes to the origin that `choice` names. When that one is lost, another origin of the
same ledger is asked for the rest, and where there is none, it itself when it is back. What an
origin refuses without having begun it, such as for want of room, the others are asked in turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

from edge.origins.choice import PREFIX_CHARS, Wanted, choose
from edge.origins.origin import Origin, now
from edge.origins.relay import RETRY_AFTER_MS, Route, Sink, route_of, spread
from edge.origins.watchers import Watchers
from edge.server.outlet import Turn
from ledger.backoff import Backoff, spread_ms
from ledger.dial import Credentials, LinkAddress
from ledger.errors import Overloaded, TailraceError
from ledger.frame import (
    LINK_CODEC,
    Call,
    Cancel,
    Credit,
    Detach,
    Frame,
    Heartbeat,
    Open,
    Resume,
    Steer,
    StreamError,
    corr_of,
    decode,
    encode,
    error_frame,
    tag_of,
)
from ledger.tasks import beside

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
        turn: Turn | None = None,
    ) -> None:
        """`backoff` is how each origin is waited for that cannot be reached. Sinks may touch
        `turn` when they are delivered to: it is flushed when all of one read has been."""
        self._turn = turn or Turn()
        self.origins = [
            Origin(
                LinkAddress(*address),
                self._flush,
                credentials,
                self._turn,
                None if backoff is None else replace(backoff),
            )
            for address in addresses
        ]
        self.asked: Counter[str] = Counter(dict.fromkeys(KINDS, 0))  # by clients
        self._watchers = Watchers()
        self._random = Random()
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

    @staticmethod
    def now() -> float:
        return now()

    # ---- for views and sessions ----

    def submit(self, sink: Sink, raw: bytes, only: str | None = None) -> None:
        """Send one client frame; every answer, a refusal too, comes through `deliver`.

        `only` is the address of the one origin that is asked, whatever becomes of it.
        """
        if tag_of(raw) in (Credit.tag, Detach.tag):
            for origin in self.origins:
                if origin.relay.has(sink, corr_of(raw)):
                    origin.relay.submit(sink, raw)
                    break
            self._flush()
            return
        refusal = self._refusal()
        if refusal is not None:
            sink.deliver(encode(error_frame(refusal), corr_of(raw)))
            self._turn.flush()
            return
        _, request = LINK_CODEC.decode(raw)
        self.asked[kind_of(request)] += 1
        route = route_of(sink, raw, request, now())
        route.wanted = wanted_by(request) if only is None else Wanted(only=only)
        chosen = self._chosen(route) or self.origins[0]  # who waits there
        if chosen.usable and chosen.relay.is_full:
            refusal = self._overloaded("too many streams are open at the origin")
        elif chosen.unsent_bytes > MAX_LINK_BUFFER_BYTES:
            refusal = self._overloaded("the link to the origin is full")
        if refusal is not None:
            sink.deliver(encode(error_frame(refusal), corr_of(raw)))
            self._turn.flush()
            return
        self._ask(chosen, route)
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
            sink.deliver(encode(error_frame(spread(error, self._random))))
        self._turn.flush()

    def _refusal(self) -> TailraceError | None:
        if self._closing is not None:
            return spread(self._closing, self._random)
        if sum(origin.relay.held_bytes for origin in self.origins) > MAX_HELD_BYTES:
            return self._overloaded("too many requests wait for the origin")
        return None

    def _overloaded(self, message: str) -> Overloaded:
        return Overloaded(message, retry_after_ms=spread_ms(RETRY_AFTER_MS, self._random))

    # ---- who is asked ----

    def _chosen(self, route: Route) -> Origin | None:
        """None while there is nobody to ask who has not been."""
        at = now()
        candidates = [origin.candidate(at) for origin in self.origins]
        chosen = choose(candidates, route.wanted, route.tried, route.ledger)
        return None if chosen is None else self._by_address(chosen.address)

    def _by_address(self, address: str) -> Origin:
        return next(origin for origin in self.origins if origin.address == address)

    def _ask(self, origin: Origin, route: Route) -> None:
        origin.relay.adopt(route)
        origin.breaker.asked(now())
        if route.wanted.spreads:
            origin.opened += 1

    def _move(self) -> None:
        """Take what waits for an origin that is gone to another one that can go on with it."""
        for origin in self.origins:
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
        self._turn.flush()

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
        self._turn.flush()


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
