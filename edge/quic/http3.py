"""HTTP/3 on one connection: passes requests to the application, and responses to the QUIC library.

Sans-I/O. A request with invalid values is answered with an error. For a violation of HTTP/3 itself,
the library ends the connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tailrace.edge.errors import refusal
from tailrace.edge.quic.interface import (
    Code,
    DataReceived,
    Event,
    HeadersTooLarge,
    QuicConnection,
    RequestReceived,
    StreamReset,
)
from tailrace.edge.server.context import ServerContext
from tailrace.edge.server.deadlines import Deadline
from tailrace.edge.server.dispatch import RequestDispatcher
from tailrace.edge.server.interfaces import UNSENT_BYTES, Headers, Request
from tailrace.ledger.errors import CallerError, TailraceError
from tailrace.ledger.flow.token_bucket import TokenBucket

MAX_RESETS = 200
"""Maximum burst of resets of requests by a client: a reset costs the edge more than the client."""
RESETS_PER_S = 20.0
"""Rate of resets that a client may sustain, per second."""
MAX_REFUSED = 200
"""Maximum burst of requests that are refused at once."""
REFUSED_PER_S = 20.0
"""Rate of refused requests that a client may sustain, per second."""

_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}")
_TARGET = re.compile(rb"(/[!\"$-~]*|\*)")


class Http3:
    """One HTTP/3 connection with its open requests."""

    def __init__(
        self,
        quic: QuicConnection,
        context: ServerContext,
        peer: tuple[str, int],
        server: tuple[str, int] | None,
        mark_dirty: Callable[[], None],
    ) -> None:
        """Prepare a connection; `mark_dirty` is called when `quic` has something to send."""
        self.quic = quic
        self.context = context
        self.peer = peer
        self.server = server
        self.mark_dirty = mark_dirty
        self.blocked: dict[Http3Stream, None] = {}  # responses that wait until more can be written
        self._streams: dict[int, Http3Stream] = {}
        self._resets = TokenBucket(RESETS_PER_S, MAX_RESETS, 0.0)
        self._refused = TokenBucket(REFUSED_PER_S, MAX_REFUSED, 0.0)
        self._draining = False

    @property
    def idle(self) -> bool:
        """True if no request is open."""
        return not self._streams

    def handle(self, event: Event, now: float) -> None:
        """Handle an event of a request."""
        if isinstance(event, RequestReceived):
            self._begin(event)
        elif isinstance(event, DataReceived):
            if (stream := self._streams.get(event.stream)) is not None:
                stream.receive_body(event.data, event.ended)
        elif isinstance(event, HeadersTooLarge):
            self.context.refuse(Http3Stream(self, event.stream), "h3", "", refusal(431))
            self.charge()
        elif isinstance(event, StreamReset):
            if (stream := self._streams.pop(event.stream, None)) is not None:
                stream.disconnected()
            if self._resets.take(1, now) > 0:
                self.quic.close(Code.EXCESSIVE_LOAD, "too many requests were reset")

    def unblock(self) -> None:
        """Continue the responses that were blocked and can be written again."""
        for stream in list(self.blocked):
            if stream.writable_bytes() > 0:
                del self.blocked[stream]
                stream.drained()

    def drain(self) -> None:
        """Take no new requests; open requests continue."""
        if not self._draining:
            self._draining = True
            self.quic.go_away()
            self.mark_dirty()

    def disconnected(self) -> None:
        """End every request, because the connection has ended."""
        self.blocked.clear()
        while self._streams:
            self._streams.popitem()[1].disconnected()

    def forget(self, stream: Http3Stream) -> None:
        """Forget a request whose response has ended or was reset."""
        self.blocked.pop(stream, None)
        self._streams.pop(stream.id, None)
        self.mark_dirty()

    def charge(self) -> None:
        """Count a request that is refused at once; close the connection if there are too many."""
        if self._refused.take(1, self.context.deadlines.clock_s()) > 0:
            self.quic.close(Code.EXCESSIVE_LOAD, "too many requests were refused")
            self.mark_dirty()

    def _begin(self, event: RequestReceived) -> None:
        if self._draining:
            self.quic.reset(event.stream, Code.REQUEST_REJECTED)
            self.mark_dirty()
            return
        stream = self._streams[event.stream] = Http3Stream(self, event.stream)
        try:
            request = read_head(event.headers, self.peer)
        except TailraceError as error:
            method = dict(event.headers).get(b":method", b"")
            self.context.refuse(stream, "h3", method.decode("latin-1"), error, event.headers)
            self.charge()
        else:
            stream.begin(request, event.ended)


class Http3Stream:
    """One request and its response: a `ResponseWriter`."""

    __slots__ = ("_deadline", "_dispatcher", "_ended", "_http3", "id", "started")

    def __init__(self, http3: Http3, stream_id: int) -> None:
        self.id = stream_id
        self.started = False
        self._http3 = http3
        self._dispatcher: RequestDispatcher | None = None
        self._ended = False
        self._deadline = Deadline(http3.context.deadlines, self._stalled)

    # ---- the request ----

    def begin(self, request: Request, ended: bool) -> None:
        """Dispatch the request; `ended` means that it has no body."""
        http3 = self._http3
        self._dispatcher = RequestDispatcher(
            http3.context, request, self, http3.server, self._read, http3.charge
        )
        self._dispatcher.begin(ended)

    def receive_body(self, data: bytes, ended: bool) -> None:
        """Handle a piece of the request's body."""
        if self._dispatcher is not None and not self._ended:
            self._dispatcher.receive_body(data, ended)

    def _read(self, size: int) -> None:
        if size:
            self._http3.quic.consumed(self.id, size)
            self._http3.mark_dirty()

    # ---- the connection ----

    def drained(self) -> None:
        """Continue the response, because it can be written again."""
        self._deadline.clear()
        if self._dispatcher is not None:
            self._dispatcher.drained()

    def disconnected(self) -> None:
        """End the request and its response, because the client has left."""
        self._http3.blocked.pop(self, None)
        dispatcher = self._finish()
        if dispatcher is not None:
            dispatcher.disconnected()

    def _finish(self) -> RequestDispatcher | None:
        """Mark the stream as ended; return its dispatcher, which the stream no longer refers to."""
        self._ended = True
        self._deadline.end()
        dispatcher, self._dispatcher = self._dispatcher, None
        return dispatcher

    def _stalled(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.disconnected()
        self.reset()

    # ---- a ResponseWriter ----

    def start(self, status: int, headers: Headers) -> None:
        if not self._ended:
            self.started = True
            head = [(b":status", b"%d" % status), *headers, *self._http3.context.headers()]
            self._http3.quic.start(self.id, head)
            self._http3.mark_dirty()

    def write(self, data: bytes) -> None:
        if not self._ended:
            self._http3.quic.write(self.id, data)
            self._http3.mark_dirty()

    def end(self) -> None:
        if not self._ended:
            dispatcher = self._finish()
            self._http3.quic.end(self.id)
            if dispatcher is None or not dispatcher.is_whole:
                self._http3.quic.stop(self.id)
            self._http3.forget(self)

    def reset(self) -> None:
        if not self._ended:
            self._finish()
            self._http3.quic.reset(self.id, Code.INTERNAL_ERROR)
            self._http3.forget(self)

    def writable_bytes(self) -> int:
        if self._ended:
            return 0
        writable = self._http3.quic.writable_bytes(self.id, UNSENT_BYTES)
        if writable < 1 and self not in self._http3.blocked:
            self._http3.blocked[self] = None
            if self._dispatcher is not None and self._dispatcher.is_whole:
                self._deadline.set(self._http3.context.stalled_timeout_s)
        return writable


def read_head(fields: Headers, peer: tuple[str, int] | None) -> Request:
    """Return the request with these header fields. Raises CallerError if they are not valid."""
    pseudo = {name: value for name, value in fields if name.startswith(b":")}
    method = pseudo.get(b":method", b"")
    if _METHOD.fullmatch(method) is None:
        raise CallerError("the HTTP method is not valid", field=":method")
    if method == b"CONNECT":
        raise TailraceError("CONNECT is not supported", code="http_error", status=501)
    target = pseudo.get(b":path", b"")
    if _TARGET.fullmatch(target) is None:
        raise CallerError(
            "the path is not valid",
            field=":path",
            hint="begin the path with / and percent-encode all characters that are not ASCII",
        )
    if pseudo.get(b":scheme") != b"https":
        raise CallerError("the scheme is not supported", field=":scheme", hint="use https")
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
    """Return the regular fields, with `:authority` as `host`, and with a single `cookie`."""
    hosts = {value for name, value in fields if name == b"host"} | {authority}
    if len(hosts) > 1:
        raise CallerError("Host and :authority differ", field="Host", hint="send :authority only")
    cookies = [value for name, value in fields if name == b"cookie"]
    headers = [(b"host", authority)]
    headers += [
        (name, value)
        for name, value in fields
        if not name.startswith(b":") and name not in (b"host", b"cookie")
    ]
    if cookies:
        headers.append((b"cookie", b"; ".join(cookies)))  # joined as in RFC 9114, 4.2.1
    return headers
