"""A request from its head on, of whichever HTTP: who answers it, and its body's way there.

One that a route claims is answered past the application once its body is whole. Every other is the
application's, and so is one whose body grows too long for a route.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from edge.errors import error_response, too_slow
from edge.server.application import AppExchange, Application
from edge.server.deadlines import Deadline, Deadlines
from edge.server.outlet import Handler, Headers, Outlet, Request, Routes, Turn
from edge.telemetry.counts import Counts
from edge.telemetry.exchange import PROTOCOLS, REQUEST_ID, id_field
from ledger.errors import TailraceError

_DIGITS = re.compile(rb"[0-9]{1,15}")


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

    def refuse(
        self,
        outlet: Outlet,
        protocol: str,
        method: str,
        error: TailraceError,
        own_id: bytes | None = None,
    ) -> None:
        """Answer a request here; `own_id` is what it calls itself."""
        if self.counts is not None:
            self.counts.refused(protocol, error.code, error.status)
        answer = error_response(error)
        outlet.start(error.status, [*answer.raw_headers, id_field(own_id)])
        if method != "HEAD":
            outlet.write(bytes(answer.body))
        outlet.end()


class Answer(Outlet, Protocol):
    """An outlet that knows whether its head has been given."""

    @property
    def started(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Incoming:
    """A `Handler`, which hands on what it is told to whoever answers. Tell it nothing more once
    the response has ended."""

    behind: Behind
    request: Request
    outlet: Answer
    server: tuple[str, int] | None
    taken: Callable[[int], None]
    """Called with the size of each piece of the body that has been read."""
    _body: bytearray | None = field(default_factory=bytearray)  # None: all of it has come
    _ahead: int = 0  # bytes of it that were reported as read before the application had them
    _app: AppExchange | None = None
    _handler: Handler | None = None
    _deadline: Deadline | None = None  # of a body

    def begin(self, ended: bool) -> None:
        """`ended`: there is no body."""
        if not (self._may_fit() and self.behind.routes.claims(self.request)):
            self._hand_over(self.request)
        if not ended:
            self._deadline = Deadline(self.behind.deadlines, self._overdue)
            self._deadline.set(self.behind.body_timeout_s)
        self.came(b"", ended)

    def _may_fit(self) -> bool:
        """Unless its declared length says otherwise."""
        length = self.request.header(b"content-length")
        if length is None or _DIGITS.fullmatch(length) is None:
            return length is None
        return int(length) <= self.behind.max_body_bytes

    def came(self, data: bytes, ended: bool) -> None:
        """A piece of the request's body."""
        body = self._body
        if body is None:
            return
        if ended:
            self._expect_no_more()
        if self._app is not None:
            self._app.feed(data, ended)
            return
        body += data
        self.taken(len(data))
        if ended or len(body) > self.behind.max_body_bytes:
            whole = replace(self.request, body=bytes(body)) if body else self.request
            if ended and len(body) <= self.behind.max_body_bytes:
                self._handler = self.behind.routes.serve(whole, self.outlet)
            if self._handler is None:
                self._hand_over(whole).feed(whole.body, ended)
            body.clear()

    def _hand_over(self, request: Request) -> AppExchange:
        self._ahead = len(request.body)
        ask = self.behind.application.ask
        self._handler = self._app = ask(request, self.outlet, self.server, self._app_has)
        return self._app

    def _app_has(self, size: int) -> None:
        """The application has so many bytes more."""
        ahead = min(size, self._ahead)
        self._ahead -= ahead
        self.taken(size - ahead)

    def _expect_no_more(self) -> None:
        self._body = None
        if self._deadline is not None:
            self._deadline.clear()
            self._deadline = None  # it knows this one: garbage that would wait to be found

    def _overdue(self) -> None:
        self.cut(too_slow("body"))

    @property
    def is_whole(self) -> bool:
        return self._body is None

    def cut(self, error: TailraceError) -> None:
        """End a request that has not come whole: with an answer where none has begun."""
        self.gone()
        if self.outlet.started:
            self.outlet.reset()
        else:
            request = self.request
            protocol, own_id = PROTOCOLS[request.http_version], request.header(REQUEST_ID)
            self.behind.refuse(self.outlet, protocol, request.method, error, own_id)

    # ---- a Handler ----

    def drained(self) -> None:
        if self._handler is not None:
            self._handler.drained()

    def gone(self) -> None:
        handler = self._handler
        self.end()
        if handler is not None:
            handler.gone()

    def end(self) -> None:
        """The response has ended. Who gave it is forgotten: garbage that would wait to be found."""
        self._expect_no_more()
        self._handler = self._app = None
