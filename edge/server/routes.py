"""Which requests are answered past the application: the streams of `/v1/generate`.

The same routes exist in the application, with the same words for what is asked and the same rules
for who may ask. Whatever is not plain is left to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from urllib.parse import parse_qsl, unquote

from edge.access.head import Head
from edge.access.middleware import TOKEN_QUERY
from edge.access.rules import Admission, Rules
from edge.errors import error_response
from edge.generate import asked_to_read, asked_to_start
from edge.origins.link import Link
from edge.parameters import View, choose_view
from edge.server.deadlines import Deadlines
from edge.server.outlet import Handler, Headers, Outlet, Request, Turn
from edge.server.stream_reader import StreamReader
from edge.telemetry.counts import Counts
from edge.telemetry.exchange import PROTOCOLS, Exchange
from ledger.errors import TailraceError
from ledger.frame import Open, Resume

START = b"/v1/generate"
_READ = re.compile(rb"/v1/generate/([0-9a-f]{32})")


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


class StreamRoutes:
    """The `Routes` of every protocol."""

    def __init__(
        self,
        link: Link,
        turn: Turn,
        deadlines: Deadlines,
        rules: Rules,
        counts: Counts | None = None,
    ) -> None:
        self._counts = counts
        self._link = link
        self._turn = turn
        self._deadlines = deadlines
        self._rules = rules

    def claims(self, request: Request) -> bool:
        """A stream that is started or read as events or frames."""
        is_ours = (request.method == "POST" and request.path == START) or (
            request.method == "GET" and _READ.fullmatch(request.path) is not None
        )
        if not is_ours:
            return False
        try:
            return choose_view(request.text(b"accept")) is not View.JSON
        except TailraceError:
            return False

    def serve(self, request: Request, outlet: Outlet) -> Handler:
        route = "/v1/generate" if request.method == "POST" else "/v1/generate/{id}"
        protocol = PROTOCOLS[request.http_version]
        exchange = Exchange(self._counts, protocol, request.method, route, request.headers)
        has_token = TOKEN_QUERY.search(request.query) is not None
        admission = self._rules.admit(head_of(request), has_token=has_token)
        access = [*fields_of(admission.headers), *exchange.headers]
        try:
            if admission.refusal is not None:
                raise admission.refusal
            view = choose_view(admission.head.value(b"accept"))
            wanted = _wanted(request, admission)
        except TailraceError as error:
            self._rules.done(admission)
            return _refused(error, access, outlet, exchange)
        reader = StreamReader(
            self._link,
            self._turn,
            self._deadlines,
            outlet,
            view,
            wanted,
            access,
            partial(self._rules.done, admission),
            exchange,
        )
        reader.ask()
        return reader


class Refused:
    """The handler of an answer that has ended."""

    def drained(self) -> None: ...

    def gone(self) -> None: ...


def _refused(error: TailraceError, access: Headers, outlet: Outlet, exchange: Exchange) -> Refused:
    answer = error_response(error)
    outlet.start(answer.status_code, [*answer.raw_headers, *access])
    outlet.write(bytes(answer.body))
    outlet.end()
    exchange.failed(error.code)
    exchange.answered(answer.status_code)
    exchange.ended()
    return Refused()


def _wanted(request: Request, admission: Admission) -> Open | Resume:
    head, caller = admission.head, admission.caller
    if request.method == "POST":
        return asked_to_start(request.body, head.value(b"idempotency-key"), caller)
    query = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
    found = _READ.fullmatch(request.path)
    assert found is not None  # it was claimed
    tokens = [value for name, value in query if name == "token"]
    return asked_to_read(
        found[1].decode(),
        [value for name, value in query if name == "after"],
        head.value(b"last-event-id"),
        head.value(b"tailrace-token") or (tokens[-1] if tokens else None),
        caller,
    )
