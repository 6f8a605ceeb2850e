"""HTTP/1.1 on a connection: whose each request is, and how long it may take to come.

A request that a route claims is read here, by h11, and answered past the application; every other,
and every doubtful one, is handed on as the bytes that came, one at a time, so that the next
request of the connection is looked at anew. What is handed on never has two readings: the head is
refused that another server might read otherwise, and bytes behind its request stay here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import h11

from tailrace.edge.access.middleware import TOKEN_QUERY
from tailrace.edge.errors import refusal, too_slow
from tailrace.edge.server.chunks import ChunkedBody
from tailrace.edge.server.context import KEEP_ALIVE_TIMEOUT_S, TcpContext
from tailrace.edge.server.deadlines import Deadline
from tailrace.edge.server.flood import REFUSED_POINTS, FloodBudget
from tailrace.edge.server.http2 import Http2
from tailrace.edge.server.interfaces import (
    Admitted,
    ConnectionProtocol,
    Headers,
    Request,
    ResponseSource,
    Transport,
)
from tailrace.edge.server.rest import AppRequest
from tailrace.edge.server.routes import head_of
from tailrace.edge.server.websocket import SESSION_PATH, WebSocket, accepts
from tailrace.ledger.errors import TailraceError

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
MAX_EMPTY_LINES = 8
"""Maximum empty lines before a request. RFC 9112, 2.2 asks for one to be ignored."""
H2_PREFACE = b"PRI * HTTP/2.0\r\n"
VERSIONS = (b"1.0", b"1.1")

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_FOLDED = re.compile(rb"\n[ \t]")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/([0-9]\.[0-9])\r\n")
_ABSOLUTE = re.compile(rb"https?://([^/?#@\s]+)(/[^#\s]*|\?[^#\s]*)?", re.IGNORECASE)
_HOST = re.compile(rb"\nhost[ \t]*:[^\r\n]*", re.IGNORECASE)
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

    admitted: Admitted
    writer: Http1Writer
    head: bytes
    framing: Framing
    body_bytes: int


class Http1:
    """The `ConnectionProtocol` of HTTP/1.1."""

    def __init__(self, transport: Transport, context: TcpContext) -> None:
        self._transport = transport
        self._context = context
        self._buffer = bytearray()
        self._scanned = 0  # bytes of it in which no head ends
        self._head_began = False  # something of the next head has come, if only empty lines
        self._empty_lines = 0  # before it
        self._claimed: Claimed | None = None  # its head is read, its body awaited
        self._counted = 0  # bytes of that body that count for the budget of all
        self._skipped = 0  # bytes of a body that are still to come, of a request that was refused
        self._due: int | None = 0  # bytes of its request that the application still gets; None: all
        self._chunks: ChunkedBody | None = None  # tells where those end
        self._app: AppRequest | None = None
        self._writer: Http1Writer | None = None
        self._source: ResponseSource | None = None
        self._advancing = False
        self._unread = False  # the client leaves its answers unread: it gets no more
        self._closed = False
        self._draining = False
        self._flood = FloodBudget(context.deadlines.clock_s)
        self._flooded = False  # it owes too much: the next answer is the last
        self._deadline = Deadline(context.deadlines, self._overdue)
        self._deadline.set(context.config.header_timeout_s)

    # ---- what the connection says ----

    def receive(self, data: bytes) -> None:
        if self._closed:
            return  # lingering
        if not (self._head_began or self._busy or self._skipped):
            self._head_began = True
            self._deadline.set(self._context.config.header_timeout_s)
        self._buffer += data
        self._advance()
        if self._holds:
            self._transport.pause_reading()

    def drained(self) -> None:
        if self._app is not None:
            self._app.drained()
        elif self._source is not None:
            self._source.drained()
        elif self._unread:
            self._unread = False
            self._transport.resume_reading()
            self._advance()

    def disconnected(self) -> None:
        self._closed = True
        self._deadline.end()
        self._drop_claimed()
        if self._app is not None:
            self._app.disconnected()
        if self._source is not None:
            source, self._source = self._source, None
            source.disconnected()
        self._app = self._writer = None  # they know this one: garbage that would wait to be found

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
        elif self._buffer and not self._skipped:
            self._refuse(too_slow("head"))
        else:
            self._close()  # nobody waits for an answer

    # ---- requests ----

    @property
    def _busy(self) -> bool:
        """True if a request has come, and its answer has not ended."""
        return not (self._claimed is None and self._app is None and self._writer is None)

    @property
    def _holds(self) -> bool:
        """True if what comes now has to wait for an answer to end, or to be read."""
        if self._app is not None:
            return self._due == 0
        return self._unread or self._writer is not None

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
        """Return True if there may be more to do."""
        if self._skipped:
            return self._skip()
        if self._claimed is not None:
            return self._body(self._claimed)
        if self._app is not None:
            self._feed(self._app)
            return False
        if self._writer is not None or not self._buffer:
            return False
        self._unread = self._transport.writable_bytes() < 1
        return not self._unread and self._head()

    def _skip(self) -> bool:
        """Drop what has come of the body of a request that was refused by its head."""
        size = min(self._skipped, len(self._buffer))
        del self._buffer[:size]
        self._skipped -= size
        if self._skipped:
            return False
        self._await_next()
        return bool(self._buffer)

    def _head(self) -> bool:
        while self._buffer.startswith(b"\r\n"):  # RFC 9112, 2.2
            del self._buffer[:2]
            self._empty_lines += 1
            if self._empty_lines > MAX_EMPTY_LINES:
                self._refuse(refusal(400), b"")
                return False
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
        if head.startswith(H2_PREFACE):
            self._give_way(Http2(self._transport, self._context, bytes(self._buffer)))
            return False
        del self._buffer[: len(head)]
        self._head_began, self._empty_lines = False, 0
        if len(head) > MAX_HEAD_BYTES or head.count(b"\n") > MAX_HEADERS + 2:
            self._refuse(refusal(431), head)
            return False
        if _FOLDED.search(head) or _BARE_LF.search(head):
            self._refuse(refusal(400), head)
            return False
        line = _REQUEST_LINE.match(head)
        if line is not None and line[3] not in VERSIONS:
            self._refuse(refusal(505), head)
            return False
        if line is not None and not line[2].startswith(b"/"):
            head = _in_origin_form(head, line)
        self._begin(head)
        return True

    def _begin(self, head: bytes) -> None:
        """A whole head: a session's, a route's, or the application's."""
        framing = {name.lower(): value for name, value in _FRAMING.findall(head)}
        if head.startswith(SESSION) and b"upgrade" in framing and self._upgrade(head):
            return
        self._deadline.set(self._context.config.body_timeout_s)
        if not (_MAYBE_CLAIMED.match(head) and self._claim(head, framing)):
            self._hand_over(head, framing)

    def _upgrade(self, head: bytes) -> bool:
        """Whether it is a session's opening handshake, and accepted."""
        event = _parsed(head)[1]
        if event is None or event.http_version != b"1.1":
            return False
        request = self._request(event)
        accepted = accepts(request)
        scheme = "wss" if self._transport.secure else "ws"
        if accepted is None or request.path != SESSION_PATH:
            return False
        has_token = TOKEN_QUERY.search(request.query) is not None
        admission = self._context.rules.admit(head_of(request, scheme), has_token=has_token)
        if admission.refusal is not None:
            return False
        early = bytes(self._buffer)
        headers = self._context.headers()
        protocol = WebSocket(self._transport, self._context, request, accepted, admission, headers)
        self._give_way(protocol)
        if early:
            protocol.receive(early)
        return True

    def _claim(self, head: bytes, framing: Framing) -> bool:
        """Return True if a route claims the request, and it is a plain one.

        Whether its client may ask is decided here: a body is gathered of nobody else.
        """
        length = framing.get(b"content-length", b"0")
        if framing.keys() - {b"content-length"} or _DIGITS.fullmatch(length) is None:
            return False
        connection, event = _parsed(head)
        if event is None:
            return False
        request, body_bytes = self._request(event), int(length)
        fits = body_bytes <= self._context.config.max_body_bytes
        if not (fits and self._context.routes.claims(request)):
            return False
        writer = Http1Writer(self, self._transport, self._context, connection, last=self._flooded)
        self._writer, self._skipped = writer, body_bytes  # for a refusal
        admitted = self._context.routes.admit(request, writer)
        if admitted is None:
            self._refused_at_once()
        else:
            self._writer, self._skipped = None, 0
            self._claimed = Claimed(admitted, writer, head, framing, body_bytes)
        return True

    def _request(self, event: h11.Request) -> Request:
        path, _, query = event.target.partition(b"?")
        return Request(
            method=event.method.decode("ascii"),
            path=path,
            query=query,
            headers=list(event.headers),
            scheme="https" if self._transport.secure else "http",
            peer=self._transport.peer,
            http_version=event.http_version.decode("ascii"),
        )

    def _body(self, claimed: Claimed) -> bool:
        """Answer a claimed request whose body is whole."""
        came = min(claimed.body_bytes, len(self._buffer))
        if came < claimed.body_bytes:
            self._count(came, claimed)
            return False
        self._claimed = None
        self._uncount()
        writer = self._writer = claimed.writer
        body = bytes(self._buffer[:came])
        del self._buffer[:came]
        source = self._context.routes.serve(claimed.admitted, body, writer)
        if source is None:
            self._writer = None
            self._buffer[:0] = body
            self._hand_over(claimed.head, claimed.framing, claimed.admitted)
        elif self._writer is writer:
            self._deadline.clear()
            self._source = source
        else:  # it has ended already
            self._refused_at_once()
        return True

    def _count(self, came: int, claimed: Claimed) -> None:
        """Count what has come of a body for the budget of all bodies."""
        try:
            self._context.bodies.take(came - self._counted)
        except TailraceError as error:
            self._refuse(error, claimed.head)
        else:
            self._counted = came

    def _uncount(self) -> None:
        self._context.bodies.give(self._counted)
        self._counted = 0

    def _drop_claimed(self) -> None:
        """The body of a claimed request does not come any more, or is not wanted."""
        claimed, self._claimed = self._claimed, None
        if claimed is not None:
            self._uncount()
            claimed.admitted.done()

    def _refused_at_once(self) -> None:
        """Charge a request that cost its client nothing to make.

        The connection of a client that owes too much ends with its next answer, which says so: a
        proxy that has many clients on one connection loses none of their requests.
        """
        self._flooded = not self._flood.spend(REFUSED_POINTS)

    def _hand_over(self, head: bytes, framing: Framing, admitted: Admitted | None = None) -> None:
        """Let the application answer, which gets this request and nothing behind it."""
        length = framing.get(b"content-length", b"0")
        known = {b"content-length", b"expect", b"upgrade"}
        is_plain = framing.keys() <= known and _DIGITS.fullmatch(length)
        self._due = int(length) if is_plain else None
        coding = framing.get(b"transfer-encoding", b"").strip().lower()
        is_chunked = coding == b"chunked" and b"content-length" not in framing
        self._chunks = ChunkedBody() if is_chunked else None
        self._app = AppRequest(self._context.rest, self._transport, self._answered, admitted)
        # RFC 9110, 7.8: a server may go on as if nobody had asked. To HTTP/2 there is no way here,
        # and sessions never come so far: a WebSocket of Hypercorn's would have no limits.
        self._app.receive(_UPGRADE.sub(b"", head))

    def _feed(self, app: AppRequest) -> None:
        """Give the application what there is of its request."""
        size = len(self._buffer) if self._due is None else min(self._due, len(self._buffer))
        if self._chunks is not None and self._due is None:
            try:
                size = self._chunks.feed(bytes(self._buffer))
            except TailraceError as error:
                self._closed = True
                self._deadline.clear()
                app.cut(error)
                return
            if self._chunks.ended:
                self._due = size
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
        """For the writer: the response is whole, or broken off."""
        self._writer = self._source = None
        if closes:
            self._close(lingers=self._skipped > len(self._buffer) or self._flooded)
        else:
            self._next()

    def _next(self) -> None:
        if self._closed:
            return
        self._transport.resume_reading()
        if self._draining and not self._buffer:
            self._close()
            return
        self._await_next()
        self._advance()
        self._context.batch.flush()

    def _await_next(self) -> None:
        """Give the client its time for what comes next."""
        config = self._context.config
        self._head_began = bool(self._buffer)
        if self._skipped:
            self._deadline.set(config.body_timeout_s)
        else:
            self._deadline.set(config.header_timeout_s if self._buffer else KEEP_ALIVE_TIMEOUT_S)

    def _refuse(self, error: TailraceError, head: bytes | None = None) -> None:
        """Answer what is no request of a route, and close. Without `head`, that of the request,
        it is what has come."""
        if self._context.counts is not None:
            self._context.counts.refused("h1", error.code, error.status)
        began = bytes(self._buffer[:MAX_HEAD_BYTES]) if head is None else head
        self._drop_claimed()
        self._transport.write(self._context.rest.error_answer(error, began))
        self._close(lingers=True)

    def _close(self, *, lingers: bool = False) -> None:
        self._closed = True
        self._buffer.clear()
        self._deadline.clear()
        self._transport.close(lingers=lingers)

    def _give_way(self, protocol: ConnectionProtocol) -> None:
        self._closed = True
        self._deadline.end()
        self._buffer.clear()
        self._transport.protocol = protocol


