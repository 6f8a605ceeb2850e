"""Which requests are answered past the application: those that are answered by a stream.

The same routes exist in the application, with the same words for what is asked and the same rules
for who may ask. Whatever is not plain is left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote

from edge.access.head import Head
from edge.access.middleware import TOKEN_QUERY
from edge.access.rules import Rules
from edge.body import ENCODERS
from edge.errors import error_response
from edge.generate import asked_to_read, asked_to_start
from edge.openai.fast import OPENAI_ROUTES
from edge.origins.link import Link, credited
from edge.parameters import View, choose_view
from edge.server.deadlines import Deadlines
from edge.server.fast_route import FastRoute, Wanted, query_of
from edge.server.outlet import Handler, Headers, Outlet, Request, Turn
from edge.server.stream_reader import StreamReader
from edge.telemetry.counts import Counts
from edge.telemetry.exchange import PROTOCOLS, Exchange, with_trace
from ledger.errors import TailraceError
from ledger.frame import Caller


def head_of(request: Request, scheme: str | None = None) -> Head:
    """What the rules look at; `scheme` is another than the request's, a WebSocket's."""
    return Head(
        method=request.method,
        path=unquote(request.path.decode("ascii")),
        scheme=scheme or request.scheme,
        address=request.peer[0] if request.peer else "",
        headers=tuple(request.headers),
    )


def fields_of(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


@dataclass(frozen=True, slots=True)
class StreamRoutes:
    """The `Routes` of every protocol."""

    link: Link
    turn: Turn
    deadlines: Deadlines
    rules: Rules
    counts: Counts | None = None

    def claims(self, request: Request) -> bool:
        """A stream that is started or read as events or frames."""
        return _route_of(request) is not None

    def serve(self, request: Request, outlet: Outlet) -> Handler | None:
        route = _route_of(request)
        if route is None or not route.is_streamed(request):
            return None
        protocol = PROTOCOLS[request.http_version]
        name = route.name(request)
        exchange = Exchange(self.counts, protocol, request.method, name, request.headers)
        has_token = TOKEN_QUERY.search(request.query) is not None
        admission = self.rules.admit(head_of(request), has_token=has_token)
        access = [*fields_of(admission.headers), *exchange.headers]
        try:
            if admission.refusal is not None:
                raise admission.refusal
            wanted = route.wanted(request, admission.head, admission.caller)
        except TailraceError as error:
            self.rules.done(admission)
            return _refused(error, admission.head.path, access, outlet, exchange)
        if wanted is None:
            self.rules.done(admission)
            return None
        reader = StreamReader(
            self.link,
            self.turn,
            self.deadlines,
            outlet,
            wanted.encoder,
            with_trace(credited(wanted.request), exchange),
            [*access, *fields_of(wanted.headers)],
            partial(self.rules.done, admission),
            exchange,
        )
        reader.ask()
        return reader


class Refused:
    """The handler of an answer that has ended."""

    def drained(self) -> None: ...

    def gone(self) -> None: ...


def _refused(
    error: TailraceError, path: str, access: Headers, outlet: Outlet, exchange: Exchange
) -> Refused:
    answer = error_response(error, path)
    outlet.start(answer.status_code, [*answer.raw_headers, *access])
    outlet.write(bytes(answer.body))
    outlet.end()
    exchange.failed(error.code)
    exchange.answered(answer.status_code)
    exchange.ended()
    return Refused()


class NativeRoute(FastRoute):
    """`/v1/generate`, in the two views that are streams."""

    def __init__(self) -> None:
        super().__init__("/v1/generate", "[0-9a-f]{32}")

    def claims(self, request: Request) -> bool:
        try:
            return super().claims(request) and (
                choose_view(request.text(b"accept")) is not View.JSON
            )
        except TailraceError:
            return False

    def is_streamed(self, request: Request) -> bool:
        return True

    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted:
        encoder = ENCODERS[choose_view(head.value(b"accept"))]()
        if request.method == "POST":
            key, media_type = head.value(b"idempotency-key"), head.value(b"content-type")
            return Wanted(asked_to_start(request.body, key, caller, media_type), encoder)
        query = query_of(request)
        tokens = [value for name, value in query if name == "token"]
        resume = asked_to_read(
            self.named(request),
            [value for name, value in query if name == "after"],
            head.value(b"last-event-id"),
            head.value(b"tailrace-token") or (tokens[-1] if tokens else None),
            caller,
        )
        return Wanted(resume, encoder)


ROUTES: tuple[FastRoute, ...] = (NativeRoute(), *OPENAI_ROUTES)


def _route_of(request: Request) -> FastRoute | None:
    return next((route for route in ROUTES if route.claims(request)), None)
