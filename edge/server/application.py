"""Requests that no route claims: the ASGI application, a task for each.

The protocol has the request and an outlet; here is ASGI between them, with back-pressure in both
directions: a piece of the body may come when the one before has been taken, and a piece of the
response waits until the client has room for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

import structlog
from starlette.types import ASGIApp, Message, Scope

from edge.errors import error_response
from edge.server.outlet import Headers, Outlet, Request, Turn
from ledger.errors import TailraceError
from ledger.tasks import cancel

WITHOUT_BODY = (204, 304)
"""Statuses of answers that have none; neither has one to HEAD (RFC 9110, 6.4.1)."""
OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
"""Headers that HTTP/2 and 3 know nothing of (RFC 9113, 8.2.2; RFC 9114, 4.2)."""

log = structlog.get_logger("tailrace.edge")


class Application:
    """The application, and the tasks that run in it."""

    def __init__(self, app: ASGIApp, turn: Turn) -> None:
        self.app = app
        self._turn = turn
        self._tasks: set[asyncio.Task[None]] = set()

    async def ended(self, patience_s: float) -> None:
        """Wait for what is under way; what is not done after `patience_s` seconds is cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        await cancel(self._tasks)

    def ask(
        self,
        request: Request,
        outlet: Outlet,
        server: tuple[str, int] | None = None,
        taken: Callable[[int], None] = lambda _size: None,
    ) -> AppExchange:
        """Have it answered; `request.body` is not looked at, but what is fed.

        `taken` is called with the size of each piece of the body that the application has.
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
        }
        exchange = AppExchange(scope, outlet, self._turn, taken)
        task = asyncio.get_running_loop().create_task(exchange.run(self.app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return exchange


@dataclass(slots=True, eq=False)
class AppExchange:
    """One request in the application: a `Handler` that is fed the request's body too."""

    scope: Scope
    outlet: Outlet
    turn: Turn
    taken: Callable[[int], None]
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

    def gone(self) -> None:
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
            self.turn.flush()

    def _break_off(self) -> None:
        """It has ended without an answer, or within one; also when it was cancelled."""
        self._over = True
        if self._started:
            self.outlet.reset()
            return
        answer = error_response(TailraceError("an error of this edge; its log says more"))
        self.outlet.start(answer.status_code, answer.raw_headers)
        self.outlet.write(bytes(answer.body))
        self.outlet.end()

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
            self.turn.flush()
        return {"type": "http.request", "body": body, "more_body": not self._body_ended}

    async def _send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            given = [(bytes(name).lower(), bytes(value)) for name, value in message["headers"]]
            if not self.scope["http_version"].startswith("1."):
                given = [field for field in given if field[0] not in OF_ONE_CONNECTION]
            self._head = message["status"], given
        elif message["type"] == "http.response.body":
            await self._send_body(message.get("body", b""), message.get("more_body", False))

    async def _send_body(self, body: bytes, more: bool) -> None:
        if self._head is not None:
            (status, headers), self._head = self._head, None
            self._started = True
            self.outlet.start(status, headers)
            if self.scope["method"] == "HEAD" or status in WITHOUT_BODY:
                body, more = b"", False
        if body:
            self.outlet.write(body)
        if not more:
            self._over = True
            self._came.set()
            self.outlet.end()
        self.turn.flush()
        while not self._over and self.outlet.room() < 1:
            self._drained.clear()
            await self._drained.wait()
