"""HTTP/3 on one connection: each request to whoever answers it, and the answer to the core.

Sans-I/O. What is wrong with a request's values is said here, in one answer to it alone; what
breaks HTTP/3 itself ends the connection in the core.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from edge.errors import error_response, refusal, too_slow
from edge.quic.core import Asked, Came, Code, Core, Event, Left, TooLong
from edge.server.application import AppExchange, Application
from edge.server.deadlines import Deadline, Deadlines
from edge.server.outlet import UNSENT_BYTES, Handler, Headers, Request, Routes, Turn
from edge.telemetry.counts import Counts
from edge.telemetry.exchange import id_field
from ledger.errors import CallerError, TailraceError

MAX_RESETS = 200
"""Requests that a client may have reset in a short time; to undo them costs more than to reset."""
RESETS_PER_S = 20.0
"""So many of those are forgotten in a second."""

_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_TARGET = re.compile(rb"(/[!\"$-~]*|\*)")


@dataclass(frozen=True, slots=True)
class Behind:
    """What is behind every connection."""

    turn: Turn
    routes: Routes
    application: Application
    headers: Callable[[], Headers]
    """Of every answer."""
    deadlines: Deadlines
    max_body_bytes: int
    """Of a request that a route answers; what is longer is the application's to refuse."""
    body_timeout_s: float
    """For a request's body to come, after its head."""
    stalled_timeout_s: float
    """A client that takes nothing of a response for so long gets no more of it."""
    counts: Counts | None = None


class Http3:
    """Give it the core's events; `touch` is called when the core has something to send."""

    def __init__(
        self,
        core: Core,
        behind: Behind,
        peer: tuple[str, int],
        server: tuple[str, int] | None,
        touch: Callable[[], None],
    ) -> None:
        self.core = core
        self.behind = behind
        self.peer = peer
        self.server = server
        self.touch = touch
        self.starved: dict[Exchange, None] = {}  # that want to be told of room
        self._exchanges: dict[int, Exchange] = {}
        self._resets = 0.0
        self._resets_at = 0.0
        self._draining = False

    @property
    def idle(self) -> bool:
        """No request is under way."""
        return not self._exchanges

    def handle(self, event: Event, now: float) -> None:
        if isinstance(event, Asked):
            self._ask(event)
        elif isinstance(event, Came):
            if (exchange := self._exchanges.get(event.stream)) is not None:
                exchange.came(event.data, event.ended)
        elif isinstance(event, TooLong):
            Exchange(self, event.stream, b"").refuse(refusal(431))
        elif isinstance(event, Left):
            if (exchange := self._exchanges.pop(event.stream, None)) is not None:
                exchange.gone()
            self._count_reset(now)

    def moved(self) -> None:
        """Something has been sent, or acknowledged: who waited for room may have it."""
        for exchange in list(self.starved):
            if exchange.room() > 0:
                del self.starved[exchange]
                exchange.drained()

    def drain(self) -> None:
        """No new requests; those that are under way go on."""
        if not self._draining:
            self._draining = True
            self.core.go_away()
            self.touch()

    def gone(self) -> None:
        """The connection is over."""
        self.starved.clear()
        while self._exchanges:
            self._exchanges.popitem()[1].gone()

    def over(self, exchange: Exchange) -> None:
        """Its response has ended, in whatever way."""
        self.starved.pop(exchange, None)
        self._exchanges.pop(exchange.stream, None)
        self.touch()

    def _ask(self, event: Asked) -> None:
        if self._draining:
            self.core.reset(event.stream, Code.REQUEST_REJECTED)
            self.touch()
            return
        fields = dict(event.headers)
        exchange = Exchange(self, event.stream, fields.get(b":method", b""))
        self._exchanges[event.stream] = exchange
        try:
            request = read_head(event.headers, self.peer)
        except TailraceError as error:
            exchange.refuse(error)
        else:
            exchange.ask(request, event.ended)

    def _count_reset(self, now: float) -> None:
        forgotten = (now - self._resets_at) * RESETS_PER_S
        self._resets, self._resets_at = max(0.0, self._resets - forgotten) + 1, now
        if self._resets > MAX_RESETS:
            self.core.close(Code.EXCESSIVE_LOAD, "too many requests were reset")


