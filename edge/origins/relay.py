"""The table of the origin link: which client's stream rides on which corr of the link.

Sans-I/O: raw frames in, raw frames out, the time given by the caller. One link carries the
streams of all clients of this edge. Each gets a corr of its own there (a route); a frame
that passes only has its corr patched, its payload is not decoded.

When the link is lost the table stays. On the next link every route is asked for again from
the frame after the last one that passed, so that a client sees an origin's restart as a
pause. Only then is the request that a route holds on to decoded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from random import Random
from typing import Protocol

from ledger.backoff import spread_ms
from ledger.errors import FrameError, OriginUnreachable, SchemaMismatch, TailraceError, Unauthorized
from ledger.frame import (
    CLOSING,
    LINK_CODEC,
    LOGGED,
    SAFE_METHODS,
    SCHEMA_HASH,
    Answer,
    Call,
    Credit,
    Detach,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Resume,
    Steer,
    StreamError,
    corr_of,
    decode,
    encode,
    error_frame,
    index_of,
    tag_of,
    to_error,
    with_corr,
)
from ledger.version import software

CONNECT_PATIENCE_S = 2.0
"""How long a new request waits for a link that is down."""
ORIGIN_PATIENCE_S = 30.0
"""How long a stream that is under way waits for a lost link to come back."""
HEARTBEAT_EVERY_S = 4.0
"""A client that only watches gets the origin's last Heartbeat so often, one client after another:
thousands that got one at the same moment would have all others wait. It is owed one every 5 s."""
RETRY_AFTER_MS = 1000
"""What a client is told to wait at least that finds the link down."""
MAX_CORR = 2**32 - 1
CHANGES = (Call.tag, Steer.tag)
"""Requests that are carried out once for each time that they are sent."""


class Sink(Protocol):
    """Where the frames for one client go: an HTTP response, a WebSocket session."""

    def deliver(self, raw: bytes) -> None:
        """Take one raw frame under the client's corr; must not block and not raise."""


class LinkState(Enum):
    DOWN = "down"
    GREETING = "greeting"  # connected; the origin's Hello is awaited
    UP = "up"


@dataclass(slots=True, eq=False)
class Route:
    """One request of one client. All frames are raw and under the link corr."""

    sink: Sink
    client_corr: int
    link_corr: int
    request: bytes
    deadline: float | None  # when to give up unless the link is up by then
    sent: bool = False  # the request has been on a link
    opened: bytes | None = None
    passed: int = 0  # logged frames
    passed_bytes: int = 0  # of them
    passed_before: int = 0  # bytes that had passed when it was asked for again
    credit: bytes | None = None
    renewed: bool = False  # asked for again; frames that have passed may come once more
    tokenless: bool = False  # its token has lost its worth since the stream was opened
    answered: bool = False  # the Answer to a Call has passed: it cannot be asked for again
    held_bytes: int = 0  # of a Call without an answer


