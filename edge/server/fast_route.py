"""What a dialect says of a request that is answered by a stream, past the application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from edge.access.head import Head
from edge.body import Encoder
from edge.server.outlet import Request
from ledger.frame import Caller, Open, Resume


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to ask the origin for, how to show it, and what else the answer's head says."""

    request: Open | Resume
    encoder: Encoder
    headers: Mapping[str, str] = field(default_factory=dict)


class FastRoute(Protocol):
    """One of the routes of `StreamRoutes`; the application has its twin, which answers the rest."""

    def claims(self, request: Request) -> bool:
        """Whether it may be for this route, as far as the head tells; `body` is empty."""

    def name(self, request: Request) -> str:
        """The path that it serves, as telemetry calls it."""

    def is_streamed(self, request: Request) -> bool:
        """Whether that is so with the body at hand; at a glance, for nobody is let in yet."""

    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        """What is asked by who was let in; None where it is the application's after all.

        Raises TailraceError for what cannot be asked.
        """
