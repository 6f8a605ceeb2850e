"""When an origin that fails is left alone, and when it is tried again: a circuit breaker.

Sans-I/O. After `TRIPS` failures in a row the origin gets no new request until it has had time to
recover, then one, and more only when that one worked.
"""

from __future__ import annotations

from enum import Enum

from ledger.backoff import Backoff

TRIPS = 5
"""Failures in a row: a request that one bad input fails is no reason to leave an origin."""
REST_MIN_S = 0.5
REST_MAX_S = 30.0
PROBE_S = 10.0
"""A probe that has had no answer for so long is given up, and another one let through."""


class State(Enum):
    CLOSED = "closed"  # it works
    OPEN = "open"  # it rests
    HALF_OPEN = "half-open"  # one request tries it


class Breaker:
    """Of one origin."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self.state = State.CLOSED
        self._backoff = backoff or Backoff(REST_MIN_S, REST_MAX_S)
        self._failures = 0
        self._until = 0.0  # rests, or waits for its probe's answer

    def allows(self, now: float) -> bool:
        """Whether it may be asked now; who then asks says so by `asked`."""
        if self.state is State.OPEN and now >= self._until:
            self.state, self._until = State.HALF_OPEN, now
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and now >= self._until)

    def asked(self, now: float) -> None:
        """A request was sent to it: while it is tried, no second one is."""
        if self.state is State.HALF_OPEN:
            self._until = now + PROBE_S

    def worked(self) -> None:
        self._failures = 0
        if self.state is not State.OPEN:  # else it is an answer to what was asked before
            self.state = State.CLOSED
            self._backoff.reset()

    def failed(self, now: float) -> None:
        """It did not answer as it should, and that was its own fault."""
        self._failures += 1
        is_tried = self.state is State.HALF_OPEN
        if is_tried or (self.state is State.CLOSED and self._failures >= TRIPS):
            self.state, self._until = State.OPEN, now + self._backoff.next_delay_s()
