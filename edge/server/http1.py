"""HTTP/1.1 on a connection: whose each request is, and how long it may take to come.

A request that a route claims is read here, by h11, and answered past the application; every other,
and every doubtful one, is handed on as the bytes that came, one at a time, so that the next
request of the connection is looked at anew. What is handed on never has two readings: the head is
refused that another server might read otherwise, and bytes behind its request stay here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import h11

from edge.access.middleware import TOKEN_QUERY
from edge.errors import refusal, too_slow
from edge.server.deadlines import Deadline
from edge.server.http2 import Http2
from edge.server.outlet import Handler, Headers, Request, Speaker, Wire
from edge.server.rest import AppRequest
from edge.server.routes import head_of
from edge.server.websocket import SESSION_PATH, WebSocket, accepts
from edge.server.wire import KEEP_ALIVE_TIMEOUT_S, MAX_WAITING_BYTES, Shared
from ledger.errors import TailraceError

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
H2_PREFACE = b"PRI * HTTP/2.0\r\n"

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_FOLDED = re.compile(rb"\n[ \t]")
_FRAMING = re.compile(
    rb"\n(content-length|transfer-encoding|upgrade|expect)[ \t]*:[ \t]*([^\r\n]*)", re.IGNORECASE
)
_UPGRADE = re.compile(rb"\nupgrade[ \t]*:[^\n]*(?=\n)", re.IGNORECASE)
SESSION = b"GET " + SESSION_PATH
_MAYBE_CLAIMED = re.compile(rb"(?:GET|POST) /v1/")
_WITHOUT_BODY = frozenset((204, 304))
LAST_CHUNK = b"0\r\n\r\n"
_DIGITS = re.compile(rb"[0-9]{1,15}")

Framing = dict[bytes, bytes]
"""The headers that say where a request ends, or that it is no plain one; names in lower case."""


class Claimed(NamedTuple):
    """A request that a route may answer, once its body is whole."""

    request: Request
    connection: h11.Connection
    head: bytes
    framing: Framing
    body_bytes: int


class Http1:
    """The `Speaker` of HTTP/1.1."""

    def __init__(self, wire: Wire, shared: Shared) -> None:
        self._wire = wire
        self._shared = shared
        self._buffer = bytearray()
        self._scanned = 0  # bytes of it in which no head ends
        self._claimed: Claimed | None = None  # its head is read, its body awaited
        self._due: int | None = 0  # bytes of its request that the application still gets; None: all
        self._app: AppRequest | None = None
        self._outlet: Http1Outlet | None = None
        self._handler: Handler | None = None
        self._advancing = False
        self._closed = False
        self._draining = False
        self._deadline = Deadline(shared.deadlines, self._overdue)
        self._deadline.set(shared.config.header_timeout_s)

    # ---- what the connection says ----

    def receive(self, data: bytes) -> None:
        if self._closed:
            return  # lingering
        if self._app is not None and self._due is None:
            self._app.receive(data)
            return
        if not (self._buffer or self._busy):
            self._deadline.set(self._shared.config.header_timeout_s)
        self._buffer += data
        self._advance()
        if len(self._buffer) > MAX_WAITING_BYTES and self._claimed is None and self._busy:
            self._wire.pause_reading()

    def drained(self) -> None:
        if self._app is not None:
            self._app.drained()
        elif self._handler is not None:
            self._handler.drained()

    def gone(self) -> None:
        self._closed = True
        self._deadline.end()
        if self._app is not None:
            self._app.gone()
        if self._handler is not None:
            handler, self._handler = self._handler, None
            handler.gone()
        self._app = self._outlet = None  # they know this one: garbage that would wait to be found

    def drain(self) -> None:
        self._draining = True
        if not (self._busy or self._buffer):
            self._close()

    # ---- time ----

    def _overdue(self) -> None:
        if self._app is not None:
            if not self._app.body_is_whole:
                self._app.cut(too_slow("body"))
        elif self._claimed is not None:
            self._refuse(too_slow("body"), self._claimed.head)
        elif self._buffer:
            self._refuse(too_slow("head"))
        else:
            self._close()  # nobody waits for an answer

    # ---- requests ----

    @property
    def _busy(self) -> bool:
        """Whether a request has come, and its answer not ended."""
        return not (self._claimed is None and self._app is None and self._outlet is None)

    def _advance(self) -> None:
        """Do with what has come all that can be done; not within itself."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while not self._closed and self._step():
                pass
        finally:
            self._advancing = False

    def _step(self) -> bool:
        """Whether there may be more to do."""
        if self._claimed is not None:
            return self._body(self._claimed)
        if self._app is not None:
            self._feed(self._app)
            return False
        return self._outlet is None and bool(self._buffer) and self._head()

    def _head(self) -> bool:
        while self._buffer.startswith(b"\r\n"):  # RFC 9112, 2.2
            del self._buffer[:2]
        found = _END_OF_HEAD.search(self._buffer, max(0, self._scanned - 2))
        self._scanned = len(self._buffer)
        if found is None:
            if self._scanned > MAX_HEAD_BYTES:
                self._refuse(refusal(431))
            elif self._scanned and self._buffer[0] < 0x21:
                self._refuse(refusal(400))  # TLS on the plain port, say
            return False
        self._scanned = 0
        head = bytes(self._buffer[: found.end()])
        if len(head) > MAX_HEAD_BYTES or head.count(b"\n") > MAX_HEADERS + 2:
            self._refuse(refusal(431))
            return False
        if head.startswith(H2_PREFACE):
            self._give_way(Http2(self._wire, self._shared, bytes(self._buffer)))
            return False
        if _FOLDED.search(head):
            self._refuse(refusal(400))
            return False
        self._begin(head)
        return True

    def _begin(self, head: bytes) -> None:
        """A whole head: a session's, a route's, or the application's."""
        framing = {name.lower(): value for name, value in _FRAMING.findall(head)}
        if head.startswith(SESSION) and b"upgrade" in framing and self._upgrade(head):
            return
        self._deadline.set(self._shared.config.body_timeout_s)
        self._claimed = self._claim(head, framing) if _MAYBE_CLAIMED.match(head) else None
        if self._claimed is None:
            self._hand_over(head, framing)

    def _upgrade(self, head: bytes) -> bool:
        """Whether it is a session's opening handshake, and accepted."""
        event = _parsed(head)[1]
        if event is None:
            return False
        request = self._request(event)
        accepted = accepts(request)
        scheme = "wss" if self._wire.secure else "ws"
        if accepted is None or request.path != SESSION_PATH:
            return False
        has_token = TOKEN_QUERY.search(request.query) is not None
        admission = self._shared.rules.admit(head_of(request, scheme), has_token=has_token)
        if admission.refusal is not None:
            return False
        early = bytes(self._buffer[len(head) :])
        headers = self._shared.headers()
        speaker = WebSocket(self._wire, self._shared, request, accepted, admission, headers)
        self._give_way(speaker)
        if early:
            speaker.receive(early)
        return True

    def _claim(self, head: bytes, framing: Framing) -> Claimed | None:
        """The request, if a route claims it and it is a plain one."""
        length = framing.get(b"content-length", b"0")
        if framing.keys() - {b"content-length"} or _DIGITS.fullmatch(length) is None:
            return None
        connection, event = _parsed(head)
        if event is None:
            return None
        request = self._request(event)
        fits = int(length) <= self._shared.config.max_body_bytes
        if not (fits and self._shared.routes.claims(request)):
            return None
        return Claimed(request, connection, head, framing, int(length))

    def _request(self, event: h11.Request) -> Request:
        path, _, query = event.target.partition(b"?")
        return Request(
            method=event.method.decode("ascii"),
            path=path,
            query=query,
            headers=list(event.headers),
            scheme="https" if self._wire.secure else "http",
            peer=self._wire.peer,
            http_version="1.1",
        )

    def _body(self, claimed: Claimed) -> bool:
        """Answer a claimed request whose body is whole."""
        begins, ends = len(claimed.head), len(claimed.head) + claimed.body_bytes
        if len(self._buffer) < ends:
            return False
        self._claimed = None
        outlet = self._outlet = Http1Outlet(self, self._wire, self._shared, claimed.connection)
        body = bytes(self._buffer[begins:ends])
        del self._buffer[:ends]
        handler = self._shared.routes.serve(replace(claimed.request, body=body), outlet)
        if handler is None:
            self._outlet = None
            self._buffer[:0] = claimed.head + body
            self._hand_over(claimed.head, claimed.framing)
            return True
        if self._outlet is outlet:  # it has not ended already
            self._deadline.clear()
            self._handler = handler
        return True

    def _hand_over(self, head: bytes, framing: Framing) -> None:
        """Let the application answer, which gets this request and nothing behind it."""
        del self._buffer[: len(head)]
        length = framing.get(b"content-length", b"0")
        known = {b"content-length", b"expect", b"upgrade"}
        is_plain = framing.keys() <= known and _DIGITS.fullmatch(length)
        self._due = int(length) if is_plain else None
        self._app = AppRequest(self._shared.rest, self._wire, self._answered)
        # RFC 9110, 7.8: a server may go on as if nobody had asked. To HTTP/2 there is no way here,
        # and sessions never come so far: a WebSocket of Hypercorn's would have no limits.
        self._app.receive(_UPGRADE.sub(b"", head))

    def _feed(self, app: AppRequest) -> None:
        """What there is of its request."""
        size = len(self._buffer) if self._due is None else min(self._due, len(self._buffer))
        if size:
            app.receive(bytes(self._buffer[:size]))
            del self._buffer[:size]
        if self._due is not None:
            self._due -= size

    # ---- ends ----

    def _answered(self, rest: bytes) -> None:
        """The application's response has ended; `rest` is not its request's."""
        self._app = None
        self._buffer[:0] = rest
        self._next()

    def ended(self, closes: bool) -> None:
        """For the outlet: the response is whole, or broken off."""
        self._outlet = self._handler = None
        if closes:
            self._close()
        else:
            self._next()

    def _next(self) -> None:
        if self._closed:
            return
        self._wire.resume_reading()
        if self._draining and not self._buffer:
            self._close()
            return
        waits_s = self._shared.config.header_timeout_s if self._buffer else KEEP_ALIVE_TIMEOUT_S
        self._deadline.set(waits_s)
        self._advance()
        self._shared.turn.flush()

    def _refuse(self, error: TailraceError, head: bytes | None = None) -> None:
        """With `head`, that of the request; else it is what has come."""
        if self._shared.counts is not None:
            self._shared.counts.refused("h1", error.code, error.status)
        began = bytes(self._buffer[:MAX_HEAD_BYTES]) if head is None else head
        self._wire.write(self._shared.rest.error_answer(error, began))
        self._closed = True
        self._deadline.clear()
        self._wire.close(lingers=True)

    def _close(self) -> None:
        self._closed = True
        self._deadline.clear()
        self._wire.close()

    def _give_way(self, speaker: Speaker) -> None:
        self._closed = True
        self._deadline.end()
        self._buffer.clear()
        self._wire.speaker = speaker


