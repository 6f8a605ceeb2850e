"""The routing table of one link to an origin: the streams of all clients, multiplexed.

Sans-I/O: encoded frames in, encoded frames out, the time given by the caller. Each request of a
client is a route, with its own correlation id (corr) on the link. Frames are passed on without
being decoded; only their corr is replaced by the client's.

The table survives the loss of the link. On the next link, each stream is requested again from the
frame after the last one that was passed on, so that a client sees the restart of an origin as a
pause. Of an answered request, only what this needs is kept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tailrace.edge.origins.load_balancing import ANYBODY, Wanted
from tailrace.edge.origins.open_requests import UNCOUNTED, OpenRequests, Owner
from tailrace.ledger.errors import (
    FrameError,
    OriginUnreachable,
    SchemaMismatch,
    TailraceError,
    Unauthorized,
)
from tailrace.ledger.frame import (
    CLOSING,
    CORR_OFFSET,
    LINK_CODEC,
    LOGGED,
    PREFIX_BYTES,
    SAFE_METHODS,
    SCHEMA_HASH,
    Answer,
    Call,
    Caller,
    Challenge,
    Credit,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Pass,
    Proof,
    Renew,
    Resume,
    Steer,
    StreamEnd,
    StreamError,
    Token,
    decode,
    encode,
    error_frame,
    index_of,
    tag_and_corr_of,
    tag_of,
    to_error,
    with_corr,
)
from tailrace.ledger.process.version import software
from tailrace.ledger.wire.handshake import Handshake, Side, refused

CONNECT_PATIENCE_S = 2.0
"""Time that a new request waits for a link that is down, in seconds."""
ORIGIN_PATIENCE_S = 30.0
"""Time that an open stream waits for a lost link to come back, in seconds."""
MAX_RENEWALS = 500
"""Maximum number of streams that are requested again at a time. The others wait for the answers,
because all at once would keep an origin that has just restarted from everything else."""
MAX_CORR = 2**32 - 1
TOKEN = Token.tag
ELSEWHERE = frozenset(("unknown_stream", "overloaded", "loading", "unavailable", "ledger_full"))
"""Errors of requests that were not begun, which another origin may accept."""
FAULTS = frozenset(("internal", "ledger_failed", "unavailable"))
"""Errors that count as failures of the origin."""


PATIENCE_S = 16.0
"""Idle timeout that the origin uses for this edge, in seconds."""
ALIVE = encode(Heartbeat(0, ready=True, patience_ms=round(PATIENCE_S * 1000)))
"""The answer to each Heartbeat of the origin."""


class Sink(Protocol):
    """The receiver of one client's frames: an HTTP response or a WebSocket session."""

    def deliver(self, raw: bytes) -> None:
        """Take one encoded frame with the client's corr. Must not block or raise."""

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        """Take consecutive Tokens of one stream, with the link's corr.

        `corr` is the client's corr as encoded in a frame, for sinks that need it (`under`).
        """


def under(run: list[bytes], corr: bytes) -> list[bytes]:
    """Return copies of encoded frames with another corr, in a third of `with_corr`'s time."""
    return [raw[:CORR_OFFSET] + corr + raw[PREFIX_BYTES:] for raw in run]


class LinkState(Enum):
    """The state of the link to an origin."""

    DOWN = "down"
    GREETING = "greeting"  # connected, before the origin's Hello or its proof
    UP = "up"


