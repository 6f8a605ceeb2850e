"""Which responses left the application and were sent past ASGI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tailrace.edge.server.asgi import AsgiRequest
from tailrace.edge.server.interfaces import ResponseSource


@contextmanager
def detached() -> Iterator[list[ResponseSource]]:
    """Yield the sources that have taken a response over while the block runs."""
    sources: list[ResponseSource] = []
    detach = AsgiRequest.detach

    def noted(self: AsgiRequest, source: ResponseSource) -> None:
        sources.append(source)
        detach(self, source)

    with patch.object(AsgiRequest, "detach", noted):
        yield sources
