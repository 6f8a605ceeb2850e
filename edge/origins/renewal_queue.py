"""The streams that are requested again after a lost link, a bounded number at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tailrace.edge.origins.route import Route

MAX_RENEWALS = 500
"""Maximum number of streams that are requested again at the same time. The others wait for answers,
so that an origin that has just restarted has time for other work, too."""


class RenewalQueue:
    """The requests (routes) that wait for their renewal, and those whose renewal is unanswered.

    A renewal requests an open stream again, from the next frame on.
    """

    def __init__(self) -> None:
        self._waiting: deque[Route] = deque()
        self._in_flight: set[int] = set()  # link corrs of unanswered renewals

    def add(self, route: Route) -> None:
        """Queue a route, whose stream was open on an earlier link."""
        self._waiting.append(route)

    def take(self, routes: Mapping[int, Route]) -> list[Route]:
        """Return the routes to renew now, among those that are still in `routes`."""
        taken: list[Route] = []
        while self._waiting and len(self._in_flight) < MAX_RENEWALS:
            route = self._waiting.popleft()
            if routes.get(route.link_corr) is route:  # the client has not left
                self._in_flight.add(route.link_corr)
                taken.append(route)
        return taken

    def answered(self, link_corr: int) -> bool:
        """Note that a route was answered or removed; return True if its renewal was in flight."""
        if link_corr not in self._in_flight:
            return False
        self._in_flight.discard(link_corr)
        return True

    def clear(self) -> None:
        """Forget all renewals, because the link is lost or every route ends."""
        self._waiting.clear()
        self._in_flight.clear()
