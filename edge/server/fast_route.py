"""What a dialect says of a request that is answered by a stream, past the application."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

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


class FastRoute(ABC):
    """One of the routes of `StreamRoutes`; the application has its twin, which answers the rest.

    A stream is asked for by POST at `path`, and read below it under a name that `names` matches,
    if the query has the words `reads_by`.
    """

    def __init__(self, path: str, names: str, reads_by: bytes = b"") -> None:
        self._path = path
        self._read = re.compile(f"{re.escape(path)}/({names})".encode())
        self._reads_by = reads_by

    def claims(self, request: Request) -> bool:
        """Whether it may be for this route, as far as the head tells; `body` is empty."""
        if request.method == "POST":
            return request.path == self._path.encode()
        return (
            request.method == "GET"
            and self._reads_by in request.query
            and self._read.fullmatch(request.path) is not None
        )

    def name(self, request: Request) -> str:
        """The path that it serves, as telemetry calls it."""
        return self._path if request.method == "POST" else f"{self._path}/{{id}}"

    def named(self, request: Request) -> str:
        """What is read."""
        found = self._read.fullmatch(request.path)
        assert found is not None  # it was claimed
        return found[1].decode()

    @abstractmethod
    def is_streamed(self, request: Request) -> bool:
        """Whether that is so with the body at hand; at a glance, for nobody is let in yet."""

    @abstractmethod
    def wanted(self, request: Request, head: Head, caller: Caller | None) -> Wanted | None:
        """What is asked by who was let in; None where it is the application's after all.

        Raises TailraceError for what cannot be asked.
        """


def query_of(request: Request) -> list[tuple[str, str]]:
    return parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