class Http1Outlet:
    """One response, as chunks unless its length is declared."""

    __slots__ = (
        *("_chunked", "_closes", "_connection", "_head", "_http1", "_open", "_shared", "_wire"),
        "room",
    )

    def __init__(
        self, http1: Http1, wire: Wire, shared: Shared, connection: h11.Connection
    ) -> None:
        self._http1 = http1
        self._wire = wire
        self.room = wire.room
        self._shared = shared
        self._connection: h11.Connection | None = connection
        self._head = b""  # until it goes out with what comes first
        self._chunked = True
        self._closes = False
        self._open = True

    def start(self, status: int, headers: Headers) -> None:
        assert self._connection is not None  # it is started once
        connection, self._connection = self._connection, None
        fields = [*headers, *self._shared.headers()]
        response = h11.Response(status_code=status, headers=fields)
        self._head = connection.send(response) or b""
        self._chunked = status not in _WITHOUT_BODY and all(
            name != b"content-length" for name, _ in headers
        )
        self._closes = b"\r\nconnection: close\r\n" in self._head.lower()
        self._shared.turn.touch(self)

    def flush(self) -> None:
        """The head by itself, if nothing of the body has come in this turn."""
        if self._open and self._head:
            head, self._head = self._head, b""
            self._wire.write(head)

    def write(self, data: bytes) -> None:
        if not (self._open and data):
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        self._wire.write(data)

    def end(self) -> None:
        if self._open:
            self._open = False
            self._wire.write(self._head + (LAST_CHUNK if self._chunked else b""))
            self._http1.ended(self._closes)

    def reset(self) -> None:
        """What was written still leaves, and the last chunk is missing."""
        if self._open:
            self._open = False
            self._http1.ended(True)


def _parsed(head: bytes) -> tuple[h11.Connection, h11.Request | None]:
    """The request of HTTP/1.1 that a head is; None where it is none, or another version's."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return connection, None
    if isinstance(event, h11.Request) and event.http_version == b"1.1":
        return connection, event
    return connection, None
