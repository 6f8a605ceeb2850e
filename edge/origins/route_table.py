"""The routes of one link, found by their correlation id on the link, or by their client."""

from __future__ import annotations

from collections import Counter

from tailrace.edge.origins.open_requests import OpenRequests
from tailrace.edge.origins.route import Route
from tailrace.edge.origins.sink import Sink

MAX_CORR = 2**32 - 1


class RouteTable:
    """The open requests at one origin.

    It gives each route a correlation id (corr) on the link, counts the route for its client's
    limits, and counts the bytes of requests that may have to be sent again.

    A route that has joined a shared stream (`edge.origins.fan_out`) has no corr on the link. The
    route of the shared subscription has a corr, and belongs to no client.
    """

    def __init__(self, last_corr: int, open_requests: OpenRequests) -> None:
        """Begin without routes; the first route gets the corr after `last_corr`."""
        self.by_corr: dict[int, Route] = {}
        self.joined: dict[Route, None] = {}  # routes that have joined a shared stream
        self.sources: dict[int, Route] = {}  # routes of shared subscriptions, by corr on the link
        self.held_bytes = 0  # total size of unanswered requests
        self._by_client: dict[Sink, dict[int, Route]] = {}
        self._left: Counter[Sink] = Counter()  # unanswered requests that a client has detached from
        self._last_corr = last_corr
        self._open_requests = open_requests

    def __len__(self) -> int:
        """Return the number of routes of clients."""
        return len(self.by_corr) - len(self.sources) + len(self.joined)

    def all(self) -> list[Route]:
        """Return all routes of clients."""
        sources = self.sources
        on_link = [route for corr, route in self.by_corr.copy().items() if corr not in sources]
        return on_link + list(self.joined)

    def find(self, sink: Sink, client_corr: int) -> Route | None:
        """Return the route of a client's request; None if it is not open."""
        return self._by_client.get(sink, {}).get(client_corr)

    def of(self, sink: Sink) -> list[Route]:
        """Return the routes of a client."""
        return list(self._by_client.get(sink, {}).values())

    def left_by(self, sink: Sink) -> int:
        """Return the number of unanswered requests that a client has detached from."""
        return self._left[sink]

    def add(self, route: Route) -> None:
        """Add a route, with a new corr on the link."""
        route.link_corr = self._free_corr()
        self.by_corr[route.link_corr] = route
        self._open_requests.add(route.owner)
        self._by_client.setdefault(route.sink, {})[route.client_corr] = route
        self.held_bytes += len(route.request)

    def remove(self, route: Route) -> None:
        """Remove a route. It keeps its encoded request, so that another relay can send it."""
        self.held_bytes -= len(route.request)
        if route.joined:
            del self.joined[route]
        else:
            del self.by_corr[route.link_corr]
        self._open_requests.remove(route.owner)
        if not route.left:
            self._forget_client(route)
        else:
            self._left[route.sink] -= 1
            if not self._left[route.sink]:
                del self._left[route.sink]

    def leave(self, route: Route) -> None:
        """Free the client's corr, but keep the route until its request is answered."""
        self._forget_client(route)
        self.forget_request(route)
        self._left[route.sink] += 1
        route.left = True

    def forget_request(self, route: Route) -> None:
        """Free the memory of a request that will not be sent again."""
        self.held_bytes -= len(route.request)
        route.request = b""

    def transfer(self, sink: Sink, to: Sink) -> None:
        """Give the routes of a client to another sink, which has none so far."""
        routes = self._by_client.pop(sink, None)
        if routes is not None:
            self._by_client[to] = routes
            for route in routes.values():
                route.sink = to

    # ---- shared subscriptions ----

    def promote(self, route: Route, source: Route) -> None:
        """Let `source` use the corr of a route, and let this route join the shared stream."""
        source.link_corr = route.link_corr
        self.by_corr[source.link_corr] = self.sources[source.link_corr] = source
        self.joined[route] = None

    def remove_source(self, source: Route) -> None:
        """Remove the route of a shared subscription."""
        del self.by_corr[source.link_corr], self.sources[source.link_corr]

    def leave_link(self, route: Route) -> None:
        """Free the corr of a route that joins a shared stream."""
        del self.by_corr[route.link_corr]
        self.joined[route] = None

    def rejoin_link(self, route: Route) -> None:
        """Give a new corr to a route that leaves a shared stream."""
        del self.joined[route]
        route.link_corr = self._free_corr()
        self.by_corr[route.link_corr] = route

    def _free_corr(self) -> int:
        corr = self._last_corr
        while True:
            corr = corr % MAX_CORR + 1
            if corr not in self.by_corr:
                self._last_corr = corr
                return corr

    def _forget_client(self, route: Route) -> None:
        routes = self._by_client[route.sink]
        del routes[route.client_corr]
        if not routes:
            del self._by_client[route.sink]
