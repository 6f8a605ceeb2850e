"""A circuit breaker: when a peer that fails is left alone, and when it is tried again.

Sans-I/O; every `now` is seconds of one clock. After Nygard, "Release It!" (2007).
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from math import inf

from tailrace.ledger.flow.backoff import Backoff


class CircuitState(StrEnum):
    """The state of a circuit breaker; its value is a label of metrics."""

    CLOSED = "closed"
    """The peer works: everything is let through."""
    HALF_OPEN = "half-open"
    """The peer has rested: one trial is let through."""
    OPEN = "open"
    """The peer rests: nothing is let through."""


class _Event(Enum):
    TRIPPED = auto()  # as many failures in a row as are allowed
    RESTED = auto()
    SUCCEEDED = auto()
    FAILED = auto()


_NEXT = {
    (CircuitState.CLOSED, _Event.TRIPPED): CircuitState.OPEN,
    (CircuitState.OPEN, _Event.RESTED): CircuitState.HALF_OPEN,
    (CircuitState.HALF_OPEN, _Event.SUCCEEDED): CircuitState.CLOSED,
    (CircuitState.HALF_OPEN, _Event.FAILED): CircuitState.OPEN,
}
"""The next state; any other event leaves the state as it is.

So neither an answer nor a failure of what was asked before the circuit opened changes anything.
"""


class CircuitBreaker:
    """The breaker of one peer: open after `trips` failures in a row, for as long as `rest` says.

    A trial that has had no outcome for `trial_s` is given up, and another one is let through.
    """

    def __init__(self, trips: int, rest: Backoff, trial_s: float = inf) -> None:
        self.state = CircuitState.CLOSED
        self.failures = 0
        """Failures in a row."""
        self._trips = trips
        self._rest = rest
        self._trial_s = trial_s
        self._rests_until = 0.0
        self._trial_until: float | None = None  # None: no trial is under way

    def allows(self, now: float) -> bool:
        """Return True if a request may be sent now; tell `sent` if it is."""
        if self.state is CircuitState.OPEN and now >= self._rests_until:
            self._move(_Event.RESTED)
        if self.state is CircuitState.HALF_OPEN:
            return self._trial_until is None or now >= self._trial_until
        return self.state is CircuitState.CLOSED

    def sent(self, now: float) -> None:
        """Note that a request was sent: it is the trial if the circuit is half open."""
        if self.state is CircuitState.HALF_OPEN:
            self._trial_until = now + self._trial_s

    def succeeded(self) -> None:
        """Note an answer to a request."""
        self.failures = 0
        if self._move(_Event.SUCCEEDED):
            self._rest.reset()

    def failed(self, now: float) -> None:
        """Note a request without an answer, or with one that is the peer's own fault."""
        self.failures += 1
        tripped = self.failures >= self._trips and self._move(_Event.TRIPPED)
        if tripped or self._move(_Event.FAILED):
            self._rests_until = now + self._rest.next_delay_s()

    def reset(self) -> None:
        """Close the circuit, because the peer is known to work."""
        self.state, self.failures, self._trial_until = CircuitState.CLOSED, 0, None
        self._rest.reset()

    def rest_s(self, now: float) -> float:
        """Return how much longer nothing is let through."""
        return max(self._rests_until - now, 0.0) if self.state is CircuitState.OPEN else 0.0

    def _move(self, event: _Event) -> bool:
        """Return True if the event changes the state."""
        following = _NEXT.get((self.state, event))
        if following is None:
            return False
        self.state, self._trial_until = following, None
        return True
