"""Flood budget: how much unproductive input a client may send before the edge hangs up.

Input is unproductive when it makes the edge work and asks for nothing that would be answered with
a stream or a page: pings, empty frames, resets, requests that are refused at once. Each kind costs
points. Points decay with time, and with responses that the client reads.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_POINTS = 1000.0
"""Maximum points that a connection may owe; over it the edge hangs up."""
DECAY_PER_S = 100.0
DECAY_PER_DATA = 0.5
"""Points that decay with each piece of a response that is sent, because the client does read."""
REFUSED_POINTS = 5.0
"""Points for a request that is refused at once, for instance because it has no API key."""
EMPTY_POINTS = 1.0
"""Points for a frame that carries nothing, or next to nothing."""
SMALL_PIECE_BYTES = 64
"""Minimum size of a piece of a body or message, in bytes. A smaller piece costs EMPTY_POINTS,
unless it is the last one."""


class FloodBudget:
    """The points that one connection owes."""

    __slots__ = ("_clock_s", "_decayed_at", "points")

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._decayed_at = clock_s()
        self.points = 0.0

    def spend(self, points: float) -> bool:
        """Charge points; return False if the connection owes too many."""
        self.points += points
        if self.points > MAX_POINTS:
            now = self._clock_s()
            self.decay((now - self._decayed_at) * DECAY_PER_S)
            self._decayed_at = now
        return self.points <= MAX_POINTS

    def decay(self, points: float) -> None:
        self.points = max(0.0, self.points - points)
