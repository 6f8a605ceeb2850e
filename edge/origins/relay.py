"""The table of the origin link: which client's stream rides on which corr of the link.

Sans-I/O: raw frames in, raw frames out, the time given by the caller. One link carries the
streams of all clients of this edge. Each gets a corr of its own there (a route); a frame
that passes only has its corr patched, its payload is not decoded.

When the link is lost the table stays. On the next link every route is asked for again from
the frame after the last one that passed, so that a client sees an origin's restart as a
pause. Of a request that has been answered nothing is kept but what that takes.
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
"""How long a new request waits for a link that is down."""
ORIGIN_PATIENCE_S = 30.0
"""How long a stream that is under way waits for a lost link to come back."""
MAX_RENEWALS = 500
"""Maximum number of streams that an origin is asked for again at a time. The others wait for its
answers, because all at once would keep an origin that has just come back from all else."""
MAX_CORR = 2**32 - 1
TOKEN = Token.tag
ELSEWHERE = frozenset(("unknown_stream", "overloaded", "loading", "unavailable", "ledger_full"))
"""Refusals of what was not begun, to which another origin may have another answer."""
FAULTS = frozenset(("internal", "ledger_failed", "unavailable"))
"""Answers that are the origin's own fault."""


PATIENCE_S = 16.0
"""What the origin is told: an edge that says nothing for so long is gone, and reads nothing."""
ALIVE = encode(Heartbeat(0, ready=True, patience_ms=round(PATIENCE_S * 1000)))
"""The answer to each Heartbeat of the origin."""


class Sink(Protocol):
    """Where the frames for one client go: an HTTP response, a WebSocket session."""

    def deliver(self, raw: bytes) -> None:
        """Take one raw frame under the client's corr; must not block and not raise."""

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        """Take Tokens of one stream as the origin has sent them; `corr`, the client's as it lies in
        a frame, is for who needs it."""


def under(run: list[bytes], corr: bytes) -> list[bytes]:
    """Copies of raw frames under another corr: as `with_corr`, in a third of its time."""
    return [raw[:CORR_OFFSET] + corr + raw[PREFIX_BYTES:] for raw in run]


class LinkState(Enum):
    DOWN = "down"
    GREETING = "greeting"  # connected; the origin's Hello is awaited, or its proof
    UP = "up"


@dataclass(slots=True, eq=False)
class Route:
    """One request of one client, and what is needed to ask for it again."""

    sink: Sink
    client_corr: int
    request: bytes  # encoded, for any corr; empty once it will not be sent again
    deadline: float | None  # when to give up unless the link is up by then
    repeatable: bool  # to send it twice cannot start or do anything twice
    changes: bool  # it is carried out once for each time that it is sent
    next: int = 0  # the index of the next logged frame
    limit: int = 0  # what the client has given credit for: an index, or a count of Body frames
    limit_bytes: int | None = None  # the same in bytes, from the request on
    credited: bool = False  # by a Credit, not by the request alone
    follow: bool = True
    token: str | None = None  # the latest; None once it has lost its worth
    caller: Caller | None = None
    owner: Owner = UNCOUNTED
    link_corr: int = 0
    sent: bool = False  # the request has been on a link
    asked: bool = False  # it, or what continues it, has been sent on this link
    left: bool = False  # by its client, before the origin's answer
    passed_bytes: int = 0  # of logged frames
    passed_before: int = 0  # bytes that had passed when it was asked for again
    stream: bytes | None = None  # once it is opened
    renewal: bytes | None = None  # the mac of its Pass
    renewed: bool = False  # asked for again; frames that have passed may come once more
    answered: bool = False  # the Answer to a Call has passed: it cannot be asked for again
    tried: frozenset[str] = frozenset()  # origins that have refused it
    ledger: str | None = None  # the only one in which what is asked for can be
    wanted: Wanted = ANYBODY
    corr_bytes: bytes = field(init=False)  # `client_corr`, as it lies in a frame

    def __post_init__(self) -> None:
        self.corr_bytes = self.client_corr.to_bytes(PREFIX_BYTES - CORR_OFFSET, "little")


