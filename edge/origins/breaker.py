"""When an origin that fails is left alone, and when it is tried again: a circuit breaker.

Sans-I/O. A table says which state follows which; after `TRIPS` failures in a row the origin gets no
new request until it has had time to recover, then one, and more only when that one worked.
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


class Event(Enum):
    WORKED = "worked"
    FAILED = "failed"
    TRIPPED = "tripped"  # failed, once too often
    RESTED = "rested"


TABLE: dict[tuple[State, Event], State] = {
    (State.CLOSED, Event.WORKED): State.CLOSED,
    (State.CLOSED, Event.FAILED): State.CLOSED,
    (State.CLOSED, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.WORKED): State.OPEN,  # an answer to what was asked before
    (State.OPEN, Event.FAILED): State.OPEN,
    (State.OPEN, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.RESTED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.WORKED): State.CLOSED,
    (State.HALF_OPEN, Event.FAILED): State.OPEN,
    (State.HALF_OPEN, Event.TRIPPED): State.OPEN,
}


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
            self._enter(Event.RESTED)
            self._until = now
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and now >= self._until)

    def asked(self, now: float) -> None:
        """A request was sent to it: while it is tried, no second one is."""
        if self.state is State.HALF_OPEN:
            self._until = now + PROBE_S

    def worked(self) -> None:
        self._enter(Event.WORKED)
        self._failures = 0
        if self.state is State.CLOSED:
            self._backoff.reset()

    def failed(self, now: float) -> None:
        """It did not answer as it should, and that was its own fault."""
        self._failures += 1
        was = self.state
        self._enter(Event.TRIPPED if self._failures >= TRIPS else Event.FAILED)
        if self.state is State.OPEN and was is not State.OPEN:
            self._until = now + self._backoff.next_delay_s()

    def _enter(self, event: Event) -> None:
        self.state = TABLE[self.state, event]