@dataclass(slots=True, eq=False)
class Route:
    """One request of a client, and what is needed to send it again."""

    sink: Sink
    client_corr: int
    request: bytes  # encoded, for any corr; empty once it will not be sent again
    deadline: float | None  # when to give up if the link is still down
    repeatable: bool  # idempotent
    changes: bool  # carried out again each time that it is sent
    next: int = 0  # the index of the next logged frame
    limit: int = 0  # the client's credit: an index, or a number of Body frames
    limit_bytes: int | None = None  # the client's credit in bytes, counted from its request
    credited: bool = False  # a Credit frame has come
    follow: bool = True
    token: str | None = None  # the latest resume token; None once it is not valid any more
    caller: Caller | None = None
    owner: Owner = UNCOUNTED
    link_corr: int = 0
    sent: bool = False  # the request has been sent on a link
    asked: bool = False  # the request or its renewal has been sent on this link
    left: bool = False  # the client has detached before the origin's answer
    passed_bytes: int = 0  # of logged frames
    passed_before: int = 0  # bytes of logged frames that had passed before the renewal
    stream: bytes | None = None  # once it is opened
    renewal: bytes | None = None  # the mac of its Pass
    renewed: bool = False  # requested again; frames that have passed may be repeated
    answered: bool = False  # the Answer to a Call has passed, so the Call cannot be repeated
    tried: frozenset[str] = frozenset()  # origins that have refused it
    ledger: str | None = None  # the only ledger that can have the stream
    wanted: Wanted = ANYBODY
    corr_bytes: bytes = field(init=False)  # `client_corr` as encoded in a frame

    def __post_init__(self) -> None:
        self.corr_bytes = self.client_corr.to_bytes(PREFIX_BYTES - CORR_OFFSET, "little")


