"""The relay of one link to an origin: the streams of all clients, multiplexed.

Sans-I/O: encoded frames in, encoded frames out, the time given by the caller. Each request of a
client is a route, with its own correlation id (corr) on the link. Frames are passed on without
being decoded; only their corr is replaced by the client's.

The routes survive the loss of the link. On the next link, each stream is requested again (renewed)
from the frame after the last one that was passed on, so that a client sees the restart of an origin
as a pause. Once a request is answered, only the data for requesting its stream again is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.edge.origins.fan_out import FanOut
from tailrace.edge.origins.link_protocol import LinkProtocol, LinkState
from tailrace.edge.origins.open_requests import OpenRequests
from tailrace.edge.origins.relay_counters import RelayCounters
from tailrace.edge.origins.renewal_queue import RenewalQueue
from tailrace.edge.origins.route import Route, credit_on_link, end_of, renewal
from tailrace.edge.origins.route_table import RouteTable
from tailrace.edge.origins.sink import Sink
from tailrace.ledger.errors import OriginUnreachable, TailraceError, Unauthorized
from tailrace.ledger.frame import (
    CLOSING,
    CORR_OFFSET,
    LOGGED,
    PREFIX_BYTES,
    Answer,
    Call,
    Credit,
    Detach,
    Heartbeat,
    Opened,
    Pass,
    Resume,
    StreamEnd,
    StreamError,
    Token,
    decode,
    encode,
    error_frame,
    index_of,
    tag_and_corr_of,
    tag_of,
    with_corr,
)

LOST_LINK_TIMEOUT_S = 30.0
"""Time that an open stream waits for a lost link to come back, in seconds."""
TOKEN = Token.tag
ELSEWHERE = frozenset(("unknown_stream", "overloaded", "loading", "unavailable", "ledger_full"))
"""Error codes for requests that the origin has not begun, and that another origin may accept."""
FAULTS = frozenset(("internal", "ledger_failed", "unavailable"))
"""Error codes that count as failures of the origin."""


class Relay:
    """Passes frames between the clients and one origin.

    Call `receive` or another method for each event. Sinks get their frames at once. Afterwards
    handle the results of `frames_to_send`, `refused` and `outcomes`.

    The relay decides about each frame. `LinkProtocol` greets the origin, `RouteTable` finds the
    routes, `FanOut` lets readers of one stream share a subscription, and `RenewalQueue` bounds how
    many streams are requested again at the same time.
    """

    def __init__(
        self,
        last_corr: int = 0,
        secret: bytes | None = None,
        open_requests: OpenRequests | None = None,
    ) -> None:
        """Begin without routes; `open_requests` counts the requests of all relays of the edge."""
        self.counters = RelayCounters()
        self._link = LinkProtocol(secret)
        self._table = RouteTable(last_corr, open_requests or OpenRequests())
        self._renewals = RenewalQueue()
        self._fan_out = FanOut(self._table, self._send, self._ask)
        self._to_send: list[bytes] = []
        self._refused: list[tuple[Route, bytes]] = []
        self._outcomes: list[bool] = []

    @property
    def state(self) -> LinkState:
        """The state of the link."""
        return self._link.state

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The origin's last Heartbeat; None while the link is down."""
        return self._link.heartbeat

    @property
    def route_count(self) -> int:
        """The number of routes."""
        return len(self._table)

    @property
    def shared_count(self) -> int:
        """The number of subscriptions that several readers share."""
        return len(self._table.sources)

    @property
    def shared_reader_count(self) -> int:
        """The number of routes whose frames come from a shared subscription."""
        return len(self._table.joined)

    @property
    def held_bytes(self) -> int:
        """The total size of the unanswered requests, in bytes."""
        return self._table.held_bytes

    @property
    def is_full(self) -> bool:
        """True while the origin accepts no more requests of this edge."""
        heartbeat = self._link.heartbeat
        return heartbeat is not None and 0 < heartbeat.corrs <= len(self._table)

    # ---- pending work ----

    @property
    def is_idle(self) -> bool:
        """True if there is no pending work."""
        return not (self._to_send or self._refused or self._outcomes)

    def frames_to_send(self) -> list[bytes]:
        """Return the frames that must be sent to the origin, and forget them."""
        frames, self._to_send = self._to_send, []
        return frames

    def refused(self) -> list[tuple[Route, bytes]]:
        """Return requests that this origin refused since the last call, and another may accept.

        Each request comes with the StreamError that refused it. The origin has not begun any of
        these requests, and this relay has forgotten them.
        """
        refused, self._refused = self._refused, []
        return refused

    def outcomes(self) -> list[bool]:
        """Return a value per request answered since the last call: False if the origin failed."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # ---- the link ----

    def connected(self) -> None:
        """Begin on a new connection; requests are sent after the origin's Hello."""
        self._to_send = self._link.connected()

    def disconnected(self, now: float) -> None:
        """Handle the loss of the link: repeatable requests wait, the others end with an error."""
        self.counters.losses += self._link.state is LinkState.UP
        self._link.disconnected()
        self._end_sharing()
        self._to_send.clear()
        self._renewals.clear()
        for route in self._table.all():
            route.asked = False
            if route.left:
                self._drop(route)
            elif route.sent and route.survives_loss:
                if route.deadline is None:
                    route.deadline = now + LOST_LINK_TIMEOUT_S
            elif route.sent:
                lost = OriginUnreachable("the link to the origin was lost")
                self._fail(route, end_of(route, lost))

    def receive(self, frames: Iterable[bytes]) -> None:
        """Handle encoded frames of the origin.

        Raises TailraceError if the origin violates the protocol or ends the connection, which the
        caller then closes.
        """
        routes, passed, is_up = self._table.by_corr, 0, self._link.state is LinkState.UP
        run: list[bytes] = []  # consecutive Tokens of one route
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
                    is_up = self._receive_for_link(raw)
                continue  # other frames are dropped: their client has detached
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
            # The same as `with_corr`, but three times as fast: every token passes through here.
            route.sink.deliver(raw[:CORR_OFFSET] + route.corr_bytes + raw[PREFIX_BYTES:])
            if tag == TOKEN:
                run_corr = corr
            if route.shared:
                self._fan_out.touched[route] = None
        self._end_read(routes.get(run_corr), run)
        self.counters.frames += passed

    def _end_read(self, route: Route | None, run: list[bytes]) -> None:
        """Pass on the last Tokens of a read, and let readers of one stream share a subscription."""
        if run and route is not None:
            self._pass(route, run)
        if self._fan_out.touched:
            for finished in self._fan_out.settle():
                self._drop(finished)

    def _receive_for_link(self, raw: bytes) -> bool:
        """Handle a frame of the link itself; return True if the link is up."""
        link = self._link
        was_up = link.state is LinkState.UP
        answer = link.receive(raw)
        if answer is not None:
            self._to_send.append(answer)
        if link.state is not LinkState.UP:
            return False
        if not was_up:
            # Begin with streams whose clients have credit; the others would get no frames yet.
            for route in sorted(self._table.all(), key=lambda route: route.limit <= route.next):
                self._ask(route)
        return True

    def _repeats(self, route: Route, raw: bytes) -> bool:
        """Return True if a frame is dropped: it was passed on earlier, or its client has left."""
        if route.left:
            return True
        if index_of(raw) < route.next:
            self.counters.repeated += 1
            return True
        route.renewed = False
        return False

    def _pass(self, route: Route, run: list[bytes]) -> None:
        """Pass on consecutive Tokens of one route."""
        self.counters.frames += len(run)
        route.next += len(run)
        route.passed_bytes += sum(map(len, run))
        route.sink.deliver_run(run, route.corr_bytes)

    def _passes(self, route: Route, raw: bytes, tag: int) -> bool:
        """Handle a frame that is not in the stream's log; return True if the client gets it."""
        if tag == Pass.tag:
            _, frame = decode(raw)
            assert isinstance(frame, Pass)
            route.renewal = frame.mac
            return False
        if route.is_source:
            # The origin has ended the shared subscription: either it has no more frames, or it
            # refuses the client for which the subscription was opened. Each client then gets a
            # subscription of its own, so that the origin answers each of them.
            if tag in CLOSING:
                self._fan_out.refused(route)
            return False
        if self._renewals.answered(route.link_corr):
            self._renew_some()
        if route.left:
            self._answer_nobody(route, raw, tag)
            return False
        if tag == Opened.tag:
            return self._opened(route, raw)
        if tag == Answer.tag:
            route.answered = True
            self._outcomes.append(True)
            self._table.forget_request(route)
        elif tag == StreamError.tag:
            return self._is_final(route, raw)
        elif tag in CLOSING:
            self._drop(route)
        return True

    def _is_final(self, route: Route, raw: bytes) -> bool:
        """Handle an error; return True if it ends the route and the client gets it."""
        _, error = decode(raw)
        assert isinstance(error, StreamError)
        # A capability that was valid when the stream was opened may be invalid now, for example
        # after a change of the origin's keys. Try a weaker one instead of ending the response.
        if route.renewed and error.code == Unauthorized.code and route.weaken_right():
            self._ask(route)
            return False
        if route.stream is None and not route.answered:
            self._outcomes.append(error.code not in FAULTS)
            if error.code in ELSEWHERE:
                self.release(route)
                self._refused.append((route, with_corr(raw, route.client_corr)))
                return False
        self._drop(route)
        return True

    def _opened(self, route: Route, raw: bytes) -> bool:
        """Store what is needed to request the stream again; return True if the client gets Opened.

        The client does not get it if the edge itself requested the stream again after a lost link.
        """
        _, opened = decode(raw)
        assert isinstance(opened, Opened)
        is_first, route.stream = route.stream is None, opened.stream
        if is_first and opened.first > route.next:
            # The request has `tail` or `since_ms`, so the origin has chosen the first frame, and
            # the client's credit counts from there.
            route.limit += opened.first - route.next
            route.next = opened.first
        self._outcomes.append(True)
        self.counters.replayed += max(0, opened.next_index - route.next)
        route.token = opened.token or route.token
        self._table.forget_request(route)
        self._fan_out.opened(route)
        return is_first

    def _answer_nobody(self, route: Route, raw: bytes, tag: int) -> None:
        """End a request that has been answered after its client had left."""
        if tag == StreamError.tag:
            _, error = decode(raw)
            assert isinstance(error, StreamError)
            self._outcomes.append(error.code not in FAULTS)
        else:
            self._outcomes.append(True)
        if tag not in CLOSING:
            self._to_send.append(encode(Detach(), route.link_corr))
        self._drop(route)

    # ---- clients ----

    def credit(self, sink: Sink, corr: int, credit: Credit) -> bool:
        """Give the origin credit for more frames; return False if this relay has no such stream."""
        route = self._table.find(sink, corr)
        if route is None:
            return False
        route.limit, route.credited = max(route.limit, credit.limit), True
        if credit.bytes is not None:
            route.limit_bytes = max(route.limit_bytes or 0, credit.bytes)
        if route.asked:
            self._to_send.append(credit_on_link(route))
        if route.shared:
            for finished in self._fan_out.credit(route):
                self._drop(finished)
        return True

    def detach(self, sink: Sink, corr: int) -> bool:
        """Ask the origin to stop sending a stream; return False if the relay has no such stream."""
        route = self._table.find(sink, corr)
        if route is None:
            return False
        self._detach(route)
        return True

    def adopt(self, route: Route) -> None:
        """Take a request that is new or comes from another origin's relay, and send it."""
        self._table.add(route)
        if self._link.state is LinkState.UP:
            self._ask(route)

    def transfer(self, sink: Sink, to: Sink) -> None:
        """Deliver the frames of a sink's open requests to another sink, which has no requests."""
        self._table.transfer(sink, to)

    def left_by(self, sink: Sink) -> int:
        """Return the number of unanswered requests that a client has detached from."""
        return self._table.left_by(sink)

    def release(self, route: Route) -> None:
        """Forget a route, so that another relay can adopt it."""
        self._remove(route)
        route.asked = False

    def routes(self) -> list[Route]:
        """Return all routes."""
        return self._table.all()

    def waiting(self) -> list[Route]:
        """Return the routes that wait for the link to come back."""
        return [] if self._link.state is LinkState.UP else self._table.all()

    def _detach(self, route: Route) -> None:
        """Detach a client from a route, and free the client's correlation id.

        An unanswered request keeps its correlation id on the link, and counts as open, until the
        origin answers. A Call ends at once.
        """
        is_call = tag_of(route.request) == Call.tag if route.request else route.answered
        if route.asked and route.stream is None and not is_call:
            self._table.leave(route)
            return
        if route.asked:
            self._to_send.append(encode(Detach(), route.link_corr))
        self._drop(route)

    def forget(self, sink: Sink) -> None:
        """Detach a client that has left from all its streams; none is cancelled."""
        for route in self._table.of(sink):
            self._detach(route)

    # ---- time ----

    def expire(self, now: float) -> None:
        """End the routes whose wait for the link has timed out."""
        if self._link.state is LinkState.UP:
            return
        for route in self._table.all():
            if route.deadline is not None and route.deadline <= now:
                self._fail(route, OriginUnreachable("this edge has no link to an origin"))

    def refuse_all(self, error: TailraceError) -> None:
        """End every route with `error`, because the edge is shutting down."""
        self._end_sharing()
        self._renewals.clear()
        for route in self._table.all():
            if route.asked:
                self._to_send.append(encode(Detach(), route.link_corr))
            self._fail(route, end_of(route, error))

    def _end_sharing(self) -> None:
        """Give each reader a route of its own again, because the link is lost or all routes end."""
        for route in self._fan_out.clear():
            self._drop(route)

    # ---- requests on the link ----

    def _send(self, raw: bytes) -> None:
        self._to_send.append(raw)

    def _ask(self, route: Route) -> None:
        """Send a request, or queue a renewal if its stream was open before the link was lost."""
        route.deadline = None
        if route.stream is not None or (route.sent and tag_of(route.request) == Resume.tag):
            self._renewals.add(route)
            self._renew_some()
        else:
            self._send_request(route)

    def _renew_some(self) -> None:
        for route in self._renewals.take(self._table.by_corr):
            self._send_request(route)

    def _send_request(self, route: Route) -> None:
        if route.stream is not None:
            self.counters.renewals += 1
            route.renewed = True
            route.passed_before = route.passed_bytes
            self._to_send.append(encode(renewal(route, route.stream), route.link_corr))
        else:
            self._to_send.append(with_corr(route.request, route.link_corr))
            if route.credited:
                self._to_send.append(credit_on_link(route))
        route.sent = route.asked = True

    # ---- ends of routes ----

    def _drop(self, route: Route) -> None:
        self._remove(route)
        route.request = b""

    def _remove(self, route: Route) -> None:
        if route.is_source:
            self._table.remove_source(route)
        else:
            self._table.remove(route)
        self._fan_out.removed(route)
        if self._renewals.answered(route.link_corr):
            self._renew_some()

    def _fail(self, route: Route, error: TailraceError) -> None:
        self._drop(route)
        if not route.left:
            route.sink.deliver(encode(error_frame(error), route.client_corr))
