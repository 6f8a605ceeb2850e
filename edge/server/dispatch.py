"""A request of HTTP/2 or HTTP/3 from its head on: who answers it, and its body's way there.

One that a route claims is answered past the application once its body is whole. Every other is the
application's, in a task of its own, and so is one whose body grows too long for a route. Between it
and the protocol is ASGI, with back-pressure in both directions: a piece of the body may come when
the one before has been taken, and a piece of the response waits until the client has room for it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

import structlog
from starlette.types import ASGIApp, Message, Scope

from tailrace.edge.access.bodies import BodyBudget
from tailrace.edge.access.middleware import ADMITTED
from tailrace.edge.errors import error_response, too_slow
from tailrace.edge.server.deadlines import Deadline, Deadlines
from tailrace.edge.server.flush import FlushBatch
from tailrace.edge.server.interfaces import (
    Admitted,
    Headers,
    Request,
    ResponseSource,
    ResponseWriter,
    Routes,
)
from tailrace.edge.telemetry.request_metrics import PROTOCOLS, Counts, id_field
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.process.tasks import cancel

WITHOUT_BODY = (204, 304)
"""Statuses of answers that have none; neither has one to HEAD (RFC 9110, 6.4.1)."""
OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
"""Headers that HTTP/2 and 3 know nothing of (RFC 9113, 8.2.2; RFC 9114, 4.2)."""

log = structlog.get_logger("tailrace.edge")


class Application:
    """The application, and the tasks that run in it."""

    def __init__(self, app: ASGIApp, batch: FlushBatch) -> None:
        self.app = app
        self._batch = batch
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that `ended` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("request.failed", exc_info=fault)

    async def ended(self, patience_s: float) -> None:
        """Wait for what is under way; what is not done after `patience_s` seconds is cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        await cancel(self._tasks)

    def ask(
        self,
        request: Request,
        writer: ResponseWriter,
        server: tuple[str, int] | None = None,
        taken: Callable[[int], None] = lambda _size: None,
        admitted: Admitted | None = None,
    ) -> AsgiRequest:
        """Have it answered; `request.body` is not looked at, but what is fed.

        `taken` is called with the size of each piece of the body that the application has.
        `admitted` is the request if the access rules have been applied already.
        """
        scope: Scope = {
            "type": "http",
            # To an application of 2.4 a client that has gone is an error of the next send, which
            # may be long in coming: Starlette listens for it only where it is told 2.3.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version,
            "method": request.method,
            "scheme": request.scheme,
            "path": unquote(request.path.decode("ascii")),
            "raw_path": request.path,
            "query_string": request.query,
            "root_path": "",
            "headers": list(request.headers),
            "client": request.peer,
            "server": server,
            "extensions": {},
            "state": {} if admitted is None else {ADMITTED: admitted},
        }
        asgi = AsgiRequest(scope, writer, self._batch, taken, admitted)
        self.spawn(asgi.run(self.app))
        return asgi


@dataclass(slots=True, eq=False)
class AsgiRequest:
    """One request in the application: a `ResponseSource` that is fed the request's body too."""

    scope: Scope
    writer: ResponseWriter
    batch: FlushBatch
    taken: Callable[[int], None]
    admitted: Admitted | None
    _body: bytearray = field(default_factory=bytearray)
    _body_ended: bool = False
    _body_given: bool = False  # the application has had the end of it
    _head: tuple[int, Headers] | None = None  # until the body's first piece
    _started: bool = False
    _over: bool = False  # the response has ended, or the client has gone
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _drained: asyncio.Event = field(default_factory=asyncio.Event)

    # ---- what the protocol says ----

    def feed(self, data: bytes, ended: bool) -> None:
        """A piece of the request's body."""
        self._body += data
        self._body_ended = self._body_ended or ended
        self._came.set()

    def drained(self) -> None:
        self._drained.set()

    def disconnected(self) -> None:
        self._over = True
        self._came.set()
        self._drained.set()

    # ---- the application's side ----

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self._receive, self._send)
        except Exception:  # whatever it is, only this request suffers
            log.exception("request failed", path=self.scope["path"])
        finally:
            if not self._over:
                self._break_off()
            if self.admitted is not None:
                self.admitted.done()
            self.batch.flush()

    def _break_off(self) -> None:
        """It has ended without an answer, or within one; also when it was cancelled."""
        self._over = True
        if self._started:
            self.writer.reset()
            return
        answer = error_response(TailraceError("an error of this edge; its log says more"))
        self.writer.start(answer.status_code, answer.raw_headers)
        self.writer.write(bytes(answer.body))
        self.writer.end()

    async def _receive(self) -> Message:
        while not (self._over or self._body or (self._body_ended and not self._body_given)):
            self._came.clear()
            await self._came.wait()
        if self._over:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._body_given = self._body_ended
        if body:
            self.taken(len(body))
            self.batch.flush()
        return {"type": "http.request", "body": body, "more_body": not self._body_ended}

    async def _send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            given = [(bytes(name).lower(), bytes(value)) for name, value in message["headers"]]
            kept = [field for field in given if field[0] not in OF_ONE_CONNECTION]
            self._head = message["status"], kept
        elif message["type"] == "http.response.body":
            await self._send_body(message.get("body", b""), message.get("more_body", False))

    async def _send_body(self, body: bytes, more: bool) -> None:
        if self._head is not None:
            (status, headers), self._head = self._head, None
            self._started = True
            self.writer.start(status, headers)
            if self.scope["method"] == "HEAD" or status in WITHOUT_BODY:
                body, more = b"", False
        if body:
            self.writer.write(body)
        if not more:
            self._over = True
            self._came.set()
            self.writer.end()
        self.batch.flush()
        while not self._over and self.writer.writable_bytes() < 1:
            self._drained.clear()
            await self._drained.wait()