class Relay:
    """Give it what happens; then take `frames_to_send` and `frames_to_deliver`."""

    def __init__(self, last_corr: int = 0, random: Random | None = None) -> None:
        self.state = LinkState.DOWN
        self.heartbeat: Heartbeat | None = None
        self._routes: dict[int, Route] = {}
        self._by_client: dict[Sink, dict[int, Route]] = {}
        self._watchers: dict[Sink, None] = {}  # who has had no Heartbeat for longest comes first
        self._beats = 0.0  # how many watchers are owed the next one
        self._beat_at: float | None = None
        self._last_corr = last_corr
        self._random = random or Random()
        self._held_bytes = 0
        self._to_send: list[bytes] = []
        self._to_deliver: list[tuple[Sink, bytes]] = []

    @property
    def route_count(self) -> int:
        return len(self._routes)

    @property
    def held_bytes(self) -> int:
        """Bytes of Calls that have no answer yet."""
        return self._held_bytes

    # ---- what is to be done ----

    def frames_to_send(self) -> list[bytes]:
        """Frames for the origin since the last call."""
        frames, self._to_send = self._to_send, []
        return frames

    def frames_to_deliver(self) -> list[tuple[Sink, bytes]]:
        """Frames for clients since the last call."""
        frames, self._to_deliver = self._to_deliver, []
        return frames

    # ---- what the link does ----

    def connected(self) -> None:
        """A new connection to the origin stands; the requests follow its Hello."""
        self.state = LinkState.GREETING
        self._to_send = [encode(Hello(SCHEMA_HASH, software("edge")))]

    def disconnected(self, now: float) -> None:
        """The link is gone: what can be asked for again waits, the rest ends here."""
        self.state = LinkState.DOWN
        self.heartbeat = self._beat_at = None
        self._to_send.clear()
        for route in list(self._routes.values()):
            if not route.sent:
                continue
            if can_renew(route):
                if route.deadline is None:
                    route.deadline = now + ORIGIN_PATIENCE_S
            else:
                lost = unreachable("the link to the origin was lost", self._random)
                self._fail(route, end_of(route, lost))

    def receive(self, frames: Iterable[bytes]) -> None:
        """Whole raw frames from the origin.

        Raises TailraceError when the origin breaks or ends the connection; it is to be
        closed then.
        """
        routes = self._routes
        deliver = self._to_deliver.append
        for raw in frames:
            corr = corr_of(raw)
            if corr == 0 or self.state is not LinkState.UP:
                self._receive_for_link(raw)
                continue
            route = routes.get(corr)
            if route is None:
                continue  # detached while the frame was on its way
            tag = tag_of(raw)
            if tag in LOGGED:
                if route.renewed:
                    if has_passed(route, raw):
                        continue
                    route.renewed = False
                route.passed += 1
                route.passed_bytes += len(raw)
            elif tag == Opened.tag:
                if route.opened is not None:
                    continue  # the answer to a renewal: the client has had its own
                route.opened = raw
            elif tag == Answer.tag:
                route.answered = True
                self._let_go(route)
            if tag in CLOSING:
                if self._goes_on_without_token(route, raw):
                    continue
                self._drop(route)
            deliver((route.sink, with_corr(raw, route.client_corr)))

    def _receive_for_link(self, raw: bytes) -> None:
        """A frame on corr 0, or any frame before the origin's Hello."""
        _, frame = decode(raw)
        if isinstance(frame, StreamError):
            raise to_error(frame)
        if isinstance(frame, Hello) and self.state is LinkState.GREETING:
            self._greeted(frame)
        elif isinstance(frame, Heartbeat) and self.state is LinkState.UP:
            last, self.heartbeat = self.heartbeat, frame
            if last is None or (last.ready, last.reasons) != (frame.ready, frame.reasons):
                self._to_deliver.extend((sink, raw) for sink in self._watchers)
        else:
            name = type(frame).__name__
            raise FrameError(f"{name} is out of place on the link", field="tag", offset=4)

    def _goes_on_without_token(self, route: Route, raw: bytes) -> bool:
        """Whether `raw` refuses the token of a renewal; it is asked for without one then.

        The token was good when the stream was opened here. That it no longer is, as after a step of
        the origin's clock, is no reason to break a body off that is under way.
        """
        if tag_of(raw) != StreamError.tag or not route.renewed or route.tokenless:
            return False
        _, error = decode(raw)
        if not isinstance(error, StreamError) or error.code != Unauthorized.code:
            return False
        route.tokenless = True
        self._ask(route)
        return True

    def _greeted(self, hello: Hello) -> None:
        if hello.schema != SCHEMA_HASH:
            raise SchemaMismatch(
                f"the origin ({hello.software}) speaks schema {hello.schema.hex()}",
                hint=f"this edge speaks {SCHEMA_HASH.hex()}",
            )
        self.state = LinkState.UP
        for route in self._routes.values():
            self._ask(route)

    # ---- what clients do ----

    def submit(self, sink: Sink, raw: bytes, now: float) -> None:
        """One raw client frame under the client's corr, valid for that client's session."""
        tag = tag_of(raw)
        client_corr = corr_of(raw)
        if tag == Credit.tag:
            self._submit_credit(self._route(sink, client_corr), raw)
        elif tag == Detach.tag:
            self._detach(self._route(sink, client_corr))
        else:
            self._submit_request(sink, client_corr, raw, now)

    def _submit_request(self, sink: Sink, client_corr: int, raw: bytes, now: float) -> None:
        link_corr = self._free_corr()
        request = with_corr(raw, link_corr)
        route = Route(sink, client_corr, link_corr, request, now + CONNECT_PATIENCE_S)
        self._routes[link_corr] = route
        if tag_of(raw) == Call.tag:
            route.held_bytes = len(request)
            self._held_bytes += route.held_bytes
        self._by_client.setdefault(sink, {})[client_corr] = route
        if self.state is LinkState.UP:
            self._ask(route)

    def _submit_credit(self, route: Route | None, raw: bytes) -> None:
        if route is None:
            return  # the stream has closed while the credit was on its way
        route.credit = with_corr(raw, route.link_corr)
        if self.state is LinkState.UP:
            self._to_send.append(credit_on_link(route))

    def _detach(self, route: Route | None) -> None:
        if route is None:
            return
        self._drop(route)
        if self.state is LinkState.UP:
            self._to_send.append(encode(Detach(), route.link_corr))

    def forget(self, sink: Sink) -> None:
        """The client has gone: detach all that is its own. Never a cancel."""
        self._watchers.pop(sink, None)
        for route in list(self._by_client.get(sink, {}).values()):
            self._detach(route)

    def watch(self, sink: Sink) -> None:
        """Deliver the origin's heartbeats, beginning with the last, to this sink too."""
        self._watchers[sink] = None
        if self.heartbeat is not None:
            self._to_deliver.append((sink, encode(self.heartbeat)))

    # ---- what time does ----

    def expire(self, now: float) -> None:
        """Give up on the routes that have waited for the link for too long."""
        if self.state is LinkState.UP:
            return
        late = [r for r in self._routes.values() if r.deadline is not None and r.deadline <= now]
        for route in late:
            self._fail(route, unreachable("this edge has no link to an origin", self._random))

    def beat(self, now: float) -> None:
        """Deliver the last Heartbeat to those watchers whose turn it is by now."""
        if self.heartbeat is None:
            return
        passed = 0.0 if self._beat_at is None else now - self._beat_at
        self._beat_at = now
        self._beats += len(self._watchers) * min(passed / HEARTBEAT_EVERY_S, 1.0)
        turns = list(islice(self._watchers, int(self._beats)))
        self._beats -= len(turns)
        raw = encode(self.heartbeat)
        for sink in turns:
            del self._watchers[sink]
            self._watchers[sink] = None
            self._to_deliver.append((sink, raw))

    def refuse_all(self, error: TailraceError) -> None:
        """End every route and tell every watcher: the edge itself is going away."""
        for route in list(self._routes.values()):
            if self.state is LinkState.UP:
                self._to_send.append(encode(Detach(), route.link_corr))
            self._fail(route, end_of(route, error))
        farewell = encode(error_frame(error))
        self._to_deliver.extend((sink, farewell) for sink in self._watchers)

    # ---- routes ----

    def _free_corr(self) -> int:
        corr = self._last_corr
        while True:
            corr = corr % MAX_CORR + 1
            if corr not in self._routes:
                self._last_corr = corr
                return corr

    def _ask(self, route: Route) -> None:
        """Send a route's request, or on a later link what continues it."""
        route.deadline = None
        if route.opened is not None:
            route.renewed = True
            route.passed_before = route.passed_bytes
            self._to_send.append(encode(renewal(route), route.link_corr))
        else:
            self._to_send.append(route.request)
            if route.credit is not None:
                self._to_send.append(route.credit)
        route.sent = True

    def _route(self, sink: Sink, client_corr: int) -> Route | None:
        return self._by_client.get(sink, {}).get(client_corr)

    def _drop(self, route: Route) -> None:
        del self._routes[route.link_corr]
        self._let_go(route)
        routes = self._by_client[route.sink]
        del routes[route.client_corr]
        if not routes:
            del self._by_client[route.sink]

    def _let_go(self, route: Route) -> None:
        """Forget a Call that will not be sent again: it may hold a large body."""
        if route.held_bytes:
            self._held_bytes -= route.held_bytes
            route.request, route.held_bytes = b"", 0

    def _fail(self, route: Route, error: TailraceError) -> None:
        self._drop(route)
        raw = encode(error_frame(error), route.client_corr)
        self._to_deliver.append((route.sink, raw))


