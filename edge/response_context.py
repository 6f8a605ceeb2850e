"""What the middlewares want done for a response, whoever sends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Scope

KEY = "tailrace.response"
"""The key of the scope under which the context of a request's response lies."""


@dataclass(slots=True, eq=False)
class ResponseContext:
    """The headers and the callbacks that the middlewares have for one response.

    A stream that is sent past ASGI outlives its ASGI task. So a middleware leaves here what it
    would otherwise do to the messages and at the end of the task.
    """

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Headers that the middlewares add to every response."""
    detached: bool = False
    """True if the response is sent past ASGI, and ends after the task."""
    reports_writes: bool = False
    """True if the sender of the body reports its writes to the metrics of the request itself."""
    _at_end: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope) -> ResponseContext:
        """Return the context of a request, which the first middleware creates."""
        context: ResponseContext = scope.setdefault(KEY, cls())
        return context

    @contextmanager
    def ending(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` when the response ends: after the block, unless it was detached."""
        self._at_end.append(callback)
        try:
            yield
        finally:
            if not self.detached:
                self._at_end.remove(callback)
                callback()

    def end(self) -> None:
        """Make the callbacks of a detached response, the innermost middleware's first."""
        while self._at_end:
            self._at_end.pop()()


def fields_of(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
