"""HTTP/2 on a connection: whose each request is, and how long it may take to come.

A request that a route claims is answered past the application as soon as its body is whole; every
other is the application's, a task for each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import partial

from edge.errors import error_response, refusal, too_slow
from edge.server.application import AppExchange
from edge.server.deadlines import Deadline
from edge.server.http2_core import Asked, Came, Happened, Http2Connection, Stream
from edge.server.outlet import UNSENT_BYTES, Request, Wire
from edge.server.wire import KEEP_ALIVE_TIMEOUT_S, Shared
from edge.telemetry.exchange import id_field
from ledger.errors import Overloaded, TailraceError

MAX_BODY_BYTES = 16 << 20
"""Of all open requests of a connection together, unless the settings let two alone have more."""

_DIGITS = re.compile(rb"[0-9]{1,15}")


@dataclass(slots=True)
class Claimed:
    """A request that a route may answer, once its body is whole."""

    request: Request
    body: bytearray = field(default_factory=bytearray)


class Http2:
    """The `Speaker` of HTTP/2; `first` is what was read of it already."""

    def __init__(self, wire: Wire, shared: Shared, first: bytes = b"") -> None:
        self._wire = wire
        self._shared = shared
        self._h2 = Http2Connection(
            shared.deadlines.clock_s,
            partial(shared.turn.touch, self),
            shared.rest.headers,
            secure=wire.secure,
            peer=wire.peer,
        )
        self._claimed: dict[Stream, Claimed] = {}
        self._slow: dict[Stream, Deadline] = {}  # of bodies that are yet to come whole
        self._busy = False
        self._idle = Deadline(shared.deadlines, self._h2.go_away)
        self._idle.set(shared.config.header_timeout_s)
        self._stalled = Deadline(shared.deadlines, self._cut_stalled)
        self.flush()
        if first:
            self.receive(first)

    # ---- what the connection says ----

    def receive(self, data: bytes) -> None:
        self._note(self._h2.receive(data))

    def drained(self) -> None:
        self._wire.resume_reading()
        self._shared.turn.touch(self)

    def gone(self) -> None:
        self._idle.clear()
        self._stalled.clear()
        self._note(self._h2.lost())

    def drain(self) -> None:
        self._h2.go_away()

    # ---- requests ----

    def _note(self, happened: list[Happened]) -> None:
        for event in happened:
            stream = event.stream
            if isinstance(event, Asked):
                self._begin(event)
            elif isinstance(event, Came):
                if event.ended:
                    self._let_go(stream)
                self._feed(stream, event.data, event.ended)
            else:
                self._let_go(stream)
                self._claimed.pop(stream, None)
                handler, stream.handler = stream.handler, None
                if handler is not None:
                    handler.gone()

    def _begin(self, asked: Asked) -> None:
        stream, request = asked.stream, asked.request
        if asked.too_large:
            self._refuse(stream, refusal(431))
            return
        if not asked.ended:
            deadline = Deadline(self._shared.deadlines, partial(self._too_slow, stream))
            deadline.set(self._shared.config.body_timeout_s)
            self._slow[stream] = deadline
        claimed = self._fits(request, asked.ended) and self._shared.routes.claims(request)
        if not claimed:
            self._hand_over(stream, request)
        else:
            self._claimed[stream] = Claimed(request)
        if asked.ended:
            self._feed(stream, b"", ended=True)

    def _fits(self, request: Request, ended: bool) -> bool:
        """Whether the body has a length that a route may await; h2 sees to it that it is true."""
        if ended:
            return True
        length = request.header(b"content-length") or b""
        known = _DIGITS.fullmatch(length) is not None
        return known and int(length) <= self._shared.config.max_body_bytes

    def _feed(self, stream: Stream, data: bytes, ended: bool) -> None:
        limit = max(MAX_BODY_BYTES, 2 * self._shared.config.max_body_bytes)
        if data and self._h2.body_bytes > limit:
            self._cut(stream, _too_many_bodies())
            return
        claimed = self._claimed.get(stream)
        if claimed is not None:
            claimed.body += data
            stream.taken(len(data))
            if ended:
                del self._claimed[stream]
                self._serve(stream, replace(claimed.request, body=bytes(claimed.body)))
        elif isinstance(stream.handler, AppExchange):
            stream.handler.feed(data, ended)
        else:  # it has its answer
            stream.taken(len(data))

    def _serve(self, stream: Stream, request: Request) -> None:
        """Answer a claimed request, which is whole."""
        handler = self._shared.routes.serve(request, stream)
        if handler is None:
            self._hand_over(stream, request).feed(request.body, ended=True)
        elif not stream.over:
            stream.handler = handler

    def _hand_over(self, stream: Stream, request: Request) -> AppExchange:
        """Let the application answer."""
        application = self._shared.application
        exchange = application.ask(request, stream, self._wire.server, stream.taken)
        stream.handler = exchange
        return exchange

    def _refuse(self, stream: Stream, error: TailraceError) -> None:
        if self._shared.counts is not None:
            self._shared.counts.refused("h2", error.code, error.status)
        answer = error_response(error)
        stream.start(answer.status_code, [*answer.raw_headers, id_field()])
        stream.write(bytes(answer.body))
        stream.end()

    # ---- time ----

    def _let_go(self, stream: Stream) -> None:
        deadline = self._slow.pop(stream, None)
        if deadline is not None:
            deadline.clear()

    def _too_slow(self, stream: Stream) -> None:
        self._cut(stream, too_slow("body"))

    def _cut_stalled(self) -> None:
        now = self._shared.deadlines.clock_s()
        for stream in self._h2.stalled(now - self._shared.config.stalled_timeout_s):
            handler, stream.handler = stream.handler, None
            self._h2.abort(stream)
            if handler is not None:
                handler.gone()

    def _cut(self, stream: Stream, error: TailraceError) -> None:
        """End a request that has not come whole: with an answer where none has begun."""
        self._let_go(stream)
        self._claimed.pop(stream, None)
        handler, stream.handler = stream.handler, None
        if handler is not None:
            handler.gone()
        if stream.started:
            stream.reset()
        else:
            self._refuse(stream, error)

    # ---- what goes ----

    def flush(self) -> None:
        """All that the streams of this connection have to send, in one write as a rule."""
        while True:
            sent = self._h2.take(self._wire.room())
            if sent:
                self._wire.write(sent)
            if not (sent and self._h2.has_more_bodies):
                break
        for handler in self._h2.drained():
            handler.drained()
        if self._h2.closed:
            self._wire.close(lingers=self._h2.failed)
            return
        if self._wire.room() < 1 - UNSENT_BYTES:
            self._wire.pause_reading()  # it asks for much and takes nothing
        busy = bool(self._h2.streams)
        if busy != self._busy:
            self._busy = busy
            if busy:
                self._idle.clear()
            else:
                self._idle.set(KEEP_ALIVE_TIMEOUT_S)
        since = self._h2.starved_since
        if since is not None and not self._stalled.is_set:
            waited_s = self._shared.deadlines.clock_s() - since
            self._stalled.set(self._shared.config.stalled_timeout_s - waited_s)


def _too_many_bodies() -> TailraceError:
    return Overloaded("the requests of this connection have too much to say at once")
