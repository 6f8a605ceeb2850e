"""A circuit breaker: it stops requests to a failing peer and later lets a trial through.

Sans-I/O; every `now` is seconds of one clock. After Nygard, "Release It!" (2007).
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from math import inf

from tailrace.ledger.flow.backoff import Backoff


class CircuitState(StrEnum):
    """The state of a circuit breaker; its value is a label of metrics."""

    CLOSED = "closed"
    """The peer works: all requests are allowed."""
    HALF_OPEN = "half-open"
    """The pause is over: one trial request is allowed."""
    OPEN = "open"
    """Requests to the peer are paused: none is allowed."""


class _Event(Enum):
    TRIPPED = auto()  # the limit of failures in a row was reached
    RESTED = auto()
    SUCCEEDED = auto()
    FAILED = auto()


_NEXT = {
    (CircuitState.CLOSED, _Event.TRIPPED): CircuitState.OPEN,
    (CircuitState.OPEN, _Event.RESTED): CircuitState.HALF_OPEN,
    (CircuitState.HALF_OPEN, _Event.SUCCEEDED): CircuitState.CLOSED,
    (CircuitState.HALF_OPEN, _Event.FAILED): CircuitState.OPEN,
}
"""Maps a state and an event to the next state. Any other event changes nothing.

So the outcome of a request that was sent before the circuit opened has no effect.
"""


class CircuitBreaker:
    """The breaker of one peer: `trips` failures in a row open it; `rest` draws for how long.

    If a trial request has no outcome within `trial_s` seconds, another trial is allowed.
    """

    def __init__(self, trips: int, rest: Backoff, trial_s: float = inf) -> None:
        self.state = CircuitState.CLOSED
        self.failures = 0
        """Number of failures in a row."""
        self._trips = trips
        self._rest = rest
        self._trial_s = trial_s
        self._rests_until = 0.0
        self._trial_until: float | None = None  # time after which another trial is allowed

    def allows(self, now: float) -> bool:
        """Return True if a request may be sent now. The caller must report it with `sent`."""
        if self.state is CircuitState.OPEN and now >= self._rests_until:
            self._move(_Event.RESTED)
        if self.state is CircuitState.HALF_OPEN:
            return self._trial_until is None or now >= self._trial_until
        return self.state is CircuitState.CLOSED

    def sent(self, now: float) -> None:
        """Record a sent request, which is the trial if the circuit is half-open."""
        if self.state is CircuitState.HALF_OPEN:
            self._trial_until = now + self._trial_s

    def succeeded(self) -> None:
        """Record a request that was answered."""
        self.failures = 0
        if self._move(_Event.SUCCEEDED):
            self._rest.reset()

    def failed(self, now: float) -> None:
        """Record a request that failed: no answer, or a fault of the peer."""
        self.failures += 1
        tripped = self.failures >= self._trips and self._move(_Event.TRIPPED)
        if tripped or self._move(_Event.FAILED):
            self._rests_until = now + self._rest.next_delay_s()

    def reset(self) -> None:
        """Close the circuit, because the peer is known to work."""
        self.state, self.failures, self._trial_until = CircuitState.CLOSED, 0, None
        self._rest.reset()

    def rest_s(self, now: float) -> float:
        """Return the seconds until a trial is allowed; 0 if the circuit is not open."""
        return max(self._rests_until - now, 0.0) if self.state is CircuitState.OPEN else 0.0

    def _move(self, event: _Event) -> bool:
        """Apply an event and return True if it changed the state."""
        following = _NEXT.get((self.state, event))
        if following is None:
            return False
        self.state, self._trial_until = following, None
        return True