def unreachable(message: str, random: Random) -> OriginUnreachable:
    return OriginUnreachable(message, retry_after_ms=spread_ms(RETRY_AFTER_MS, random))


def end_of(route: Route, error: TailraceError) -> TailraceError:
    """What a client is told whose route ends here: a change may have been made all the same."""
    if not route.sent or route.answered or tag_of(route.request) not in CHANGES:
        return error
    if can_renew(route):
        return error
    return OriginUnreachable(
        f"{error.message}: whether the request was carried out is not known",
        code="outcome_unknown",
        hint="look first, or send it again as it is if it carries a Producer-Seq",
        retry_after_ms=error.retry_after_ms,
    )


# ---- picking up after a lost link ----


def can_renew(route: Route) -> bool:
    """Whether asking for the route again cannot start or do anything twice."""
    if route.opened is not None:
        return True
    if route.answered:
        return False  # how much of the body has passed is the client's to know
    _, request = LINK_CODEC.decode(route.request)
    if isinstance(request, Call):
        return request.method in SAFE_METHODS
    if isinstance(request, Open):
        return request.idempotency_key is not None
    return tag_of(route.request) != Steer.tag


def has_passed(route: Route, raw: bytes) -> bool:
    """Whether the client has had this logged frame from before the renewal."""
    _, request = decode(route.request)
    assert isinstance(request, Open | Resume)
    return index_of(raw) < request.start + route.passed


