"""HTTP/1.1 on a connection: where each request begins and ends, and how long it may take to come.

A head is looked for here and read by h11, which knows bodies and their framing; whoever answers it
is found as for HTTP/2 and 3. The head is refused that another server might read otherwise, and
bytes behind a request stay here until its answer has ended.
"""

from __future__ import annotations

import re

import h11

from edge.access.middleware import TOKEN_QUERY
from edge.errors import refusal, too_slow
from edge.server.deadlines import Deadline
from edge.server.http2 import Http2
from edge.server.incoming import KEEP_ALIVE_TIMEOUT_S, MAX_WAITING_BYTES, Incoming, Shared
from edge.server.outlet import Headers, Request, Speaker, Turn, Wire
from edge.server.routes import head_of
from edge.server.websocket import SESSION_PATH, WebSocket, accepts
from ledger.errors import TailraceError

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 100
H2_PREFACE = b"PRI * HTTP/2.0\r\n"

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_FOLDED = re.compile(rb"\n[ \t]")
_ID = re.compile(rb"(?i)\nx-request-id:[ \t]*([\x21-\x7e]{1,128})[ \t]*\r?\n")
LAST_CHUNK = b"0\r\n\r\n"
CLOSE = (b"connection", b"close")


class Http1:
    """The `Speaker` of HTTP/1.1."""

    def __init__(self, wire: Wire, shared: Shared) -> None:
        self._wire = wire
        self._shared = shared
        self._buffer = bytearray()  # of what is behind the request under way
        self._scanned = 0  # bytes of it in which no head ends
        self._head = b""  # of the request under way
        self._incoming: Incoming | None = None  # that request
        self._h11: h11.Connection | None = None  # which knows where it ends
        self._untaken = 0  # bytes of its body that nobody has read
        self._advancing = False
        self._closed = False
        self._deadline = Deadline(shared.deadlines, self._overdue)
        self._deadline.set(shared.config.header_timeout_s)

    # ---- what the connection says ----

    def receive(self, data: bytes) -> None:
        if self._closed:
            return  # lingering
        if self._h11 is not None and self._incoming is not None and not self.is_whole:
            if (read := self._read(self._h11, self._incoming, data)) is not None:
                self._incoming.came(*read)
        else:
            if not (self._buffer or self._incoming):
                self._deadline.set(self._shared.config.header_timeout_s)
            self._buffer += data
            self._advance()
        if not self._closed:
            self._pace()

    def drained(self) -> None:
        if self._incoming is not None:
            self._incoming.drained()

    def gone(self) -> None:
        self._closed = True
        self._deadline.end()
        if self._incoming is not None:
            self._incoming.gone()
        self._forget()

    def drain(self) -> None:
        if not (self._incoming or self._buffer):
            self._close()

    def _overdue(self) -> None:
        if self._buffer:
            self._refuse(too_slow("head"))
        else:
            self._close()  # nobody waits for an answer

    # ---- heads ----

    def _advance(self) -> None:
        """Do with what has come all that can be done; not within itself."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._buffer and not (self._closed or self._incoming) and self._next():
                pass
        finally:
            self._advancing = False

    def _next(self) -> bool:
        """Begin the next request; whether its head is there."""
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
        elif head.startswith(H2_PREFACE):
            self._give_way(Http2(self._wire, self._shared, bytes(self._buffer)))
        elif _FOLDED.search(head):
            self._refuse(refusal(400))
        else:
            self._begin(head)
        return True

    def _begin(self, head: bytes) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        event, status = None, 400
        try:
            connection.receive_data(head)
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
        if not isinstance(event, h11.Request):
            self._refuse(refusal(status))
            return
        request = self._request(event)
        del self._buffer[: len(head)]
        if request.path == SESSION_PATH and self._upgrade(request, bytes(self._buffer)):
            return
        self._deadline.clear()
        self._head, self._h11 = head, connection
        outlet = Http1Outlet(self, self._wire, self._shared.turn, connection, request.method)
        taken, server = self._taken, self._wire.server
        incoming = self._incoming = Incoming(self._shared, request, outlet, server, taken)
        begun, self._buffer = bytes(self._buffer), bytearray()
        if (read := self._read(connection, incoming, begun)) is None:
            return
        incoming.begin(*read)
        if connection.they_are_waiting_for_100_continue:
            answer = connection.send(h11.InformationalResponse(status_code=100, headers=[]))
            self._wire.write(answer or b"")

    def _request(self, event: h11.Request) -> Request:
        path, _, query = event.target.partition(b"?")
        return Request(
            method=event.method.decode("ascii"),
            path=path,
            query=query,
            headers=list(event.headers),
            scheme="https" if self._wire.secure else "http",
            peer=self._wire.peer,
            http_version="1.0" if event.http_version == b"1.0" else "1.1",
        )

    def _upgrade(self, request: Request, early: bytes) -> bool:
        """Whether it is a session's opening handshake, and accepted."""
        accepted = accepts(request)
        if accepted is None or request.http_version != "1.1":
            return False
        scheme = "wss" if self._wire.secure else "ws"
        has_token = TOKEN_QUERY.search(request.query) is not None
        admission = self._shared.rules.admit(head_of(request, scheme), has_token=has_token)
        if admission.refusal is not None:
            return False
        headers = self._shared.headers()
        speaker = WebSocket(self._wire, self._shared, request, accepted, admission, headers)
        self._give_way(speaker)
        if early:
            speaker.receive(early)
        return True

    # ---- bodies ----

    @property
    def is_whole(self) -> bool:
        """Whether no more of the request under way is to come."""
        return self._h11 is None or self._h11.their_state is not h11.SEND_BODY

    def _read(
        self, connection: h11.Connection, incoming: Incoming, data: bytes
    ) -> tuple[bytes, bool] | None:
        """What has come of the request's body, and whether that was its end; what is behind it is
        kept. None where it is no body, which is the end of the connection."""
        parts = list[bytes]()
        try:
            if data:
                connection.receive_data(data)
            while isinstance(event := connection.next_event(), h11.Data):
                parts.append(event.data)
        except h11.RemoteProtocolError as error:
            self._break_off(incoming, refusal(error.error_status_hint))
            return None
        if ended := isinstance(event, h11.EndOfMessage):
            self._buffer += connection.trailing_data[0]
        piece = b"".join(parts)
        self._untaken += len(piece)
        return piece, ended

    def _taken(self, size: int) -> None:
        self._untaken -= size
        self._pace()

    def _pace(self) -> None:
        if self._untaken + len(self._buffer) > MAX_WAITING_BYTES:
            self._wire.pause_reading()
        else:
            self._wire.resume_reading()

    # ---- ends ----

    def headers(self) -> Headers:
        """Those of an answer that begins now; one before the request is whole is the last."""
        is_last = self._shared.connections.draining or self._closed or not self.is_whole
        return [*self._shared.headers(), CLOSE] if is_last else self._shared.headers()

    def ended(self, closes: bool) -> None:
        """For the outlet: the response is whole, or broken off."""
        lingers = not self.is_whole
        self._forget()
        if self._closed:
            return
        if closes or (self._shared.connections.draining and not self._buffer):
            self._close(lingers=lingers)
            return
        self._pace()
        waits_s = self._shared.config.header_timeout_s if self._buffer else KEEP_ALIVE_TIMEOUT_S
        self._deadline.set(waits_s)
        self._advance()

    def _forget(self) -> None:
        """The request that was under way, which knows this one: garbage that would wait."""
        if self._incoming is not None:
            self._incoming.end()
        self._incoming = self._h11 = None
        self._head, self._untaken = b"", 0

    def _break_off(self, incoming: Incoming, error: TailraceError) -> None:
        """What comes is no body."""
        has_answer = incoming.outlet.started
        incoming.gone()
        if has_answer:
            self._close()
        else:
            self._refuse(error)

    def _refuse(self, error: TailraceError) -> None:
        """Answer what was no request, or has not come whole, and close the connection."""
        self._closed = True
        found = _ID.search(self._head or bytes(self._buffer[:MAX_HEAD_BYTES]))
        outlet = Http1Outlet(self, self._wire, self._shared.turn, h11.Connection(h11.SERVER), "")
        self._shared.refuse(outlet, "h1", "", error, found and found[1])
        self._close(lingers=True)

    def _close(self, *, lingers: bool = False) -> None:
        self._closed = True
        self._deadline.clear()
        self._wire.close(lingers=lingers)

    def _give_way(self, speaker: Speaker) -> None:
        self._closed = True
        self._deadline.end()
        self._buffer.clear()
        self._wire.speaker = speaker


class Http1Outlet:
    """One response, as h11 has its head: its body in chunks unless its length is known."""

    __slots__ = (
        *("_chunked", "_closes", "_connection", "_head", "_http1", "_open", "_turn", "_wire"),
        *("room", "started"),
    )

    def __init__(
        self, http1: Http1, wire: Wire, turn: Turn, connection: h11.Connection, method: str
    ) -> None:
        self._http1 = http1
        self._wire = wire
        self.room = wire.room
        self.started = False
        self._turn = turn
        self._connection: h11.Connection | None = connection
        self._head = b""  # until it goes out with what comes first
        self._chunked = method != "HEAD"
        self._closes = False
        self._open = True

    def start(self, status: int, headers: Headers) -> None:
        assert self._connection is not None  # it is started once
        connection, self._connection = self._connection, None
        self.started = True
        fields = [*headers, *self._http1.headers()]
        response = h11.Response(status_code=status, headers=fields)
        self._head = connection.send(response) or b""
        said = self._head.lower()
        self._chunked = self._chunked and b"\r\ntransfer-encoding: chunked\r\n" in said
        self._closes = b"\r\nconnection: close\r\n" in said
        self._turn.touch(self)

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
