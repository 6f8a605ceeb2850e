"""Which runs a worker is at work on that have made nothing yet: what it may die of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from origin.workers.worker_frame import Begun


class AtWork:
    """A worker's side of `origin.generations.suspects`: it speaks before it works on a run."""

    def __init__(self, send: Callable[[Begun], None]) -> None:
        self._send = send
        self._taken: set[int] = set()  # and not begun
        self._begun: set[int] = set()
        self._told: set[int] = set()

    def take(self, run: int) -> None:
        """Its order is looked at now, which is work already; then it waits for its turn."""
        self._taken.add(run)
        self._tell(self._begun | {run})

    def begin(self, runs: Iterable[int]) -> None:
        """What comes next is done for these runs, some of which may have made something."""
        begun = self._taken.intersection(runs)
        self._taken -= begun
        self._begun |= begun
        self._tell(self._begun)

    def made(self, runs: Iterable[int]) -> None:
        """These have an emission, the end perhaps."""
        for run in runs:
            self._taken.discard(run)
            self._begun.discard(run)

    def repeat(self) -> None:
        """Say it again, as a sign of life."""
        self._told = set(self._begun)
        self._send(Begun(tuple(self._begun)))

    def _tell(self, runs: set[int]) -> None:
        if runs != self._told:
            self._told = set(runs)
            self._send(Begun(tuple(runs)))