def credit_on_link(route: Route) -> bytes:
    """The route's last Credit: its bytes count from the client's request, those of a link from the
    request on that link."""
    assert route.credit is not None
    if not route.passed_before:
        return route.credit
    corr, credit = decode(route.credit)
    assert isinstance(credit, Credit)
    if credit.bytes is None:
        return route.credit
    return encode(replace(credit, bytes=max(0, credit.bytes - route.passed_before)), corr)


def renewal(route: Route) -> Resume:
    """The Resume that continues an opened route, with the credit that is still unused."""
    _, request = decode(route.request)
    _, opened = decode(route.opened or b"")
    assert isinstance(request, Open | Resume) and isinstance(opened, Opened)
    next_index = request.start + route.passed
    limit, limit_bytes = request.start + request.credit, request.credit_bytes
    if route.credit is not None:
        _, credit = decode(route.credit)
        assert isinstance(credit, Credit)
        limit = max(limit, credit.limit)
        if credit.bytes is not None:
            limit_bytes = max(limit_bytes or 0, credit.bytes)
    token = (request.token if isinstance(request, Resume) else None) or opened.token or None
    return Resume(
        stream=opened.stream,
        after=next_index - 1 if next_index else None,
        token=None if route.tokenless else token,
        follow=request.follow if isinstance(request, Resume) else True,
        credit=max(0, limit - next_index),
        credit_bytes=None if limit_bytes is None else max(0, limit_bytes - route.passed_bytes),
        caller=request.caller,
    )
