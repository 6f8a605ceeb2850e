"""What all connections of an edge share, and which ones over TCP are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from time import time

from starlette.types import ASGIApp

from edge.access.connections import ConnectionLimits
from edge.access.rules import Rules
from edge.config import EdgeConfig
from edge.origins.link import Link
from edge.server.deadlines import Deadlines
from edge.server.incoming import Application, Behind
from edge.server.outlet import Headers, Routes, Turn, Wire
from edge.telemetry.exchange import Counts

KEEP_ALIVE_TIMEOUT_S = 75.0
"""Longer than the usual 60 s of a proxy, so that the proxy is the one to hang up."""
MAX_WAITING_BYTES = 64 << 10
"""Of what a client has sent while its last request is being answered; then it is not read."""


class Connections:
    """The open connections of a server; `none` is set while there are none."""

    def __init__(self) -> None:
        self.draining = False  # answers that begin now are the last of their connections
        self._open: set[Wire] = set()
        self.none = asyncio.Event()
        self.none.set()

    def add(self, connection: Wire) -> None:
        self._open.add(connection)
        self.none.clear()

    def discard(self, connection: Wire) -> None:
        self._open.discard(connection)
        if not self._open:
            self.none.set()

    def all(self) -> list[Wire]:
        return list(self._open)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all connections of an edge share."""

    config: EdgeConfig
    link: Link
    app: ASGIApp
    alt_svc: Sequence[bytes]
    """What tells clients of HTTP/3."""
    routes: Routes
    deadlines: Deadlines
    turn: Turn
    limits: ConnectionLimits
    rules: Rules
    counts: Counts | None = None
    asked_for: Callable[[str], None] | None = None
    """Told the host names of QUIC's handshakes."""
    connections: Connections = field(default_factory=Connections)
    behind: Behind = field(init=False)
    """Of the requests on all of them."""

    def headers(self) -> Headers:
        """Those of every answer."""
        return _headers_at(int(time()), *self.alt_svc)

    def __post_init__(self) -> None:
        application = Application(self.app, self.turn)
        config = self.config
        behind = Behind(
            *(self.turn, self.routes, application, self.headers, self.deadlines),
            *(config.max_body_bytes, config.body_timeout_s, config.stalled_timeout_s),
            self.counts,
        )
        object.__setattr__(self, "behind", behind)


@lru_cache(maxsize=1)
def _headers_at(second: int, *alt_svc: bytes) -> Headers:
    """Made once a second."""
    date = formatdate(second, usegmt=True).encode()
    return [(b"date", date), *((b"alt-svc", each) for each in alt_svc)]
