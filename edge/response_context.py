"""Headers and callbacks that middleware adds to a response, also if it is sent past ASGI."""

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

    A stream that is sent past ASGI outlives its ASGI task. So middleware cannot change its messages
    or wait for its end, and leaves its headers and callbacks here instead.
    """

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Headers to add to the response, whatever its status."""
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
        """Call the callbacks of a detached response, the innermost middleware's first."""
        while self._at_end:
            self._at_end.pop()()


def fields_of(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers in ASGI's form: names in lower case, and bytes."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