class Relay:
    """The routes of one link.

    Call `receive` and the other methods with what happens. Sinks get their frames at once; then
    handle `frames_to_send`, `refused` and `outcomes`.
    """

    def __init__(
        self,
        last_corr: int = 0,
        secret: bytes | None = None,
        open_requests: OpenRequests | None = None,
    ) -> None:
        """Begin without routes; `open_requests` counts the requests of all relays of the edge."""
        self.state = LinkState.DOWN
        self._secret = secret
        self._handshake = Handshake(Side.EDGE, secret)
        self._is_greeted = False
        self.heartbeat: Heartbeat | None = None
        self._open_requests = open_requests or OpenRequests()
        self._left: Counter[Sink] = Counter()  # unanswered requests that a client has detached from
        self._routes: dict[int, Route] = {}
        self._by_client: dict[Sink, dict[int, Route]] = {}
        self._to_renew: deque[Route] = deque()  # wait until others have been answered
        self._renewing: set[int] = set()  # link corrs that wait for an answer
        self._last_corr = last_corr
        self.held_bytes = 0  # of requests without an answer
        self._to_send: list[bytes] = []
        self._refused: list[tuple[Route, bytes]] = []
        self._outcomes: list[bool] = []
        # Counters for the metrics.
        self.frames = 0  # frames of streams received
        self.repeated = 0  # frames of them that had passed before
        self.replayed = 0  # frames by which readers were behind the tip
        self.renewals = 0  # streams requested again
        self.losses = 0  # times that the link was lost

    @property
    def route_count(self) -> int:
        """The number of routes."""
        return len(self._routes)

    @property
    def is_full(self) -> bool:
        """True while the origin accepts no more requests of this edge."""
        return self.heartbeat is not None and 0 < self.heartbeat.corrs <= len(self._routes)

    # ---- pending work ----

    @property
    def is_idle(self) -> bool:
        """True if there is no pending work."""
        return not (self._to_send or self._refused or self._outcomes)

    def frames_to_send(self) -> list[bytes]:
        """Return the frames for the origin since the last call."""
        frames, self._to_send = self._to_send, []
        return frames

    def refused(self) -> list[tuple[Route, bytes]]:
        """Return the requests since the last call that another origin may accept.

        Each comes with the StreamError that refused it. This relay has forgotten them, and the
        origin has not begun them.
        """
        refused, self._refused = self._refused, []
        return refused

    def outcomes(self) -> list[bool]:
        """Return for each request answered since the last call True if the origin succeeded."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # ---- the link ----

    def connected(self) -> None:
        """Begin on a new connection; requests are sent after the origin's Hello."""
        self.state = LinkState.GREETING
        self._handshake = Handshake(Side.EDGE, self._secret)
        self._is_greeted = False
        self._to_send = [encode(Hello(SCHEMA_HASH, software("edge")))]
        if (challenge := self._handshake.challenge) is not None:
            self._to_send.append(encode(challenge))

    def disconnected(self, now: float) -> None:
        """Handle the loss of the link: repeatable requests wait, the others end with an error."""
        self.losses += self.state is LinkState.UP
        self.state = LinkState.DOWN
        self.heartbeat = None
        self._to_send.clear()
        self._to_renew.clear()
        self._renewing.clear()
        for route in list(self._routes.values()):
            route.asked = False
            if route.left:
                self._drop(route)
                continue
            if not route.sent:
                continue
            # An answer whose body has begun cannot be continued elsewhere.
            if route.stream is not None or (route.repeatable and not route.answered):
                if route.deadline is None:
                    route.deadline = now + ORIGIN_PATIENCE_S
            else:
                lost = OriginUnreachable("the link to the origin was lost")
                self._fail(route, end_of(route, lost))

    def receive(self, frames: Iterable[bytes]) -> None:
        """Handle encoded frames of the origin.

        Raises TailraceError if the origin violates the protocol or ends the connection, which the
        caller then closes.
        """
        routes, passed, is_up = self._routes, 0, self.state is LinkState.UP
        run: list[bytes] = []  # Tokens on the corr of the frame before them
        run_corr = -1
        for raw in frames:
            tag, corr = tag_and_corr_of(raw)
            if corr == run_corr and tag == TOKEN:
                run.append(raw)
                continue
            if run:
                self._pass(routes[run_corr], run)
                run = []
            run_corr = -1
            route = routes.get(corr) if is_up else None
            if route is None:
                if corr == 0 or not is_up:
                    self._receive_for_link(raw)
                    is_up = self.state is LinkState.UP
                continue  # otherwise its client has detached meanwhile
            if tag in LOGGED:
                if (route.renewed or route.left) and self._repeats(route, raw):
                    continue
                route.next += 1
                passed += 1
                route.passed_bytes += len(raw)
                if tag == StreamEnd.tag:
                    self._drop(route)
            elif not self._passes(route, raw, tag):
                continue
            # Like `with_corr` in a third of its time: every token passes here.
            route.sink.deliver(raw[:CORR_OFFSET] + route.corr_bytes + raw[PREFIX_BYTES:])
            if tag == TOKEN:
                run_corr = corr
        if run:
            self._pass(routes[run_corr], run)
        self.frames += passed

    def _repeats(self, route: Route, raw: bytes) -> bool:
        """Return True for a frame that passed before the renewal, or whose client has left."""
        if route.left:
            return True
        if index_of(raw) < route.next:
            self.repeated += 1
            return True
        route.renewed = False
        return False

    def _pass(self, route: Route, run: list[bytes]) -> None:
        """Pass on consecutive Tokens of one route."""
        self.frames += len(run)
        route.next += len(run)
        route.passed_bytes += sum(map(len, run))
        route.sink.deliver_run(run, route.corr_bytes)

    def _passes(self, route: Route, raw: bytes, tag: int) -> bool:
        """Handle a frame that is not logged; return True if it is for the client, too."""
        if tag == Pass.tag:
            _, frame = decode(raw)
            assert isinstance(frame, Pass)
            route.renewal = frame.mac
            return False
        if route.link_corr in self._renewing:
            self._renewing.discard(route.link_corr)
            self._renew_some()
        if route.left:
            self._answer_nobody(route, raw, tag)
            return False
        if tag == Opened.tag:
            return self._opened(route, raw)
        if tag == Answer.tag:
            route.answered = True
            self._outcomes.append(True)
            self._let_go(route)
        elif tag == StreamError.tag:
            return self._is_final(route, raw)
        elif tag in CLOSING:
            self._drop(route)
        return True

    def _is_final(self, route: Route, raw: bytes) -> bool:
        """Handle an error; return True if it ends the route and is for the client."""
        _, error = decode(raw)
        assert isinstance(error, StreamError)
        if self._goes_on_without(route, error):
            return False
        if route.stream is None and not route.answered:
            self._outcomes.append(error.code not in FAULTS)
            if error.code in ELSEWHERE:
                self.release(route)
                self._refused.append((route, with_corr(raw, route.client_corr)))
                return False
        self._drop(route)
        return True

    def _receive_for_link(self, raw: bytes) -> None:
        """Handle a frame on corr 0, or any frame before the origin's Hello."""
        _, frame = decode(raw)
        if isinstance(frame, StreamError):
            raise to_error(frame)
        if isinstance(frame, Hello) and self.state is LinkState.GREETING:
            self._check_hello(frame)
            self._begin_if_sure()
        elif isinstance(frame, Challenge):
            self._to_send.append(encode(self._handshake.answer(frame)))
        elif isinstance(frame, Proof) and self.state is LinkState.GREETING:
            self._handshake.check(frame)
            self._begin_if_sure()
        elif isinstance(frame, Heartbeat) and self.state is LinkState.UP:
            self.heartbeat = frame
            self._to_send.append(ALIVE)
        elif self._is_greeted and not self._handshake.done:
            raise refused("this edge has a link secret, and the origin shows none")
        else:
            name = type(frame).__name__
            raise FrameError(f"unexpected {name} frame on the link", field="tag", offset=4)

    def _opened(self, route: Route, raw: bytes) -> bool:
        """Keep what a renewal needs and forget the request; return True if the client gets Opened.

        An Opened that answers a renewal is not passed on.
        """
        _, opened = decode(raw)
        assert isinstance(opened, Opened)
        is_first, route.stream = route.stream is None, opened.stream
        self._outcomes.append(True)
        self.replayed += max(0, opened.next_index - route.next)
        route.token = opened.token or route.token
        self._let_go(route)
        return is_first

    def _answer_nobody(self, route: Route, raw: bytes, tag: int) -> None:
        """End a request whose client has left, because it has been answered."""
        if tag == StreamError.tag:
            _, error = decode(raw)
            assert isinstance(error, StreamError)
            self._outcomes.append(error.code not in FAULTS)
        else:
            self._outcomes.append(True)
        if tag not in CLOSING:
            self._to_send.append(encode(Detach(), route.link_corr))
        self._drop(route)

    def _goes_on_without(self, route: Route, error: StreamError) -> bool:
        """Renew a stream with a weaker right if `error` refuses the one used; return True if so.

        The right was valid when the stream was opened here. If it no longer is, for example after
        a change of the origin's keys, the open body is not broken off.
        """
        if not route.renewed or error.code != Unauthorized.code:
            return False
        if route.renewal is not None:
            route.renewal = None
        elif route.token is not None:
            route.token = None
        else:
            return False
        self._ask(route)
        return True

    def _check_hello(self, hello: Hello) -> None:
        if hello.schema != SCHEMA_HASH:
            raise SchemaMismatch(
                f"the origin ({hello.software}) speaks schema {hello.schema.hex()}",
                hint=f"this edge speaks {SCHEMA_HASH.hex()}",
            )
        self._is_greeted = True

    def _begin_if_sure(self) -> None:
        """Send the requests once the origin has sent its Hello and proved its identity."""
        if self._is_greeted and self._handshake.done:
            self.state = LinkState.UP
            # Streams whose clients have credit first; the others would get no frames.
            for route in sorted(self._routes.values(), key=lambda route: route.limit <= route.next):
                self._ask(route)

    # ---- clients ----

    def credit(self, sink: Sink, corr: int, credit: Credit) -> bool:
        """Give the origin credit for more frames; return False if it has no such stream."""
        route = self._by_client.get(sink, {}).get(corr)
        if route is None:
            return False
        route.limit, route.credited = max(route.limit, credit.limit), True
        if credit.bytes is not None:
            route.limit_bytes = max(route.limit_bytes or 0, credit.bytes)
        if route.asked:
            self._to_send.append(credit_on_link(route))
        return True

    def detach(self, sink: Sink, corr: int) -> bool:
        """Ask the origin for no more of a stream; return False if it has no such stream."""
        route = self._by_client.get(sink, {}).get(corr)
        if route is None:
            return False
        self._detach(route)
        return True

    def adopt(self, route: Route) -> None:
        """Take a request, which is new or comes from another origin's relay, and send it."""
        route.link_corr = self._free_corr()
        self._routes[route.link_corr] = route
        self._open_requests.add(route.owner)
        self._by_client.setdefault(route.sink, {})[route.client_corr] = route
        self.held_bytes += len(route.request)
        if self.state is LinkState.UP:
            self._ask(route)

    def transfer(self, sink: Sink, to: Sink) -> None:
        """Deliver the open requests of a sink to another one, which has none so far."""
        routes = self._by_client.pop(sink, None)
        if routes is not None:
            self._by_client[to] = routes
            for route in routes.values():
                route.sink = to

    def left_by(self, sink: Sink) -> int:
        """Return how many requests a client has detached from that the origin has not answered."""
        return self._left[sink]

    def release(self, route: Route) -> None:
        """Forget a route, so that another relay can adopt it."""
        self.held_bytes -= len(route.request)
        self._remove(route)
        route.asked = False

    def routes(self) -> list[Route]:
        """Return all routes."""
        return list(self._routes.values())

    def waiting(self) -> list[Route]:
        """Return the routes that wait for the link to come back."""
        return [] if self.state is LinkState.UP else list(self._routes.values())

    def _detach(self, route: Route) -> None:
        """Free the client's corr.

        A request that the origin has not answered keeps its corr on the link, and counts, until it
        is answered. A Call ends at once.
        """
        is_call = tag_of(route.request) == Call.tag if route.request else route.answered
        if route.asked and route.stream is None and not is_call:
            self._forget_client(route)
            self._let_go(route)
            self._left[route.sink] += 1
            route.left = True
            return
        if route.asked:
            self._to_send.append(encode(Detach(), route.link_corr))
        self._drop(route)

    def forget(self, sink: Sink) -> None:
        """Detach a client that has left from all its streams; none is cancelled."""
        for route in list(self._by_client.get(sink, {}).values()):
            self._detach(route)

    # ---- time ----

    def expire(self, now: float) -> None:
        """End the routes whose wait for the link has timed out."""
        if self.state is LinkState.UP:
            return
        late = [r for r in self._routes.values() if r.deadline is not None and r.deadline <= now]
        for route in late:
            self._fail(route, OriginUnreachable("this edge has no link to an origin"))

    def refuse_all(self, error: TailraceError) -> None:
        """End every route with `error`, because the edge is shutting down."""
        self._to_renew.clear()
        for route in list(self._routes.values()):
            if route.asked:
                self._to_send.append(encode(Detach(), route.link_corr))
            self._fail(route, end_of(route, error))

    # ---- routes ----

    def _free_corr(self) -> int:
        corr = self._last_corr
        while True:
            corr = corr % MAX_CORR + 1
            if corr not in self._routes:
                self._last_corr = corr
                return corr

    def _ask(self, route: Route) -> None:
        """Send a request; on a later link queue the renewal of a stream instead."""
        route.deadline = None
        if route.stream is not None or (route.sent and tag_of(route.request) == Resume.tag):
            self._to_renew.append(route)
            self._renew_some()
        else:
            self._send_request(route)

    def _renew_some(self) -> None:
        while self._to_renew and len(self._renewing) < MAX_RENEWALS:
            route = self._to_renew.popleft()
            if self._routes.get(route.link_corr) is route:  # its client has not left
                self._renewing.add(route.link_corr)
                self._send_request(route)

    def _send_request(self, route: Route) -> None:
        if route.stream is not None:
            self.renewals += 1
            route.renewed = True
            route.passed_before = route.passed_bytes
            self._to_send.append(encode(renewal(route, route.stream), route.link_corr))
        else:
            self._to_send.append(with_corr(route.request, route.link_corr))
            if route.credited:
                self._to_send.append(credit_on_link(route))
        route.sent = route.asked = True

    def _drop(self, route: Route) -> None:
        self._let_go(route)
        self._remove(route)

    def _remove(self, route: Route) -> None:
        del self._routes[route.link_corr]
        self._open_requests.remove(route.owner)
        if not route.left:
            self._forget_client(route)
        else:
            self._left[route.sink] -= 1
            if not self._left[route.sink]:
                del self._left[route.sink]
        if route.link_corr in self._renewing:
            self._renewing.discard(route.link_corr)
            self._renew_some()

    def _forget_client(self, route: Route) -> None:
        routes = self._by_client[route.sink]
        del routes[route.client_corr]
        if not routes:
            del self._by_client[route.sink]

    def _let_go(self, route: Route) -> None:
        """Drop a request that will not be sent again, because it may be large."""
        self.held_bytes -= len(route.request)
        route.request = b""

    def _fail(self, route: Route, error: TailraceError) -> None:
        self._drop(route)
        if route.left:
            return
        route.sink.deliver(encode(error_frame(error), route.client_corr))