class Relay:
    """Give it what happens; sinks get what is theirs at once, then take `frames_to_send`."""

    def __init__(
        self,
        last_corr: int = 0,
        secret: bytes | None = None,
        open_requests: OpenRequests | None = None,
    ) -> None:
        """`open_requests` counts what this relay has under way, beside those of others."""
        self.state = LinkState.DOWN
        self._secret = secret
        self._handshake = Handshake(Side.EDGE, secret)
        self._is_greeted = False
        self.heartbeat: Heartbeat | None = None
        self._open_requests = open_requests or OpenRequests()
        self._left: Counter[Sink] = Counter()  # requests that their client has left, by client
        self._routes: dict[int, Route] = {}
        self._by_client: dict[Sink, dict[int, Route]] = {}
        self._to_renew: deque[Route] = deque()  # those that wait for the answers of others
        self._renewing: set[int] = set()  # link corrs of those that wait for an answer
        self._last_corr = last_corr
        self.held_bytes = 0  # of requests that have no answer yet
        self._to_send: list[bytes] = []
        self._refused: list[tuple[Route, bytes]] = []
        self._outcomes: list[bool] = []
        # Since the edge began, for those who count.
        self.frames = 0  # of streams, that have come
        self.repeated = 0  # of those, frames that had passed before
        self.replayed = 0  # that readers were behind the tip when they asked
        self.renewals = 0  # streams that were asked for again
        self.losses = 0  # of a link that was up

    @property
    def route_count(self) -> int:
        return len(self._routes)

    @property
    def is_full(self) -> bool:
        """Whether the origin takes no more requests of this edge."""
        return self.heartbeat is not None and 0 < self.heartbeat.corrs <= len(self._routes)

    # ---- what is to be done ----

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to be done."""
        return not (self._to_send or self._refused or self._outcomes)

    def frames_to_send(self) -> list[bytes]:
        """Frames for the origin since the last call."""
        frames, self._to_send = self._to_send, []
        return frames

    def refused(self) -> list[tuple[Route, bytes]]:
        """Requests since the last call that nothing was done for, and that another origin may
        answer otherwise, each with the StreamError. They are here no more."""
        refused, self._refused = self._refused, []
        return refused

    def outcomes(self) -> list[bool]:
        """Of each request that was answered since the last call, whether the origin did well."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # ---- what the link does ----

    def connected(self) -> None:
        """A new connection to the origin stands; the requests follow its Hello."""
        self.state = LinkState.GREETING
        self._handshake = Handshake(Side.EDGE, self._secret)
        self._is_greeted = False
        self._to_send = [encode(Hello(SCHEMA_HASH, software("edge")))]
        if (challenge := self._handshake.challenge) is not None:
            self._to_send.append(encode(challenge))

    def disconnected(self, now: float) -> None:
        """The link is gone: what can be asked for again waits, the rest ends here."""
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
            # How much of an answer's body has passed is the client's to know.
            if route.stream is not None or (route.repeatable and not route.answered):
                if route.deadline is None:
                    route.deadline = now + ORIGIN_PATIENCE_S
            else:
                lost = OriginUnreachable("the link to the origin was lost")
                self._fail(route, end_of(route, lost))

    def receive(self, frames: Iterable[bytes]) -> None:
        """Whole raw frames from the origin.

        Raises TailraceError when the origin breaks or ends the connection; it is to be
        closed then.
        """
        routes, passed, is_up = self._routes, 0, self.state is LinkState.UP
        run: list[bytes] = []  # Tokens that follow one that has passed on the same corr
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
                continue  # or detached while the frame was on its way
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
            # As `with_corr`, in a third of its time: every token passes here.
            route.sink.deliver(raw[:CORR_OFFSET] + route.corr_bytes + raw[PREFIX_BYTES:])
            if tag == TOKEN:
                run_corr = corr
        if run:
            self._pass(routes[run_corr], run)
        self.frames += passed

    def _repeats(self, route: Route, raw: bytes) -> bool:
        """Return True for a frame that passed before the renewal, or that nobody waits for."""
        if route.left:
            return True
        if index_of(raw) < route.next:
            self.repeated += 1
            return True
        route.renewed = False
        return False

    def _pass(self, route: Route, run: list[bytes]) -> None:
        """Logged frames of one route, of which nothing is to be looked at."""
        self.frames += len(run)
        route.next += len(run)
        route.passed_bytes += sum(map(len, run))
        route.sink.deliver_run(run, route.corr_bytes)

    def _passes(self, route: Route, raw: bytes, tag: int) -> bool:
        """Take a frame that is not logged; whether it is the client's too."""
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
        """Whether an error is the client's to know, which ends the route."""
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
        """A frame on corr 0, or any frame before the origin's Hello."""
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
            raise FrameError(f"{name} is out of place on the link", field="tag", offset=4)

    def _opened(self, route: Route, raw: bytes) -> bool:
        """Keep what renews the stream, and of its request nothing.

        False where it answers a renewal: the client has had its own.
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
        """End a request whose client has left: this is its answer."""
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
        """Whether `error` refuses a renewal's right; it is asked for with less then.

        That was good when the stream was opened here. That it no longer is, as after a change of
        the origin's keys, is no reason to break a body off that is under way.
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
        """Nothing is asked of an origin that has not shown that it is the one that is meant."""
        if self._is_greeted and self._handshake.done:
            self.state = LinkState.UP
            # Clients that have no credit wait for nothing: the others come first.
            for route in sorted(self._routes.values(), key=lambda route: route.limit <= route.next):
                self._ask(route)

    # ---- what clients do ----

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
        """Ask this origin for a request: a new one, or one that another origin had."""
        route.link_corr = self._free_corr()
        self._routes[route.link_corr] = route
        self._open_requests.add(route.owner)
        self._by_client.setdefault(route.sink, {})[route.client_corr] = route
        self.held_bytes += len(route.request)
        if self.state is LinkState.UP:
            self._ask(route)

    def transfer(self, sink: Sink, to: Sink) -> None:
        """Deliver to another sink what one has under way; `to` has had nothing so far."""
        routes = self._by_client.pop(sink, None)
        if routes is not None:
            self._by_client[to] = routes
            for route in routes.values():
                route.sink = to

    def left_by(self, sink: Sink) -> int:
        """Return how many requests a client has detached from that the origin has not answered."""
        return self._left[sink]

    def release(self, route: Route) -> None:
        """Let another origin have it. This one does not know it, or is asked no more."""
        self.held_bytes -= len(route.request)
        self._remove(route)
        route.asked = False

    def routes(self) -> list[Route]:
        """All that is under way."""
        return list(self._routes.values())

    def waiting(self) -> list[Route]:
        """What waits for this origin to come back."""
        return [] if self.state is LinkState.UP else list(self._routes.values())

    def _detach(self, route: Route) -> None:
        """Let the client have its corr back. A request that the origin is at work on keeps its
        own, and counts, until it is answered; a Call ends at once, as far as it can."""
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
        """The client has gone: detach all that is its own. Never a cancel."""
        for route in list(self._by_client.get(sink, {}).values()):
            self._detach(route)

    # ---- what time does ----

    def expire(self, now: float) -> None:
        """Give up on the routes that have waited for the link for too long."""
        if self.state is LinkState.UP:
            return
        late = [r for r in self._routes.values() if r.deadline is not None and r.deadline <= now]
        for route in late:
            self._fail(route, OriginUnreachable("this edge has no link to an origin"))

    def refuse_all(self, error: TailraceError) -> None:
        """End every route: the edge itself is going away."""
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
        """Send a route's request, or on a later link, when its turn has come, what continues it."""
        route.deadline = None
        if route.stream is not None or (route.sent and tag_of(route.request) == Resume.tag):
            self._to_renew.append(route)
            self._renew_some()
        else:
            self._send_request(route)

    def _renew_some(self) -> None:
        while self._to_renew and len(self._renewing) < MAX_RENEWALS:
            route = self._to_renew.popleft()
            if self._routes.get(route.link_corr) is route:  # its client is still there
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
        """Forget a request that will not be sent again: it may be large."""
        self.held_bytes -= len(route.request)
        route.request = b""

    def _fail(self, route: Route, error: TailraceError) -> None:
        self._drop(route)
        if route.left:
            return
        route.sink.deliver(encode(error_frame(error), route.client_corr))


def end_of(route: Route, error: TailraceError) -> TailraceError:
    """What a client is told whose route ends here: a change may have been made all the same."""
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


# ---- picking up after a lost link ----


def credit_on_link(route: Route) -> bytes:
    """What the client has given credit for: its bytes count from the client's request, those of a
    link from the request on that link."""
    credit_bytes = route.limit_bytes
    if credit_bytes is not None:
        credit_bytes = max(0, credit_bytes - route.passed_before)
    return encode(Credit(route.limit, credit_bytes), route.link_corr)


def renewal(route: Route, stream: bytes) -> Renew | Resume:
    """What continues an opened route, with the credit that is still unused."""
    after = route.next - 1 if route.next else None
    credit, credit_bytes = max(0, route.limit - route.next), route.limit_bytes
    if credit_bytes is not None:
        credit_bytes = max(0, credit_bytes - route.passed_bytes)
    if route.renewal is not None:
        return Renew(stream, after, route.follow, credit, credit_bytes, route.renewal)
    return Resume(stream, after, route.token, route.follow, credit, route.caller, credit_bytes)
