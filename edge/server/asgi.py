"""Runs the ASGI application, and lets responses detach from it.

Request and response bodies have back-pressure. A response that is a stream detaches: the task of
the application ends, and the stream writes to the client without ASGI. The server offers this as
the ASGI extension `tailrace.writer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import unquote

import structlog
from starlette.types import ASGIApp, Message, Scope

from tailrace.edge.errors import error_response
from tailrace.edge.flush import FlushBatch
from tailrace.edge.server.deadlines import Deadlines, nothing
from tailrace.edge.server.interfaces import (
    NULL_LISTENER,
    Headers,
    Request,
    ResponseSource,
    ResponseWriter,
)
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.process.tasks import cancel

EXTENSION = "tailrace.writer"
"""Name of the ASGI extension with which a route lets its response detach from ASGI."""
WITHOUT_BODY = (204, 304)
"""Statuses of responses without a body; no response to HEAD has one either (RFC 9110, 6.4.1)."""
FRAMING = frozenset((b"transfer-encoding",))
"""Headers that the server sets itself; those of the application are dropped."""
HOP_BY_HOP = FRAMING | {b"connection", b"keep-alive", b"proxy-connection", b"upgrade"}
"""Headers that HTTP/2 and HTTP/3 do not have (RFC 9113, 8.2.2; RFC 9114, 4.2)."""
REFUSALS = frozenset((400, 401, 403, 405, 406, 411, 413, 414, 415, 421, 422, 426, 429, 431))
"""Statuses that are charged to the client's flood budget, because the request was refused before
any work was done. Other errors, such as 404, are found by a look-up and are not charged."""

log = structlog.get_logger("tailrace.edge")


def _ignore(_size: int) -> None:
    """Do nothing: the default for `consumed`."""


class AsgiApplication:
    """An ASGI application, and the tasks in which it answers requests."""

    def __init__(self, app: ASGIApp, batch: FlushBatch, deadlines: Deadlines) -> None:
        self.app = app
        self._batch = batch
        self._deadlines = deadlines
        self.tasks: set[asyncio.Task[None]] = set()

    def start(
        self,
        request: Request,
        writer: ResponseWriter,
        server: tuple[str, int] | None = None,
        consumed: Callable[[int], None] = _ignore,
        refused: Callable[[], None] = nothing,
        wants_body: Callable[[], None] = nothing,
    ) -> AsgiRequest:
        """Start a task in which the application answers a request.

        Args:
            request: The head; the body follows by `feed`.
            writer: The writer of the response.
            server: The address that the client connected to.
            consumed: Called with the size of each piece of the body that the application takes.
            refused: Called before an answer that refuses the request.
            wants_body: Called once, if the application waits for a body before any of it arrived.
        """
        asgi = AsgiRequest(
            writer,
            self._batch,
            self._deadlines,
            request.method,
            FRAMING if request.http_version.startswith("1") else HOP_BY_HOP,
            consumed,
            refused,
            wants_body,
        )
        # With spec_version 2.4, Starlette would notice only at the next send that a client has
        # left, which may be much later. With 2.3, Starlette listens for the disconnection.
        scope: Scope = {
            "type": "http",
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
            "extensions": {EXTENSION: asgi},
            "state": {},
        }
        task = asyncio.get_running_loop().create_task(asgi.run(self.app, scope))
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return asgi

    async def ended(self, timeout_s: float) -> None:
        """Wait for the tasks under way; cancel those that are not done after `timeout_s`."""
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=timeout_s)
        await cancel(self.tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("request task failed", exc_info=fault)


class State(Enum):
    """The state of a response."""

    PENDING = "pending"  # no head has been written
    STARTED = "started"  # the application sends the response
    DETACHED = "detached"  # a `ResponseSource` writes the response, without ASGI
    ENDED = "ended"  # the application has completed the response, or the client has left


@dataclass(slots=True, eq=False)
class AsgiRequest:
    """A request that the application answers; its routes get this object as the ASGI extension.

    The state changes from PENDING to STARTED with the application's first body message, or to
    DETACHED when a `ResponseSource` takes the response over. It changes to ENDED with the
    application's last body message, or when the client leaves.
    """

    writer: ResponseWriter
    batch: FlushBatch
    deadlines: Deadlines
    method: str
    dropped: frozenset[bytes]
    """Names of headers that are removed from the application's response."""
    consumed: Callable[[int], None]
    refused: Callable[[], None]
    wants_body: Callable[[], None]
    _state: State = State.PENDING
    _source: ResponseSource = NULL_LISTENER  # writes the response once it is detached
    _body: bytearray = field(default_factory=bytearray)
    _body_ended: bool = False
    _body_given: bool = False  # the application has received the end of the body
    _body_begun: bool = False  # the application waits for the body, or some arrived
    _head: tuple[int, Headers] | None = None  # kept until the first body message
    _came: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    # ---- from the protocol ----

    def feed(self, data: bytes, ended: bool) -> None:
        """Take a piece of the request's body; `ended` marks the last one."""
        self._body_ended = self._body_ended or ended
        if self._state is State.DETACHED:
            self.consumed(len(data))  # the application reads no more of the body
            return
        self._body_begun = self._body_begun or bool(data)
        self._body += data
        self._came.set()

    def drained(self) -> None:
        """Continue the response, because the writer has room again."""
        if self._state is State.DETACHED:
            self._source.drained()
        self._room.set()

    def disconnected(self) -> None:
        """End the response: the client has left."""
        source, self._source = self._source, NULL_LISTENER
        self._state = State.ENDED
        self._came.set()
        self._room.set()
        source.disconnected()

    @property
    def is_ended(self) -> bool:
        """True if the response is complete, or the client has left."""
        return self._state is State.ENDED

    # ---- the extension ----

    def detach(self, source: ResponseSource) -> None:
        """Let `source` send the response, which may last longer than the application's task."""
        if self._state is State.ENDED:
            source.disconnected()
            return
        if self._state is not State.PENDING or self._head is not None:
            raise RuntimeError("a response that has begun cannot be detached")
        self._state, self._source = State.DETACHED, source
        if self._body:
            self.consumed(len(self._body))
            self._body.clear()

    # ---- the task ----

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Run the application until it has answered or detached the response."""
        try:
            await app(scope, self._receive, self._send)
        except Exception:  # any error ends this request only
            log.exception("request failed", path=scope["path"])
        finally:
            del scope["extensions"]  # the extensions contain this object: break the cycle
            if self._state in (State.PENDING, State.STARTED):
                self._break_off()
            self.batch.flush()

    def _break_off(self) -> None:
        """End a response that the application has left unfinished, or never begun."""
        started = self._state is State.STARTED
        self._state = State.ENDED
        if started:
            self.writer.reset()
            return
        fault = TailraceError("internal error of this edge; the edge's log has the details")
        answer = error_response(fault)
        self.writer.start(answer.status_code, answer.raw_headers)
        self.writer.write(bytes(answer.body))
        self.writer.end()

    async def _receive(self) -> Message:
        if not (self._body_begun or self._body_ended):
            self._body_begun = True
            self.wants_body()
            self.batch.flush()
        while not (
            self._state is State.ENDED or self._body or (self._body_ended and not self._body_given)
        ):
            self._came.clear()
            await self._came.wait()
        if self._state is State.ENDED:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._body_given = self._body_ended
        if body:
            self.consumed(len(body))
            self.batch.flush()
        return {"type": "http.request", "body": body, "more_body": not self._body_ended}

    async def _send(self, message: Message) -> None:
        if self._state in (State.DETACHED, State.ENDED):
            return
        if message["type"] == "http.response.start":
            given = [(bytes(name).lower(), bytes(value)) for name, value in message["headers"]]
            kept = [field for field in given if field[0] not in self.dropped]
            self._head = message["status"], kept
        elif message["type"] == "http.response.body":
            await self._send_body(message.get("body", b""), message.get("more_body", False))

    async def _send_body(self, body: bytes, more: bool) -> None:
        if self._head is not None:
            (status, headers), self._head = self._head, None
            if status in REFUSALS:
                self.refused()
                if self.is_ended:
                    return  # the flood budget is spent, and the connection closed
            self._state = State.STARTED
            self.writer.start(status, headers)
            if self.method == "HEAD" or status in WITHOUT_BODY:
                body, more = b"", False
        if body:
            self.writer.write(body)
        if not more:
            self._state = State.ENDED
            self._came.set()
            self.writer.end()
        self.batch.flush()
        while self._state is State.STARTED and self.writer.writable_bytes() < 1:
            self._room.clear()
            await self._room.wait()
