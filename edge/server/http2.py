"""HTTP/2 on one connection: its requests, their timeouts and their limits."""

from __future__ import annotations

from functools import partial

from tailrace.edge.errors import refusal
from tailrace.edge.server.context import KEEP_ALIVE_TIMEOUT_S, TcpContext
from tailrace.edge.server.deadlines import Deadline, nothing
from tailrace.edge.server.dispatch import RequestDispatcher
from tailrace.edge.server.http2_connection import (
    BodyReceived,
    HeadReceived,
    Http2Connection,
    Http2Event,
    Http2Stream,
)
from tailrace.edge.server.interfaces import UNSENT_BYTES, Transport
from tailrace.ledger.errors import Overloaded

MAX_BODY_BYTES = 16 << 20
"""Maximum bytes of the bodies of all open requests of a connection. The limit is twice the setting
`max_body_bytes` if that is more."""


class Http2:
    """The `ConnectionProtocol` of HTTP/2."""

    def __init__(self, transport: Transport, context: TcpContext, first: bytes = b"") -> None:
        self._transport = transport
        self._context = context
        self._h2 = Http2Connection(
            context.deadlines.clock_s,
            partial(context.batch.mark_dirty, self),
            context.headers,
            secure=transport.secure,
            peer=transport.peer,
        )
        self._busy = False
        # A proxy's connection carries requests of many clients: one client must not end it for all.
        self._is_proxy = transport.peer is not None and context.rules.proxies.trusts(
            transport.peer[0]
        )
        self._idle = Deadline(context.deadlines, self._h2.go_away)
        self._idle.set(context.config.header_timeout_s)
        self._stalled = Deadline(context.deadlines, self._cut_stalled)
        self.flush()
        if first:
            self.receive(first)

    # ---- the connection ----

    def receive(self, data: bytes) -> None:
        self._note(self._h2.receive(data))

    def drained(self) -> None:
        self._transport.resume_reading()
        self._context.batch.mark_dirty(self)

    def disconnected(self) -> None:
        self._idle.end()
        self._stalled.end()
        self._note(self._h2.lost())
        self._h2.mark_dirty = nothing  # the old value refers to this object: break the cycle

    def drain(self) -> None:
        self._h2.go_away()

    # ---- requests ----

    def _note(self, events: list[Http2Event]) -> None:
        for event in events:
            stream = event.stream
            if isinstance(event, HeadReceived):
                self._begin(event)
            elif isinstance(event, BodyReceived):
                self._feed(stream, event.data, event.ended)
            else:
                source, stream.source = stream.source, None
                if source is not None:
                    source.disconnected()

    def _begin(self, asked: HeadReceived) -> None:
        stream, request, context = asked.stream, asked.request, self._context
        if asked.too_large:
            context.refuse(stream, "h2", request.method, refusal(431), request.headers)
            self._charge()
            return
        dispatcher = RequestDispatcher(
            context, request, stream, self._transport.server, stream.consumed, self._charge
        )
        stream.source = dispatcher
        dispatcher.begin(asked.ended)

    def _charge(self) -> None:
        """Charge a request that is refused at once, unless a trusted proxy passed it on."""
        if not self._is_proxy:
            self._note(self._h2.refused_at_once(1))
            self._context.batch.mark_dirty(self)

    def _feed(self, stream: Http2Stream, data: bytes, ended: bool) -> None:
        limit = max(MAX_BODY_BYTES, 2 * self._context.config.max_body_bytes)
        dispatcher = stream.source
        if not isinstance(dispatcher, RequestDispatcher):  # answered: drop the body
            stream.consumed(len(data))
        elif data and self._h2.body_bytes > limit:
            stream.source = None
            dispatcher.fail(
                Overloaded("too much request-body data is in flight on this connection")
            )
        else:
            dispatcher.receive_body(data, ended)

    # ---- time ----

    def _cut_stalled(self) -> None:
        now = self._context.deadlines.clock_s()
        for stream in self._h2.stalled(now - self._context.config.stalled_timeout_s):
            source, stream.source = stream.source, None
            self._h2.abort(stream)
            if source is not None:
                source.disconnected()

    # ---- output ----

    def flush(self) -> None:
        """Send the output of all streams of this connection, usually in one write."""
        while True:
            sent = self._h2.take(self._transport.writable_bytes())
            if sent:
                self._transport.write(sent)
            if not (sent and self._h2.has_more_bodies):
                break
        for source in self._h2.drained():
            source.drained()
        if self._h2.closed:
            self._transport.close(lingers=self._h2.failed)
            return
        if self._transport.writable_bytes() < 1 - UNSENT_BYTES:
            self._transport.pause_reading()  # the client sends but does not read
        busy = bool(self._h2.streams)
        if busy != self._busy:
            self._busy = busy
            if busy:
                self._idle.clear()
            else:
                self._idle.set(KEEP_ALIVE_TIMEOUT_S)
        since = self._h2.blocked_since
        if since is not None and not self._stalled.is_set:
            waited_s = self._context.deadlines.clock_s() - since
            self._stalled.set(self._context.config.stalled_timeout_s - waited_s)
