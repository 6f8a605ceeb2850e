"""Telemetry of one request, from its head to the end of its response, and the edge's counters.

A detached stream reports its own progress, and the middleware reports that of all other responses.
Counters are plain numbers, which a scrape reads. Frames are not measured one by one: those of one
read of a link are counted together, and the `FlushBatch` measures the delay of one read in eight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from secrets import token_hex
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import structlog
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.edge.response_context import ResponseContext
from tailrace.ledger.frame import Frame, Open
from tailrace.ledger.telemetry.histogram import Histogram
from tailrace.ledger.telemetry.traces import HEADER, TraceContext, Traces, context_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

RELAY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)
FIRST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MAX_CODES = 200
"""Maximum number of error codes that have their own counter, because origins may send any code."""
OTHER = "other"


class Answered(NamedTuple):
    """The labels of a counter of requests."""

    route: str
    method: str
    status: int
    protocol: str


class Counts:
    """The counters of one edge process, and its `traces` if tracing is configured."""

    def __init__(self, traces: Traces | None = None) -> None:
        self.traces = traces
        self.requests: Counter[Answered] = Counter()
        self.errors: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()  # number of stalls by protocol
        self.relayed = Histogram(
            "tailrace_edge_relay_seconds",
            "Seconds from a read of frames to their writes to clients, for one read in eight",
            "",
            ("",),
            RELAY_BUCKETS_S,
        )
        self.first = Histogram(
            "tailrace_edge_time_to_first_byte_seconds",
            "Seconds from a request's head to the first byte of the response's body",
            "route",
            (),
            FIRST_BUCKETS_S,
        )
        self.whole = Histogram(
            "tailrace_edge_request_seconds",
            "Seconds from a request's head to the end of the response's body",
            "route",
            (),
            REQUEST_BUCKETS_S,
        )

    def error(self, code: str) -> None:
        """Count an error that was sent to a client, as a response or as an event of a stream."""
        known = code in self.errors or len(self.errors) < MAX_CODES
        self.errors[code if known else OTHER] += 1

    def refused(self, protocol: str, code: str, status: int) -> None:
        """Count a request that was not valid or too slow, and reached no route."""
        self.requests[Answered(OTHER, OTHER, status, protocol)] += 1
        self.error(code)

    def relay(self, seconds: float) -> None:
        """Record the time from a read of a link to the end of the writes that it caused."""
        self.relayed.observe("", seconds)


A = TypeVar("A", bound=Frame)

REQUEST_ID = b"x-request-id"
PROTOCOLS = {"1.0": "h1", "1.1": "h1", "2": "h2", "3": "h3"}
"""Maps the HTTP version in ASGI to the protocol's name in the metrics; a WebSocket is `ws`."""
CLIENT_GONE = 499
"""Status that is counted for a request whose client left before the response began, as in nginx."""
NOWHERE = "other"
"""Label for requests whose route, method or protocol is not a known one."""
METHODS = frozenset("GET HEAD POST PUT DELETE OPTIONS PATCH".split())

# A client's own request id is used if it is safe in logs and headers.
_ID = re.compile(rb"[\x21-\x7e]{1,128}")

_ID_IN_A_HEAD = re.compile(rb"(?i)\nx-request-id:[ \t]*([\x21-\x7e]{1,128})[ \t]*\r?\n")

log = structlog.get_logger("tailrace.edge")


