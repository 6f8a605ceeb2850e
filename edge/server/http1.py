"""HTTP/1.1 on one connection: finds where requests begin and end, and enforces their timeouts.

Heads are parsed by h11, and each request goes to the application. Ambiguous heads are rejected, so
that no request can be smuggled past another server. Pipelined requests are buffered until the
response before them has ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import h11

from tailrace.edge.access.head import Head
from tailrace.edge.access.middleware import TOKEN_QUERY
from tailrace.edge.errors import error_response, refusal, too_slow
from tailrace.edge.server.chunks import ChunkedBody
from tailrace.edge.server.context import KEEP_ALIVE_TIMEOUT_S, TcpContext
from tailrace.edge.server.deadlines import Deadline
from tailrace.edge.server.dispatch import RequestDispatcher
from tailrace.edge.server.flood import REFUSED_POINTS, FloodBudget
from tailrace.edge.server.http1_writer import CLOSE, Http1Writer
from tailrace.edge.server.http2 import Http2
from tailrace.edge.server.interfaces import ConnectionProtocol, Headers, Request, Transport
from tailrace.edge.server.websocket import SESSION_PATH, WebSocket, accepts
from tailrace.edge.telemetry.request_metrics import id_field_of
from tailrace.ledger.errors import TailraceError

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
MAX_EMPTY_LINES = 8
"""Maximum empty lines before a request. RFC 9112, 2.2 asks for one to be ignored."""
MAX_UNREAD_BODY_BYTES = 64 << 10
"""Maximum bytes of a request's body that wait for the application; beyond it the socket is not
read."""
H2_PREFACE = b"PRI * HTTP/2.0\r\n"
VERSIONS = (b"1.0", b"1.1")

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_FOLDED = re.compile(rb"\n[ \t]")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/([0-9]\.[0-9])\r\n")
_ABSOLUTE = re.compile(rb"https?://([^/?#@\s]+)(/[^#\s]*|\?[^#\s]*)?", re.IGNORECASE)
_HOST = re.compile(rb"\nhost[ \t]*:[^\r\n]*", re.IGNORECASE)
_UPGRADE = re.compile(rb"\nupgrade[ \t]*:[^\n]*(?=\n)", re.IGNORECASE)
SESSION = b"GET " + SESSION_PATH
REQUEST_TIMEOUT = 408


@dataclass(slots=True, eq=False)
class CurrentRequest:
    """The request that is being answered, and how much of it is still to come."""

    dispatcher: RequestDispatcher
    writer: Http1Writer
    body_bytes: int
    """Bytes of a body with `Content-Length` that have not arrived."""
    chunks: ChunkedBody | None
    """The decoder of a chunked body; None for other bodies."""
    expects: bool
    """True while the client waits for `100 Continue` before it sends the body."""
    is_last: bool
    """True if the connection cannot be used for another request."""
    unread_bytes: int = 0
    """Bytes of the body that the application has not taken."""

    @property
    def is_whole(self) -> bool:
        """True once the whole request has arrived."""
        return self.dispatcher.is_whole


class Http1:
    """The `ConnectionProtocol` of HTTP/1.1.

    A connection is in one of three states. It waits for a request (`_head` parses the next head),
    it has a request (`_request`), or it drops the rest of a body whose request was answered early
    (`_skipped` bytes). Between requests it may switch to HTTP/2 or to a WebSocket.
    """

    def __init__(self, transport: Transport, context: TcpContext) -> None:
        self._transport = transport
        self._context = context
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer that have been searched for the end of a head
        self._head_began = False  # bytes of the next head, or empty lines before it, have arrived
        self._empty_lines = 0  # number of empty lines before the next head
        self._request: CurrentRequest | None = None
        self._skipped = 0  # bytes of an answered request's body that are still to be dropped
        self._advancing = False
        self._unread = False  # no further request is handled until the client reads its responses
        self._closed = False
        self._draining = False
        self._flood = FloodBudget(context.deadlines.clock_s)
        self._flooded = False  # the flood budget is spent: the next response is the last
        self._deadline = Deadline(context.deadlines, self._overdue)
        self._deadline.set(context.config.header_timeout_s)

    # ---- from the connection ----

    def receive(self, data: bytes) -> None:
        """Handle input."""
        if self._closed:
            return  # input is dropped during a lingering close
        if not (self._head_began or self._request is not None or self._skipped):
            self._head_began = True
            self._deadline.set(self._context.config.header_timeout_s)
        self._buffer += data
        self._advance()
        if self._holds:
            self._transport.pause_reading()

    def drained(self) -> None:
        """Continue the response, or handle the next request: the transport has room again."""
        if self._request is not None:
            self._request.dispatcher.drained()
        elif self._unread:
            self._unread = False
            self._transport.resume_reading()
            self._advance()

    def disconnected(self) -> None:
        """End the request under way."""
        self._closed = True
        self._deadline.end()
        request, self._request = self._request, None
        if request is not None:
            request.writer.close()
            request.dispatcher.disconnected()

    def drain(self) -> None:
        """Close the connection, but only after the request under way, if there is one."""
        self._draining = True
        if self._request is None and not self._buffer:
            self._close()

    def _overdue(self) -> None:
        if self._buffer and not self._skipped:
            self._refuse(too_slow("head"))
        else:
            self._close()  # no request is waiting for a response

    # ---- heads ----

    @property
    def _holds(self) -> bool:
        """True if input must wait until the response ends or the application reads the body."""
        request = self._request
        if request is None:
            return self._unread
        return request.is_whole or request.unread_bytes > MAX_UNREAD_BODY_BYTES

    def _advance(self) -> None:
        """Handle the buffered input as far as possible; a nested call does nothing."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while not self._closed and self._step():
                pass
        finally:
            self._advancing = False

    def _step(self) -> bool:
        """Handle a part of the buffered input; return True if there may be more to handle."""
        if self._skipped:
            return self._skip()
        if self._request is not None:
            return self._feed(self._request)
        if not self._buffer:
            return False
        self._unread = self._transport.writable_bytes() < 1
        return not self._unread and self._head()

    def _skip(self) -> bool:
        """Drop the received part of a body that is skipped; return True if there is more input."""
        size = min(self._skipped, len(self._buffer))
        del self._buffer[:size]
        self._skipped -= size
        if self._skipped:
            return False
        self._await_next()
        return bool(self._buffer)

    def _head(self) -> bool:
        while self._buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: skip empty lines before a request
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
                # The input is not HTTP, but for example TLS on the plain port.
                self._refuse(refusal(400))
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
        """Begin a WebSocket session, or a request for the application."""
        if head.startswith(SESSION) and _UPGRADE.search(head) and self._upgrade(head):
            return
        # Other upgrades, such as to HTTP/2 (h2c), are ignored (RFC 9110, 7.8).
        head = _UPGRADE.sub(b"", head)
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            event = _parsed(connection, head)
        except h11.RemoteProtocolError as error:
            self._refuse(refusal(error.error_status_hint), head)
            return
        self._deadline.clear()
        fields = dict(event.headers)  # h11 has refused conflicting duplicates
        is_chunked = b"transfer-encoding" in fields
        length = 0 if is_chunked else int(fields.get(b"content-length", 0))
        request = self._request_of(event)
        writer = Http1Writer(self, self._transport, self._context, connection, request.method)
        dispatcher = RequestDispatcher(
            self._context,
            request,
            writer,
            self._transport.server,
            self._consumed,
            self._refused,
            self._wants_body,
        )
        self._request = CurrentRequest(
            dispatcher,
            writer,
            length,
            ChunkedBody(self._flood.spend) if is_chunked else None,
            expects=connection.they_are_waiting_for_100_continue,
            # With both Transfer-Encoding and Content-Length, another server may see a different end
            # of the body, and take a part of it for a request (RFC 9112, 6.3). So no further
            # request is read from this connection.
            is_last=is_chunked and b"content-length" in fields,
        )
        dispatcher.begin(ended=not (is_chunked or length))

    def _request_of(self, event: h11.Request) -> Request:
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

    def _upgrade(self, head: bytes) -> bool:
        """Begin a session if this is a valid handshake and is admitted; return True if it began."""
        try:
            event = _parsed(h11.Connection(h11.SERVER), head)
        except h11.RemoteProtocolError:
            return False
        if event.http_version != b"1.1":
            return False
        request = self._request_of(event)
        accepted = accepts(request)
        if accepted is None or request.path != SESSION_PATH:
            return False
        has_token = TOKEN_QUERY.search(request.query) is not None
        admission = self._context.rules.admit(self._session_head(request), has_token=has_token)
        if admission.refusal is not None:
            return False
        early = bytes(self._buffer)
        headers = self._context.headers()
        session = WebSocket(self._transport, self._context, request, accepted, admission, headers)
        self._give_way(session)
        if early:
            session.receive(early)
        return True

    def _session_head(self, request: Request) -> Head:
        return Head(
            method=request.method,
            path=request.path.decode("ascii"),
            scheme="wss" if self._transport.secure else "ws",
            address=request.peer[0] if request.peer else "",
            headers=tuple(request.headers),
        )

    # ---- bodies ----

    def _feed(self, request: CurrentRequest) -> bool:
        """Pass the received body to the application; return True if the next request may begin."""
        if request.is_whole or not self._buffer:
            return False
        chunks = request.chunks
        if chunks is None:
            size = min(request.body_bytes, len(self._buffer))
            request.body_bytes -= size
            piece, ended = bytes(self._buffer[:size]), not request.body_bytes
        else:
            try:
                size, piece = chunks.feed(bytes(self._buffer))
            except TailraceError as error:
                self._buffer.clear()
                request.dispatcher.fail(error)
                return False
            ended = chunks.ended
        del self._buffer[:size]
        request.expects = False  # the client already sends the body
        request.unread_bytes += len(piece)
        request.dispatcher.receive_body(piece, ended)
        return self._request is None

    def _consumed(self, size: int) -> None:
        """Note that the application has taken `size` bytes of the body."""
        request = self._request
        if request is not None:
            request.unread_bytes -= size
            if not self._holds:
                self._transport.resume_reading()

    def _wants_body(self) -> None:
        """Send `100 Continue` if the client waits for it (RFC 9110, 10.1.1)."""
        request = self._request
        if request is not None and request.expects:
            request.expects = False
            request.writer.go_on()

    def _refused(self) -> None:
        """Charge a request that is refused at once to the flood budget.

        If the budget is spent, the next response has `Connection: close` and ends the connection.
        So a proxy that shares the connection between clients loses none of their requests.
        """
        self._flooded = not self._flood.spend(REFUSED_POINTS)

    # ---- ends ----

    def closes_behind(self, status: int) -> bool:
        """Return True if the connection must close after the response that begins now."""
        request = self._request
        if request is None or request.is_last or self._flooded or self._draining:
            return True
        if request.is_whole:
            return False
        # The rest of a short body is dropped. But a client that waits for `100 Continue` may never
        # send the body, so its connection is closed.
        is_short = request.chunks is None and not request.expects
        is_short = is_short and request.body_bytes <= self._context.config.max_body_bytes
        return status == REQUEST_TIMEOUT or not is_short

    def ended(self, closes: bool) -> None:
        """Close the connection, or await the next request, after a response has ended."""
        request, self._request = self._request, None
        if request is None:
            return
        is_whole = request.is_whole
        request.dispatcher.forget()
        if closes:
            self._close(lingers=not is_whole or self._flooded)
            return
        self._skipped = 0 if is_whole else request.body_bytes
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
        """Set the timeout for the client's next input."""
        config = self._context.config
        self._head_began = bool(self._buffer)
        if self._skipped:
            self._deadline.set(config.body_timeout_s)
        else:
            self._deadline.set(config.header_timeout_s if self._buffer else KEEP_ALIVE_TIMEOUT_S)

    def _refuse(self, error: TailraceError, head: bytes | None = None) -> None:
        """Answer input that is not a valid request, and close the connection.

        `head` is the head of the request; by default it is the buffered input.
        """
        if self._context.counts is not None:
            self._context.counts.refused("h1", error.code, error.status)
        began = bytes(self._buffer[:MAX_HEAD_BYTES]) if head is None else head
        self._transport.write(_error_answer(error, self._context.headers(), began))
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


def _parsed(connection: h11.Connection, head: bytes) -> h11.Request:
    """Return the request with this complete head. Raises h11.RemoteProtocolError."""
    connection.receive_data(head)
    event = connection.next_event()
    if not isinstance(event, h11.Request):
        raise h11.RemoteProtocolError("the head is not a complete request")
    return event


def _error_answer(error: TailraceError, headers: Headers, head: bytes) -> bytes:
    """Return a complete response with an error, after which the connection is closed.

    `head` is the beginning of the request.
    """
    answer = error_response(error)
    connection = h11.Connection(h11.SERVER)
    fields = [*answer.raw_headers, *headers, id_field_of(head), CLOSE]
    parts = (
        connection.send(h11.Response(status_code=error.status, headers=fields)),
        connection.send(h11.Data(data=bytes(answer.body))),
    )
    return b"".join(part or b"" for part in parts)


def _in_origin_form(head: bytes, line: re.Match[bytes]) -> bytes:
    """Return a head whose absolute-form target is rewritten to origin form (RFC 9112, 3.2).

    The host of the target replaces the `Host` header (RFC 9112, 3.2.2).
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