def end_of(route: Route, error: TailraceError) -> TailraceError:
    """Return the client's error; `outcome_unknown` if the request may have taken effect."""
    if not route.sent or route.answered or not route.changes:
        return error
    return OriginUnreachable(
        f"{error.message}: whether the request was carried out is not known",
        code="outcome_unknown",
        hint="look first, or send it again as it is if it carries a Producer-Seq",
        retry_after_ms=error.retry_after_ms,
    )


def route_of(sink: Sink, corr: int, request: Frame, now: float) -> Route:
    """Return the route of a client's request."""
    deadline = now + CONNECT_PATIENCE_S
    raw = LINK_CODEC.encode(request)
    route = Route(sink, corr, raw, deadline, repeatable=True, changes=False)
    match request:
        case Open():
            route.repeatable = request.idempotency_key is not None
            route.limit, route.limit_bytes = request.credit, request.credit_bytes
            route.caller = request.caller
        case Resume():
            route.next, route.limit = request.start, request.start + request.credit
            route.follow, route.token = request.follow, request.token
            route.caller, route.limit_bytes = request.caller, request.credit_bytes
        case Call():
            route.limit, route.limit_bytes = request.credit, request.credit_bytes
            route.changes = request.method not in SAFE_METHODS
            route.repeatable = not route.changes
        case Steer():
            route.repeatable, route.changes = False, True
    return route


# ---- renewal after a lost link ----


def credit_on_link(route: Route) -> bytes:
    """Return a route's Credit on the link.

    A client's credit in bytes counts from its request, that of a link from the renewal.
    """
    credit_bytes = route.limit_bytes
    if credit_bytes is not None:
        credit_bytes = max(0, credit_bytes - route.passed_before)
    return encode(Credit(route.limit, credit_bytes), route.link_corr)


def renewal(route: Route, stream: bytes) -> Renew | Resume:
    """Return the request that continues an open stream, with the unused credit."""
    after = route.next - 1 if route.next else None
    credit, credit_bytes = max(0, route.limit - route.next), route.limit_bytes
    if credit_bytes is not None:
        credit_bytes = max(0, credit_bytes - route.passed_bytes)
    if route.renewal is not None:
        return Renew(stream, after, route.follow, credit, credit_bytes, route.renewal)
    return Resume(stream, after, route.token, route.follow, credit, route.caller, credit_bytes)