def id_field(headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[bytes, bytes]:
    """Return the `X-Request-Id` header: the request's own if it is valid, or a new one."""
    found = (value for name, value in headers if name == REQUEST_ID and _ID.fullmatch(value))
    return REQUEST_ID, next(found, None) or token_hex(16).encode()


def id_field_of(head: bytes) -> tuple[bytes, bytes]:
    """Return the `X-Request-Id` header for the head of a request that could not be parsed."""
    found = _ID_IN_A_HEAD.search(head)
    return id_field([(REQUEST_ID, found[1])] if found else ())


class RequestMetrics:
    """The telemetry of one request. Its owner calls `ended` once."""

    __slots__ = (
        *("_began_s", "_counts", "_closed", "_span", "address", "method", "protocol"),
        *("request_id", "route", "status", "stream", "trace", "writes"),
    )

    def __init__(
        self,
        counts: Counts | None,
        protocol: str,
        method: str,
        route: str,
        headers: Sequence[tuple[bytes, bytes]],
        began_s: float | None = None,
    ) -> None:
        """Begin at the time `began_s`, or now; without `counts`, nothing is counted."""
        self._began_s = perf_counter() if began_s is None else began_s
        self._counts = counts
        self._closed = False
        self.writes = 0  # number of body pieces written
        self.address = ""  # the client's address, once the access rules have determined it
        self.protocol = protocol
        self.method = method if method in METHODS else NOWHERE
        self.route = route
        self.status = CLIENT_GONE
        self.stream = ""
        self.request_id = ""
        self.trace: TraceContext | None = None
        for name, value in headers:
            if name == REQUEST_ID and _ID.fullmatch(value):
                self.request_id = value.decode("ascii")
            elif name == HEADER:
                self.trace = TraceContext.parse(value.decode("latin-1"))
        self.request_id = self.request_id or token_hex(16)
        self._span: Span | None = None
        if counts is not None and counts.traces is not None:
            said = {"http.request.method": self.method, "tailrace.request.id": self.request_id}
            self._span = counts.traces.begin(
                f"{self.method} {route}", self.trace, said, serves=True
            )
            self.trace = context_of(self._span)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that every response gets."""
        return [(REQUEST_ID, self.request_id.encode("ascii"))]

    @property
    def trace_id(self) -> str | None:
        """The trace's id for exemplars in metrics; None if the trace is not sampled."""
        return self.trace.trace_id if self.trace is not None and self.trace.sampled else None

    def answered(self, status: int) -> None:
        self.status = status

    def wrote(self, writes: int) -> None:
        """Record that `writes` pieces of the body have been written.

        Only writes 1, 2, 4, 8 and so on become events of the trace, so that a long stream has few.
        """
        first, self.writes = not self.writes, max(self.writes, writes)
        if first and self._counts is not None:
            waited_s = perf_counter() - self._began_s
            self._counts.first.observe(self.route, waited_s, trace_id=self.trace_id)
        if self._span is not None and not writes & (writes - 1):
            self._span.add_event("write", {"tailrace.writes": writes})

    def failed(self, code: str) -> None:
        """Record an error that was sent to the client."""
        if self._span is not None:
            self._span.set_attribute("error.type", code)
        if self._counts is not None:
            self._counts.error(code)

    def stalled(self) -> None:
        """Count one stall: frames wait because the client does not read."""
        if self._counts is not None:
            self._counts.stalls[self.protocol] += 1

    def ended(self) -> None:
        """Count the request and end its span: the response ended, or the client has left."""
        if self._closed:
            return
        self._closed = True
        seconds = perf_counter() - self._began_s
        if self._counts is not None:
            kind = Answered(self.route, self.method, self.status, self.protocol)
            self._counts.requests[kind] += 1
            self._counts.whole.observe(self.route, seconds, trace_id=self.trace_id)
        if self._span is not None:
            self._end(self._span)
        log.debug(
            "request",
            request_id=self.request_id,
            method=self.method,
            route=self.route,
            status=self.status,
            protocol=self.protocol,
            seconds=round(seconds, 6),
            **({"stream": self.stream} if self.stream else {}),
            **({"trace_id": self.trace.trace_id} if self.trace is not None else {}),
        )

    def _end(self, span: Span) -> None:
        span.update_name(f"{self.method} {self.route}")
        span.set_attributes(
            {
                "http.route": self.route,
                "http.response.status_code": self.status,
                "network.protocol.name": "websocket" if self.protocol == "ws" else "http",
                "tailrace.writes": self.writes,
            }
        )
        if self.stream:
            span.set_attribute("tailrace.stream.id", self.stream)
        span.end()


current: ContextVar[RequestMetrics | None] = ContextVar("metrics", default=None)
"""The telemetry of the request that the running task answers."""


def request_id() -> str:
    """Return the id of the request that the running task answers; a new one outside of requests."""
    metrics = current.get()
    return token_hex(16) if metrics is None else metrics.request_id


def traced(request: A) -> A:
    """Return the request; if it is an Open, with the trace id of the running HTTP request."""
    metrics = current.get()
    return request if metrics is None else with_trace(request, metrics)


def with_trace(request: A, metrics: RequestMetrics) -> A:
    if metrics.trace is None or not isinstance(request, Open):
        return request
    return replace(request, trace=metrics.trace.text)


def note_error(code: str) -> None:
    """Record the code of an error that the response to the current request contains."""
    metrics = current.get()
    if metrics is not None:
        metrics.failed(code)


def note_stream(stream: bytes) -> None:
    """Record the stream that the current request is about, for its log lines."""
    metrics = current.get()
    if metrics is not None and not metrics.stream:
        metrics.stream = stream.hex()
        structlog.contextvars.bind_contextvars(stream=metrics.stream)


class TelemetryMiddleware:
    """ASGI middleware that reports each request, until the response's body ends."""

    def __init__(self, app: ASGIApp, counts: Counts | None) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        protocol = PROTOCOLS.get(scope["http_version"], NOWHERE)
        metrics = RequestMetrics(self._counts, protocol, scope["method"], NOWHERE, scope["headers"])
        current.set(metrics)
        # The request id is never unbound: the task serves only this request, whose errors may be
        # logged after this middleware has ended.
        structlog.contextvars.bind_contextvars(request_id=metrics.request_id)
        context = ResponseContext.of(scope)
        context.headers += metrics.headers

        def end() -> None:
            if not context.detached:
                metrics.route = route_of(scope)
            metrics.ended()

        with context.ending(end):
            await self._app(scope, receive, _watched(metrics, scope, send))


def _watched(metrics: RequestMetrics, scope: Scope, send: Send) -> Send:
    context = ResponseContext.of(scope)

    async def watched(message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            metrics.answered(message["status"])
            message["headers"] = [*message.get("headers", ()), *metrics.headers]
        elif kind == "http.response.body" and message.get("body") and not context.reports_writes:
            metrics.route = route_of(scope)
            metrics.wrote(metrics.writes + 1)
        await send(message)

    return watched


def route_of(scope: Scope) -> str:
    """Return the path pattern of the route that handled the request."""
    endpoint: Callable[..., object] | None = scope.get("endpoint")
    app: Starlette | None = scope.get("app")
    if endpoint is None or app is None:
        return NOWHERE
    paths: dict[object, str] | None = getattr(app.state, "paths", None)
    if paths is None:
        named = [route for route in app.routes if isinstance(route, Route)]
        paths = app.state.paths = {r.endpoint: r.path.replace(":path}", "}") for r in named}
    return paths.get(endpoint, NOWHERE)
