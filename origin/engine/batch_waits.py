"""Measures how long each run waits for the batch. Pure arithmetic: callers give the time.

A run waits from its arrival until a step works on it, and again while steps leave it out: it was
preempted, other runs have their turn, or another run computes the next chunk of a common prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

LEAST_WAIT_S = 0.001
"""Minimum wait in seconds that is reported."""


class BatchWaits:
    """The waits of the runs of one engine, in seconds by run."""

    def __init__(self) -> None:
        """Begin without runs."""
        self._waited_s: dict[int, float] = {}  # before the current wait of each run
        self._since_s: dict[int, float] = {}  # when the current wait of a run began
        self._batch: set[int] = set()  # the runs of the last step
        self._ended: dict[int, float] = {}

    def added(self, run: int, now: float) -> None:
        """Note the arrival of a run."""
        self._waited_s[run] = 0.0
        self._since_s[run] = now

    def step(self, runs: Iterable[int], now: float) -> None:
        """Note that a step begins that works on `runs`."""
        batch = set(runs)
        if batch == self._batch:
            return
        for run in batch - self._batch:
            self._waited_s[run] += now - self._since_s.pop(run)
        for run in self._batch - batch:
            self._since_s[run] = now
        self._batch = batch

    def removed(self, run: int) -> None:
        """Note the end of a run.

        If a step has left it out, that was no wait: its last token was still being drawn.
        """
        self._batch.discard(run)
        self._since_s.pop(run, None)
        waited_s = self._waited_s.pop(run)
        if waited_s >= LEAST_WAIT_S:
            self._ended[run] = waited_s

    def so_far(self, now: float) -> dict[int, float]:
        """Return the waits of the current runs that have waited."""
        waits = {
            run: waited_s + now - self._since_s.get(run, now)
            for run, waited_s in self._waited_s.items()
        }
        return {run: waited_s for run, waited_s in waits.items() if waited_s >= LEAST_WAIT_S}

    def take_ended(self) -> dict[int, float]:
        """Return the waits of the runs that have ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended
