"""HTTP/2 by Hypercorn, on a connection of ours."""

from __future__ import annotations

from edge.server.rest import AppRequest
from edge.server.wire import Shared, Wire


class HypercornH2:
    """A `Speaker` that leaves all to Hypercorn's HTTP/2; `first` is what was read of it already."""

    def __init__(self, wire: Wire, shared: Shared, first: bytes = b"") -> None:
        self._request = AppRequest(shared.rest, wire, lambda _rest: None, alpn="h2")
        if first:
            self._request.receive(first)

    def receive(self, data: bytes) -> None:
        self._request.receive(data)

    def drained(self) -> None:
        self._request.drained()

    def gone(self) -> None:
        self._request.gone()

    def drain(self) -> None:
        pass  # Hypercorn knows by its context
