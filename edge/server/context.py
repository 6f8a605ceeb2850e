"""The objects that all connections of a server share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from time import perf_counter, time
from typing import Protocol

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.access.rules import Rules
from tailrace.edge.config import EdgeConfig
from tailrace.edge.errors import error_response
from tailrace.edge.flush import FlushBatch
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.server.asgi import AsgiApplication
from tailrace.edge.server.deadlines import Deadlines, nothing
from tailrace.edge.server.input import InputTurns
from tailrace.edge.server.interfaces import (
    Headers,
    Request,
    ResponseSource,
    ResponseWriter,
    Transport,
)
from tailrace.edge.telemetry.request_metrics import Counts, id_field
from tailrace.ledger.errors import TailraceError

KEEP_ALIVE_TIMEOUT_S = 75.0
"""Time for which an idle connection is kept, in seconds. Most proxies close theirs after 60 s, and
should close first: a request that a proxy sends while the edge closes is lost."""


class Connections:
    """The open connections of a server; `none` is set while there are none."""

    def __init__(self) -> None:
        self._open: set[Transport] = set()
        self.none = asyncio.Event()
        self.none.set()

    def add(self, connection: Transport) -> None:
        """Count a connection that has opened."""
        self._open.add(connection)
        self.none.clear()

    def discard(self, connection: Transport) -> None:
        """Forget a connection that has closed."""
        self._open.discard(connection)
        if not self._open:
            self.none.set()

    def all(self) -> list[Transport]:
        """Return the open connections."""
        return list(self._open)


class CommonHeaders:
    """The headers of every response: `Date`, made once a second; `Alt-Svc` if HTTP/3 is served."""

    def __init__(self, alt_svc: Sequence[str] = ()) -> None:
        self._alt_svc = [(b"alt-svc", value.encode()) for value in alt_svc]
        self._headers: list[tuple[bytes, bytes]] = []
        self._second = 0

    def __call__(self) -> Headers:
        """Return the headers; callers must not change the list."""
        if (second := int(time())) != self._second:
            self._second = second
            self._headers = [(b"date", formatdate(second, usegmt=True).encode()), *self._alt_svc]
        return self._headers


class RunningRequest(ResponseSource, Protocol):
    """A request that the application is answering; `feed` gives it the request's body."""

    def feed(self, data: bytes, ended: bool) -> None:
        """Pass a piece of the body to the application; `ended` marks the last one."""


class Application(Protocol):
    """The application that answers every request: ASGI, or a test's stand-in."""

    def start(
        self,
        request: Request,
        writer: ResponseWriter,
        server: tuple[str, int] | None = None,
        consumed: Callable[[int], None] = ...,
        refused: Callable[[], None] = nothing,
        wants_body: Callable[[], None] = nothing,
    ) -> RunningRequest:
        """Start to answer a request; see `AsgiApplication.start`."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The objects that every protocol needs for its requests, over TCP and QUIC alike."""

    batch: FlushBatch
    application: Application
    headers: Callable[[], Headers]
    """Returns the headers that are added to every response."""
    deadlines: Deadlines
    body_timeout_s: float
    """Maximum time from a request's head to the end of its body, in seconds."""
    stalled_timeout_s: float
    """Time in seconds after which a response is reset if its client does not read it."""
    counts: Counts | None = None

    def refuse(
        self,
        writer: ResponseWriter,
        protocol: str,
        method: str,
        error: TailraceError,
        headers: Headers = (),
        path: str = "",
    ) -> None:
        """Answer a request with an error instead of the application's response.

        `headers` are the request's, as far as they are known. The API at `path` decides the shape
        of the error; the default is Tailrace's own shape.
        """
        name, request_id = id_field(headers)
        answer = error_response(error, path, request_id.decode("ascii"))
        if self.counts is not None:
            self.counts.refused(protocol, error.code, answer.status_code)
        writer.start(answer.status_code, [*answer.raw_headers, (name, request_id)])
        if method != "HEAD":
            writer.write(bytes(answer.body))
        writer.end()


def _call_soon(act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(act)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpContext(ServerContext):
    """The objects that all TCP connections of an edge share."""

    application: AsgiApplication
    config: EdgeConfig
    link: OriginPool
    limits: ConnectionLimits
    rules: Rules
    connections: Connections = field(default_factory=Connections)
    input: InputTurns = field(default_factory=lambda: InputTurns(perf_counter, _call_soon))
