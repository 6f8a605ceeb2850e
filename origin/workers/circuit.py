"""Whether workers of a model are started again, after several that died and had made nothing.

closed: a worker that died is replaced, at once if it was ready. After MOST_DEATHS in a row that
had made nothing the circuit is **open**: none is started for a while. Then it is **half open**: one
is started, on trial. If that one makes something, or lives for a while, the circuit is closed; if
it dies, it is open again, for longer.

Plain rules; the clock is the caller's.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random

from ledger.backoff import Backoff

MOST_DEATHS = 6
"""One more than what ends a stream that kills workers: the model outlives such a stream."""
SETTLED_S = 10.0
"""A worker that was ready for so long has shown that workers live, though nobody asked it."""
RESTART_MIN_S = 0.05
RESTART_MAX_S = 5.0
"""Wait before the successor of a worker that did not become ready; doubles while none does."""
OPEN_MIN_S = 1.0
OPEN_MAX_S = 60.0
"""How long the circuit is open; doubles with each trial that dies."""
TRIAL_LOOK_S = 0.5
"""While one worker is tried, the others' slots look so often whether they may start."""


class CircuitState(StrEnum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Circuit:
    """One model's; its slots share it. Every `now` is seconds of one clock."""

    def __init__(self, random: Random | None = None) -> None:
        random = random or Random()
        self.deaths = 0
        """In a row, of workers that had made nothing."""
        self.state = CircuitState.CLOSED
        self._restart = Backoff(RESTART_MIN_S, RESTART_MAX_S, random)
        self._open = Backoff(OPEN_MIN_S, OPEN_MAX_S, random)
        self._until = 0.0
        self._trial: int | None = None  # the slot whose worker is on trial

    def wait_s(self, slot: int, now: float) -> float:
        """How long this slot waits before it asks again; 0 where it starts a worker now."""
        if now < self._until:
            return self._until - now
        if self.state is CircuitState.CLOSED:
            return 0.0
        if self._trial not in (None, slot):
            return TRIAL_LOOK_S
        self.state, self._trial = CircuitState.HALF_OPEN, slot
        return 0.0

    def made(self) -> None:
        """A worker has made something of a stream, or has lived for SETTLED_S."""
        if self.deaths:
            self.deaths = 0
            self.state, self._trial = CircuitState.CLOSED, None
            self._restart.reset()
            self._open.reset()

    def died(self, slot: int, now: float, *, was_ready: bool) -> None:
        """A worker is gone."""
        self.deaths += 1
        if was_ready:
            self._restart.reset()
        if self.deaths >= MOST_DEATHS or self._trial == slot:
            self.state, self._trial = CircuitState.OPEN, None
            self._until = now + self._open.next_delay_s()
        else:
            self._until = now if was_ready else now + self._restart.next_delay_s()

    def retry_s(self, now: float) -> float:
        """Until the next trial, as clients are told."""
        return max(self._until - now, 0.0)

    @property
    def reason(self) -> str:
        """Why no worker can be expected now; empty while the circuit is closed."""
        if self.state is CircuitState.CLOSED:
            return ""
        tried = "one is on trial" if self.state is CircuitState.HALF_OPEN else "it is tried again"
        return f"{self.deaths} workers in a row died and had made nothing; {tried}"
