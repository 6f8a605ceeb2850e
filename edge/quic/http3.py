"""HTTP/3 on one connection: each request to whoever answers it, and the answer to the core.

Sans-I/O. What is wrong with a request's values is said here, in one answer to it alone; what
breaks HTTP/3 itself ends the connection in the core.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tailrace.edge.errors import refusal
from tailrace.edge.quic.core import Asked, Came, Code, Core, Event, Left, TooLong
from tailrace.edge.server.deadlines import Deadline
from tailrace.edge.server.dispatch import RequestDispatcher, ServerContext
from tailrace.edge.server.interfaces import UNSENT_BYTES, Headers, Request
from tailrace.ledger.errors import CallerError, TailraceError
from tailrace.ledger.flow.token_bucket import Bucket

MAX_RESETS = 200
"""Requests that a client may have reset in a short time; to undo them costs more than to reset."""
RESETS_PER_S = 20.0
"""Points of the flood budget that are given back each second."""
MAX_REFUSED = 200
"""Maximum requests that a client may send in a short time which are refused at once."""
REFUSED_PER_S = 20.0
"""So many of those are forgotten in a second."""

_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_TARGET = re.compile(rb"(/[!\"$-~]*|\*)")


class Http3:
    """Give it the core's events; `mark_dirty` is called when the core has something to send."""

    def __init__(
        self,
        core: Core,
        context: ServerContext,
        peer: tuple[str, int],
        server: tuple[str, int] | None,
        mark_dirty: Callable[[], None],
    ) -> None:
        self.core = core
        self.context = context
        self.peer = peer
        self.server = server
        self.mark_dirty = mark_dirty
        self.starved: dict[Exchange, None] = {}  # that want to be told of room
        self._exchanges: dict[int, Exchange] = {}
        self._resets = Bucket(RESETS_PER_S, MAX_RESETS, 0.0)
        self._refused = Bucket(REFUSED_PER_S, MAX_REFUSED, 0.0)
        self._refused_now = 0  # while an event is handled
        self._draining = False

    @property
    def idle(self) -> bool:
        """No request is under way."""
        return not self._exchanges

    def handle(self, event: Event, now: float) -> None:
        self._refused_now = 0
        if isinstance(event, Asked):
            self._ask(event)
        elif isinstance(event, Came):
            if (exchange := self._exchanges.get(event.stream)) is not None:
                exchange.came(event.data, event.ended)
        elif isinstance(event, TooLong):
            self.context.refuse(Exchange(self, event.stream), "h3", "", refusal(431))
        elif isinstance(event, Left):
            if (exchange := self._exchanges.pop(event.stream, None)) is not None:
                exchange.disconnected()
            if self._resets.take(1, now) > 0:
                self.core.close(Code.EXCESSIVE_LOAD, "too many requests were reset")
        if self._refused_now and self._refused.take(self._refused_now, now) > 0:
            self.core.close(Code.EXCESSIVE_LOAD, "too many requests were refused")

    def moved(self) -> None:
        """Something has been sent, or acknowledged: who waited for room may have it."""
        for exchange in list(self.starved):
            if exchange.writable_bytes() > 0:
                del self.starved[exchange]
                exchange.drained()

    def drain(self) -> None:
        """No new requests; those that are under way go on."""
        if not self._draining:
            self._draining = True
            self.core.go_away()
            self.mark_dirty()

    def disconnected(self) -> None:
        """The connection is over."""
        self.starved.clear()
        while self._exchanges:
            self._exchanges.popitem()[1].disconnected()

    def over(self, exchange: Exchange) -> None:
        """Its response has ended, in whatever way."""
        self.starved.pop(exchange, None)
        self._exchanges.pop(exchange.stream, None)
        self._refused_now += exchange.is_refusal
        self.mark_dirty()

    def _ask(self, event: Asked) -> None:
        if self._draining:
            self.core.reset(event.stream, Code.REQUEST_REJECTED)
            self.mark_dirty()
            return
        exchange = self._exchanges[event.stream] = Exchange(self, event.stream)
        try:
            request = read_head(event.headers, self.peer)
        except TailraceError as error:
            method = dict(event.headers).get(b":method", b"")
            self.context.refuse(exchange, "h3", method.decode("latin-1"), error)
        else:
            exchange.ask(request, event.ended)


class Exchange:
    """One request and its response: a `ResponseWriter`."""

    __slots__ = ("_deadline", "_dispatcher", "_http3", "_over", "is_refusal", "started", "stream")

    def __init__(self, http3: Http3, stream: int) -> None:
        self.stream = stream
        self.started = False
        self.is_refusal = False
        self._http3 = http3
        self._dispatcher: RequestDispatcher | None = None
        self._over = False
        self._deadline = Deadline(http3.context.deadlines, self._stalled)

    # ---- the request ----

    def ask(self, request: Request, ended: bool) -> None:
        http3 = self._http3
        self._dispatcher = RequestDispatcher(http3.context, request, self, http3.server, self._read)
        self._dispatcher.begin(ended)

    def came(self, data: bytes, ended: bool) -> None:
        """A piece of the request's body."""
        if self._dispatcher is not None and not self._over:
            self._dispatcher.came(data, ended)

    def _read(self, size: int) -> None:
        if size:
            self._http3.core.consumed(self.stream, size)
            self._http3.mark_dirty()

    # ---- what the connection says ----

    def drained(self) -> None:
        self._deadline.clear()
        if self._dispatcher is not None:
            self._dispatcher.drained()

    def disconnected(self) -> None:
        """The client has left."""
        self._http3.starved.pop(self, None)
        dispatcher = self._ended()
        if dispatcher is not None:
            dispatcher.disconnected()

    def _ended(self) -> RequestDispatcher | None:
        """Who answers forgets this one and is forgotten: garbage that would wait to be found."""
        self._over = True
        self._deadline.end()
        dispatcher, self._dispatcher = self._dispatcher, None
        return dispatcher

    def _stalled(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.disconnected()
        self.reset()

    # ---- a ResponseWriter ----

    def start(self, status: int, headers: Headers) -> None:
        if not self._over:
            self.started = True
            self.is_refusal = status >= 400
            head = [(b":status", b"%d" % status), *headers, *self._http3.context.headers()]
            self._http3.core.start(self.stream, head)
            self._http3.mark_dirty()

    def write(self, data: bytes) -> None:
        if not self._over:
            self._http3.core.write(self.stream, data)
            self._http3.mark_dirty()

    def end(self) -> None:
        if not self._over:
            dispatcher = self._ended()
            self._http3.core.end(self.stream)
            if dispatcher is None or not dispatcher.is_whole:
                self._http3.core.stop(self.stream)
            self._http3.over(self)

    def reset(self) -> None:
        if not self._over:
            self._ended()
            self._http3.core.reset(self.stream, Code.INTERNAL_ERROR)
            self._http3.over(self)

    def writable_bytes(self) -> int:
        if self._over:
            return 0
        room = self._http3.core.room(self.stream, UNSENT_BYTES)
        if room < 1 and self not in self._http3.starved:
            self._http3.starved[self] = None
            if self._dispatcher is not None and self._dispatcher.is_whole:
                self._deadline.set(self._http3.context.stalled_timeout_s)
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
