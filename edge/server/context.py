"""What all TCP connections of an edge share, and which ones are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from tailrace.edge.access.connections import ConnectionLimits
from tailrace.edge.access.rules import Rules
from tailrace.edge.config import EdgeConfig
from tailrace.edge.origins.link import Link
from tailrace.edge.server.dispatch import ServerContext
from tailrace.edge.server.input import InputTurns
from tailrace.edge.server.interfaces import Transport
from tailrace.edge.server.rest import Rest

KEEP_ALIVE_TIMEOUT_S = 75.0
"""Longer than the usual 60 s of a proxy, so that the proxy is the one to hang up."""


class Connections:
    """The open connections of a server; `none` is set while there are none."""

    def __init__(self) -> None:
        self._open: set[Transport] = set()
        self.none = asyncio.Event()
        self.none.set()

    def add(self, connection: Transport) -> None:
        self._open.add(connection)
        self.none.clear()

    def discard(self, connection: Transport) -> None:
        self._open.discard(connection)
        if not self._open:
            self.none.set()

    def all(self) -> list[Transport]:
        return list(self._open)


def _call_soon(act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(act)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpContext(ServerContext):
    """What all TCP connections of an edge share."""

    config: EdgeConfig
    link: Link
    rest: Rest
    limits: ConnectionLimits
    rules: Rules
    connections: Connections = field(default_factory=Connections)
    input: InputTurns = field(default_factory=lambda: InputTurns(perf_counter, _call_soon))