class Http1Writer:
    """One response, as chunks unless its length is declared.

    To a client of HTTP/1.0, which knows no chunks, it ends with the connection.
    """

    __slots__ = (
        *("_chunked", "_closes", "_connection", "_head", "_http1", "_last", "_open", "_context"),
        *("_transport", "writable_bytes"),
    )

    def __init__(
        self,
        http1: Http1,
        transport: Transport,
        context: TcpContext,
        connection: h11.Connection,
        *,
        last: bool = False,
    ) -> None:
        """`last`: the connection is closed behind it, and its client is told."""
        self._http1 = http1
        self._transport = transport
        self.writable_bytes = transport.writable_bytes
        self._context = context
        self._connection: h11.Connection | None = connection
        self._head = b""  # until it goes out with what comes first
        self._chunked = True
        self._closes = False
        self._last = last
        self._open = True

    def start(self, status: int, headers: Headers) -> None:
        assert self._connection is not None  # it is started once
        connection, self._connection = self._connection, None
        fields = [*headers, *self._context.headers()]
        if self._last:
            fields.append((b"connection", b"close"))
        response = h11.Response(status_code=status, headers=fields)
        self._head = connection.send(response) or b""
        self._chunked = (
            connection.their_http_version != b"1.0"
            and status not in _WITHOUT_BODY
            and all(name != b"content-length" for name, _ in headers)
        )
        self._closes = b"\r\nconnection: close\r\n" in self._head.lower()
        self._context.batch.mark_dirty(self)

    def flush(self) -> None:
        """The head by itself, if nothing of the body has come in this turn."""
        if self._open and self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def write(self, data: bytes) -> None:
        if not (self._open and data):
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def end(self) -> None:
        if self._open:
            self._open = False
            self._transport.write(self._head + (LAST_CHUNK if self._chunked else b""))
            self._http1.ended(self._closes)

    def reset(self) -> None:
        """What was written still leaves, and the last chunk is missing."""
        if self._open:
            self._open = False
            self._http1.ended(True)


def _parsed(head: bytes) -> tuple[h11.Connection, h11.Request | None]:
    """Return the request that a head is, and who parsed it; None where it is none."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return connection, None
    return connection, event if isinstance(event, h11.Request) else None


def _in_origin_form(head: bytes, line: re.Match[bytes]) -> bytes:
    """Return a head with an absolute target as a client would send it to the server itself.

    The host of the target counts, not that of the header (RFC 9112, 3.2.2).
    """
    found = _ABSOLUTE.fullmatch(line[2])
    if found is None:
        return head
    authority, rest = found[1], found[2] or b""
    path = rest if rest.startswith(b"/") else b"/" + rest
    if line[1] == b"OPTIONS" and not rest:
        path = b"*"
    fields = _HOST.sub(lambda _: b"\nHost: " + authority, head[line.end() - 1 :], count=1)
    return b"%b %b HTTP/%b\r%b" % (line[1], path, line[3], fields)
