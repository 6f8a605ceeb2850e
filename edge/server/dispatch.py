"""Passes a request of any protocol, and then the request's body, to the application.

The application takes the body piece by piece, and may detach the response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tailrace.edge.errors import shape_path, too_slow
from tailrace.edge.server.context import RunningRequest, ServerContext
from tailrace.edge.server.deadlines import Deadline, nothing
from tailrace.edge.server.interfaces import Request, ResponseWriter
from tailrace.edge.telemetry.request_metrics import PROTOCOLS
from tailrace.ledger.errors import TailraceError


class Answer(ResponseWriter, Protocol):
    """A response writer that reports whether the response has begun."""

    @property
    def started(self) -> bool:
        """True once `start` has been called."""


@dataclass(slots=True, eq=False)
class RequestDispatcher:
    """A request that the application answers: the `ResponseSource` that the protocol calls.

    Once the response has ended, the protocol calls nothing but `forget`.
    """

    context: ServerContext
    request: Request
    writer: Answer
    server: tuple[str, int] | None
    consumed: Callable[[int], None]
    """Called with the size of each piece of the body that the application has taken."""
    refused: Callable[[], None] = nothing
    """Called when the application refuses the request, before the answer begins."""
    wants_body: Callable[[], None] = nothing
    """Called when the application waits for a body before any of it has arrived."""
    is_whole: bool = False
    """True once the whole request has arrived."""
    _running: RunningRequest | None = None
    _deadline: Deadline | None = None  # limits the time until the end of the body

    def begin(self, ended: bool) -> None:
        """Pass the request to the application; `ended` means that it has no body."""
        self._running = self.context.application.start(
            self.request, self.writer, self.server, self.consumed, self.refused, self.wants_body
        )
        if not ended:
            self._deadline = Deadline(self.context.deadlines, self._overdue)
            self._deadline.set(self.context.body_timeout_s)
        self.receive_body(b"", ended)

    def receive_body(self, data: bytes, ended: bool) -> None:
        """Pass a piece of the body to the application; `ended` marks the last one."""
        if self.is_whole:
            return
        if ended:
            self._expect_no_more()
        if self._running is not None:
            self._running.feed(data, ended)

    def fail(self, error: TailraceError) -> None:
        """End a request whose body is incomplete, with an error response or a reset."""
        self.disconnected()
        if self.writer.started:
            self.writer.reset()
        else:
            request = self.request
            protocol = PROTOCOLS[request.http_version]
            path = shape_path(request.path.decode("latin-1"), request.text(b"accept"))
            self.context.refuse(self.writer, protocol, request.method, error, request.headers, path)

    def forget(self) -> None:
        """Drop the deadline and the application's request, so that no reference cycle is left."""
        if self._deadline is not None:
            self._deadline.end()
            self._deadline = None
        self._running = None

    def _expect_no_more(self) -> None:
        self.is_whole = True
        if self._deadline is not None:
            self._deadline.end()
            self._deadline = None

    def _overdue(self) -> None:
        self.fail(too_slow("body"))

    # ---- a ResponseSource ----

    def drained(self) -> None:
        """Tell the application, or a detached stream, that the writer has room again."""
        if self._running is not None:
            self._running.drained()

    def disconnected(self) -> None:
        """Tell the application, or a detached stream, that the client has left."""
        running = self._running
        self.forget()
        if running is not None:
            running.disconnected()
