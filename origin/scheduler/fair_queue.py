"""Weighted fair queueing over the priority classes: who is next, in tokens instead of seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

from ledger.wire.schema import Priority
from origin.scheduler.scheduled_run import ScheduledRun

# Tokens that a class gets beside each other's when all want more than there is.
WEIGHTS: Mapping[Priority, int] = {
    Priority.INTERACTIVE: 8,
    Priority.STANDARD: 4,
    Priority.BATCH: 1,
}


class FairQueue:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996), with classes for flows.

    Each class has a virtual time: the tokens it was served, divided by its weight. The class
    with the least goes first, so classes that all have more to do than they get are served in
    proportion to their weights. A class that gets all it asks for owes and saves nothing: its
    virtual time is at least that of the least served class that does not (`settle`).
    """

    def __init__(self, weights: Mapping[Priority, int] = WEIGHTS) -> None:
        self.weights = weights
        self._times = dict.fromkeys(weights, 0.0)
        self._now = 0.0

    def time(self, priority: Priority) -> float:
        """The class's virtual time, in tokens of a class of weight 1."""
        return self._times[priority]

    def charge(self, priority: Priority, tokens: int) -> None:
        """The class was served so many tokens."""
        self._times[priority] += tokens / self.weights[priority]

    def first(self, classes: Collection[Priority]) -> Priority:
        """Of these classes the one that is next; between equals, the more urgent."""
        times = self._times  # in order of urgency, and min takes the first of equals
        return min((priority for priority in times if priority in classes), key=times.__getitem__)

    def turns(self, runs: Iterable[ScheduledRun]) -> Iterator[ScheduledRun]:
        """Class by class as they are charged meanwhile; in a class as given."""
        queues: dict[Priority, deque[ScheduledRun]] = {}
        for run in runs:
            queues.setdefault(run.priority, deque()).append(run)
        while queues:
            first = self.first(queues)
            yield queues[first].popleft()
            if not queues[first]:
                del queues[first]

    def settle(self, backlogged: Collection[Priority]) -> None:
        """End of a step, in which the classes `backlogged` did not get all that they asked for.

        Virtual time goes on to the least of theirs, or, when nobody had to wait, to the
        greatest of all: what was spare is held against nobody.
        """
        times = self._times
        if backlogged:
            self._now = max(self._now, min(times[priority] for priority in backlogged))
        else:
            self._now = max(times.values())
        for priority, time in times.items():
            if priority not in backlogged:
                times[priority] = max(time, self._now)
