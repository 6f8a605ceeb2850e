"""One request of a client at an origin, and how it is sent again on a later link."""

from __future__ import annotations

from dataclasses import dataclass, field

from tailrace.edge.origins.load_balancing import NO_NEEDS, Needs
from tailrace.edge.origins.open_requests import UNCOUNTED, Owner
from tailrace.edge.origins.sink import Sink
from tailrace.ledger.errors import OriginUnreachable, TailraceError
from tailrace.ledger.frame import (
    CORR_OFFSET,
    LINK_CODEC,
    PREFIX_BYTES,
    SAFE_METHODS,
    Call,
    Caller,
    Credit,
    Frame,
    Open,
    Renew,
    Resume,
    Steer,
    encode,
)

CONNECT_TIMEOUT_S = 2.0
"""Time that a new request waits for a link that is down, in seconds."""


@dataclass(slots=True, eq=False)
class Route:
    """One request of a client, and what is needed to send it again."""

    sink: Sink
    client_corr: int
    request: bytes  # encoded, without a corr; empty once the request will not be sent again
    deadline: float | None  # loop time in seconds at which to give up if the link is down
    repeatable: bool  # the request is idempotent: it may be sent twice
    changes: bool  # the request has a further effect each time that it is sent
    next: int = 0  # the index of the next logged frame
    limit: int = 0  # the client's credit: an index, or a number of Body frames
    limit_bytes: int | None = None  # the client's credit in bytes, counted from its request
    credited: bool = False  # the client has sent a Credit frame
    follow: bool = True
    token: str | None = None  # the latest resume token; None once it is not valid any more
    caller: Caller | None = None
    owner: Owner = UNCOUNTED
    link_corr: int = 0
    sent: bool = False  # the request has been sent, on this or an earlier link
    asked: bool = False  # the request, or one that resumes its stream, was sent on this link
    left: bool = False  # the client has detached before the origin's answer
    passed_bytes: int = 0  # bytes of logged frames that were passed on
    passed_before: int = 0  # value of `passed_bytes` at the last renewal
    stream: bytes | None = None  # the stream's id, once it is open
    renewal: bytes | None = None  # the MAC in the stream's last Pass frame
    renewed: bool = False  # the stream was requested again, so frames may be repeated
    answered: bool = False  # a Call's Answer was passed on, so the Call cannot be repeated
    tried: frozenset[str] = frozenset()  # addresses of origins that have refused the request
    ledger: str | None = None  # the only ledger that can have the stream
    needs: Needs = NO_NEEDS
    shared: bool = False  # the stream has several readers (see `edge.origins.fan_out`)
    joined: bool = False  # gets its frames from the shared subscription; has no link corr
    is_source: bool = False  # the subscription that several readers share; belongs to no client
    corr_bytes: bytes = field(init=False)  # `client_corr` as encoded in a frame

    def __post_init__(self) -> None:
        self.corr_bytes = self.client_corr.to_bytes(PREFIX_BYTES - CORR_OFFSET, "little")

    @property
    def survives_loss(self) -> bool:
        """True if a request that was sent can be sent again after the link was lost.

        A Call whose answer has begun cannot, because the answer could not be continued.
        """
        return self.stream is not None or (self.repeatable and not self.answered)

    def weaken_right(self) -> bool:
        """Drop the strongest capability for resuming the stream; return False if there is none.

        The capabilities, strongest first, are the Pass of the origin and the resume token. Without
        them, the caller's own rights are used.
        """
        if self.renewal is not None:
            self.renewal = None
        elif self.token is not None:
            self.token = None
        else:
            return False
        return True


def end_of(route: Route, error: TailraceError) -> TailraceError:
    """Return the error for the client: `outcome_unknown` if the request may have taken effect."""
    if not route.sent or route.answered or not route.changes:
        return error
    return OriginUnreachable(
        f"{error.message}: it is not known whether the request was carried out",
        code="outcome_unknown",
        hint="check first, or repeat the request unchanged if it has a Producer-Seq",
        retry_after_ms=error.retry_after_ms,
    )


def route_of(sink: Sink, corr: int, request: Frame, now: float) -> Route:
    """Make the route for a new request of a client."""
    deadline = now + CONNECT_TIMEOUT_S
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
    """Return the Credit frame for a route, encoded for the link.

    The client counts its byte credit from its request; the origin counts from the last renewal.
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
