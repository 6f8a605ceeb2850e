"""What a TCP connection and the protocol that is spoken on it are to each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from edge.access.connections import ConnectionLimits
from edge.access.rules import Rules
from edge.config import EdgeConfig
from edge.origins.link import Link
from edge.server.application import Application
from edge.server.deadlines import Deadlines
from edge.server.outlet import Routes, Turn
from edge.server.rest import Rest
from edge.telemetry.counts import Counts

KEEP_ALIVE_TIMEOUT_S = 75.0
"""Longer than the usual 60 s of a proxy, so that the proxy is the one to hang up."""
MAX_WAITING_BYTES = 64 << 10
"""Of what a client has sent while its last request is being answered; then it is not read."""


class Speaker(Protocol):
    """A protocol on a connection; HTTP/1.1 may give way to WebSocket or to HTTP/2."""

    def receive(self, data: bytes) -> None:
        """What the client has sent."""

    def drained(self) -> None:
        """The connection has room again, after `Wire.room` had none."""

    def gone(self) -> None:
        """The connection is closed, or lost."""

    def drain(self) -> None:
        """The edge is going away: end what is idle, let what is under way come to its end."""


class Wire(Protocol):
    """A connection, as a protocol uses it. Nothing raises, and nothing is done after the end."""

    speaker: Speaker
    secure: bool
    peer: tuple[str, int] | None
    server: tuple[str, int] | None

    def write(self, data: bytes) -> None: ...

    def room(self) -> int:
        """UNSENT_BYTES less what is unsent; `Speaker.drained` follows where it is below 1."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self, *, lingers: bool = False) -> None:
        """Once all that was written has left. One that lingers takes what the client still sends,
        for a while: to a client that is still sending, a close is a reset and no answer."""

    def abort(self) -> None:
        """At once: what is unsent is thrown away, and the client can see that it is."""


class Connections:
    """The open connections of a server; `none` is set while there are none."""

    def __init__(self) -> None:
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
    rest: Rest
    routes: Routes
    deadlines: Deadlines
    turn: Turn
    limits: ConnectionLimits
    rules: Rules
    counts: Counts | None = None
    connections: Connections = field(default_factory=Connections)
    application: Application = field(init=False)
    """For HTTP/2 and HTTP/3."""

    def __post_init__(self) -> None:
        application = Application(self.rest.asgi, self.turn, state=self.rest.state)
        object.__setattr__(self, "application", application)
