"""Headers and callbacks that middleware adds to a response, even if it bypasses ASGI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Scope

KEY = "tailrace.response"
"""Key of the ASGI scope under which the `ResponseContext` of a request is stored."""


@dataclass(slots=True, eq=False)
class ResponseContext:
    """Headers to add to one response, and callbacks for its end.

    A response that the server sends itself, without ASGI messages, outlives its ASGI task. So
    middleware cannot change its messages or wait for its end. Instead it adds headers and
    callbacks to this object.
    """

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Headers to add to the response, whatever its status."""
    detached: bool = False
    """True if the response is sent without ASGI messages, and ends after the ASGI task."""
    reports_writes: bool = False
    """True if the sender of the body itself reports each write to the request's metrics."""
    _at_end: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope) -> ResponseContext:
        """Return the context of a request, which the first middleware creates."""
        context: ResponseContext = scope.setdefault(KEY, cls())
        return context

    @contextmanager
    def ending(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` when the response ends: after the block, or later if it is detached."""
        self._at_end.append(callback)
        try:
            yield
        finally:
            if not self.detached:
                self._at_end.remove(callback)
                callback()

    def end(self) -> None:
        """Call the callbacks of a detached response, beginning with the innermost middleware."""
        while self._at_end:
            self._at_end.pop()()


def fields_of(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers in ASGI's form: pairs of bytes, with names in lower case."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