_DIGITS = re.compile(rb"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What is behind every connection."""

    batch: FlushBatch
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
    bodies: BodyBudget = field(default_factory=BodyBudget)

    def refuse(
        self, writer: ResponseWriter, protocol: str, method: str, error: TailraceError
    ) -> None:
        """Answer a request here."""
        if self.counts is not None:
            self.counts.refused(protocol, error.code, error.status)
        answer = error_response(error)
        writer.start(error.status, [*answer.raw_headers, id_field()])
        if method != "HEAD":
            writer.write(bytes(answer.body))
        writer.end()


class Answer(ResponseWriter, Protocol):
    """A writer that knows whether its head has been given."""

    @property
    def started(self) -> bool: ...


@dataclass(slots=True, eq=False)
class RequestDispatcher:
    """A `ResponseSource`, which hands on what it is told to whoever answers.

    Tell it nothing more once the response has ended.
    """

    context: ServerContext
    request: Request
    writer: Answer
    server: tuple[str, int] | None
    taken: Callable[[int], None]
    """Called with the size of each piece of the body that has been read."""
    _body: bytearray | None = field(default_factory=bytearray)  # None: all of it has come
    _ahead: int = 0  # bytes of it that were reported as read before the application had them
    _admitted: Admitted | None = None  # a route's, until its body is whole
    _counted: int = 0  # bytes of the body that count for the budget of all
    _app: AsgiRequest | None = None
    _source: ResponseSource | None = None
    _deadline: Deadline | None = None  # of a body

    def begin(self, ended: bool) -> None:
        """Admit the request, or hand it to the application. `ended`: there is no body."""
        if self._may_fit() and self.context.routes.claims(self.request):
            if ended:
                self._body = None  # so that a writer that refuses it knows
            self._admitted = self.context.routes.admit(self.request, self.writer)
            if self._admitted is None:
                return
            self._body = bytearray()
        else:
            self._hand_over(self.request)
        if not ended:
            self._deadline = Deadline(self.context.deadlines, self._overdue)
            self._deadline.set(self.context.body_timeout_s)
        self.came(b"", ended)

    def _may_fit(self) -> bool:
        """Unless its declared length says otherwise."""
        length = self.request.header(b"content-length")
        if length is None or _DIGITS.fullmatch(length) is None:
            return length is None
        return int(length) <= self.context.max_body_bytes

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
        try:
            self.context.bodies.take(len(data))
        except TailraceError as error:
            self.cut(error)
            return
        self._counted += len(data)
        body += data
        self.taken(len(data))
        fits = len(body) <= self.context.max_body_bytes
        if ended or not fits:
            self._whole(bytes(body), ended, fits)
            body.clear()

    def _whole(self, body: bytes, ended: bool, fits: bool) -> None:
        """Have it answered: all of its body has come, or more than a route takes."""
        admitted, self._admitted = self._admitted, None
        assert admitted is not None  # or it would be the application's already
        self.context.bodies.give(self._counted)
        self._counted = 0
        if ended and fits:
            self._source = self.context.routes.serve(admitted, body, self.writer)
        if self._source is None:
            self._ahead = len(body)
            self._hand_over(self.request, admitted).feed(body, ended)

    def _hand_over(self, request: Request, admitted: Admitted | None = None) -> AsgiRequest:
        ask = self.context.application.ask
        app = ask(request, self.writer, self.server, self._app_has, admitted)
        self._source = self._app = app
        return app

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
        self.disconnected()
        if self.writer.started:
            self.writer.reset()
        else:
            request = self.request
            protocol = PROTOCOLS[request.http_version]
            self.context.refuse(self.writer, protocol, request.method, error)

    # ---- a ResponseSource ----

    def drained(self) -> None:
        if self._source is not None:
            self._source.drained()

    def disconnected(self) -> None:
        self._expect_no_more()
        self.context.bodies.give(self._counted)
        self._counted = 0
        admitted, self._admitted = self._admitted, None
        if admitted is not None:
            admitted.done()
        source, self._source, self._app = self._source, None, None
        if source is not None:
            source.disconnected()