class Exchange:
    """One request and its response: an `Outlet`."""

    __slots__ = (
        *("_ahead", "_app", "_body", "_claimed", "_deadline", "_handler", "_http3", "_method"),
        *("_over", "_started", "stream"),
    )

    def __init__(self, http3: Http3, stream: int, method: bytes) -> None:
        self.stream = stream
        self._http3 = http3
        self._method = method
        self._claimed: Request | None = None  # by a route, and its body is awaited
        self._body: bytearray | None = bytearray()  # None: all of it has come
        self._ahead = 0  # bytes of it that were reported as read before the application had them
        self._app: AppExchange | None = None
        self._handler: Handler | None = None
        self._started = False
        self._over = False
        # Of the body, and once that is whole of a client that takes nothing of the response.
        self._deadline = Deadline(http3.behind.deadlines, self._overdue)

    # ---- the request ----

    def ask(self, request: Request, ended: bool) -> None:
        behind = self._http3.behind
        if behind.routes.claims(request):
            self._claimed = request
        else:
            self._hand_over(request)
        if not ended:
            self._deadline.set(behind.body_timeout_s)
        self.came(b"", ended)

    def came(self, data: bytes, ended: bool) -> None:
        """A piece of the request's body."""
        if self._over or self._body is None:
            return
        body = self._body
        if ended:
            self._body = None
            self._deadline.clear()
        if self._app is not None:
            self._app.feed(data, ended)
            return
        request = self._claimed
        assert request is not None
        body += data
        self._read(len(data))
        if len(body) > self._http3.behind.max_body_bytes:
            app = self._hand_over(replace(request, body=bytes(body)))
            app.feed(bytes(body), ended)
            body.clear()
        elif ended:
            self._serve(request, bytes(body))

    def _serve(self, request: Request, body: bytes) -> None:
        whole = replace(request, body=body)
        handler = self._http3.behind.routes.serve(whole, self)
        if handler is None:
            self._hand_over(whole).feed(body, True)
        elif not self._over:
            self._handler = handler

    def _hand_over(self, request: Request) -> AppExchange:
        self._ahead = len(request.body)
        self._claimed = None
        http3 = self._http3
        app = http3.behind.application.ask(request, self, http3.server, self._taken)
        self._app = self._handler = app
        return app

    def _taken(self, size: int) -> None:
        """The application has so many bytes more."""
        ahead = min(size, self._ahead)
        self._ahead -= ahead
        self._read(size - ahead)

    def _read(self, size: int) -> None:
        if size:
            self._http3.core.consumed(self.stream, size)
            self._http3.touch()

    def _overdue(self) -> None:
        if self._handler is not None:
            handler, self._handler, self._app = self._handler, None, None
            handler.gone()
        if self._started:
            self.reset()
        else:
            self.refuse(too_slow("body"))

    def refuse(self, error: TailraceError) -> None:
        """Answer it here."""
        if self._http3.behind.counts is not None:
            self._http3.behind.counts.refused("h3", error.code, error.status)
        answer = error_response(error)
        self.start(error.status, [*answer.raw_headers, id_field()])
        if self._method != b"HEAD":
            self.write(bytes(answer.body))
        self.end()

    # ---- what the connection says ----

    def drained(self) -> None:
        if self._body is None:
            self._deadline.clear()
        if self._handler is not None:
            self._handler.drained()

    def gone(self) -> None:
        """The client has left."""
        self._over = True
        self._deadline.clear()
        self._http3.starved.pop(self, None)
        handler, self._handler, self._app = self._handler, None, None
        if handler is not None:
            handler.gone()

    # ---- an Outlet ----

    def start(self, status: int, headers: Headers) -> None:
        if not self._over:
            self._started = True
            head = [(b":status", b"%d" % status), *headers, *self._http3.behind.headers()]
            self._http3.core.start(self.stream, head)
            self._http3.touch()

    def write(self, data: bytes) -> None:
        if not self._over:
            self._http3.core.write(self.stream, data)
            self._http3.touch()

    def end(self) -> None:
        if not self._over:
            self._over = True
            self._deadline.clear()
            self._http3.core.end(self.stream)
            if self._body is not None:
                self._http3.core.stop(self.stream)
            self._http3.over(self)

    def reset(self) -> None:
        if not self._over:
            self._over = True
            self._deadline.clear()
            self._http3.core.reset(self.stream, Code.INTERNAL_ERROR)
            self._http3.over(self)

    def room(self) -> int:
        if self._over:
            return 0
        room = self._http3.core.room(self.stream, UNSENT_BYTES)
        if room < 1 and self not in self._http3.starved:
            self._http3.starved[self] = None
            if self._body is None:
                self._deadline.set(self._http3.behind.stalled_timeout_s)
        return room


def read_head(fields: Headers, peer: tuple[str, int] | None) -> Request:
    """The request that a field section is the head of. Raises CallerError."""
    pseudo = {name: value for name, value in fields if name.startswith(b":")}
    method = pseudo.get(b":method", b"")
    if _METHOD.fullmatch(method) is None:
        raise CallerError("not a method", field=":method")
    if method == b"CONNECT":
        raise TailraceError("nothing is connected to from here", code="http_error", status=501)
    target = pseudo.get(b":path", b"")
    if _TARGET.fullmatch(target) is None:
        raise CallerError(
            "not a path", field=":path", hint="ASCII, from / on, all else percent-encoded"
        )
    if pseudo.get(b":scheme") != b"https":
        raise CallerError("not a scheme that is served here", field=":scheme", hint="https")
    path, _, query = target.partition(b"?")
    return Request(
        method=method.decode("ascii"),
        path=path,
        query=query,
        headers=_regular(fields, pseudo.get(b":authority", b"")),
        scheme="https",
        peer=peer,
        http_version="3",
    )


def _regular(fields: Headers, authority: bytes) -> Headers:
    """The fields that are no pseudo-headers, with `host` for `:authority`, and one `cookie`."""
    hosts = {value for name, value in fields if name == b"host"} | {authority}
    if len(hosts) > 1:
        raise CallerError("Host and :authority differ", field="Host")
    cookies = [value for name, value in fields if name == b"cookie"]
    headers = [(b"host", authority)]
    headers += [
        (name, value)
        for name, value in fields
        if not name.startswith(b":") and name not in (b"host", b"cookie")
    ]
    if cookies:
        headers.append((b"cookie", b"; ".join(cookies)))  # RFC 9114, 4.2.1
    return headers
