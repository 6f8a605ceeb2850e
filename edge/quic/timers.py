"""When each connection has to be looked at: one timer for all of them.

QUIC puts its deadlines off with every packet. What was asked for last counts; what stands in the
heap may be earlier, and is looked at again when it comes up, so a deadline that moves back, as
almost all do, costs one comparison. Sans-I/O.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


class Timer(Generic[T]):
    """The deadline of one `owner`; None is never."""

    __slots__ = ("at", "owner", "standing")

    def __init__(self, owner: T) -> None:
        self.owner = owner
        self.at = inf
        self.standing: list[float] = []  # in the heap; the last is the earliest


class Timers(Generic[T]):
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer[T]]] = []
        self._order = count()  # timers are not compared

    def set(self, timer: Timer[T], at: float | None) -> None:
        timer.at = inf if at is None else at
        if timer.at < (timer.standing[-1] if timer.standing else inf):
            timer.standing.append(timer.at)
            heappush(self._heap, (timer.at, next(self._order), timer))

    def due(self, now: float) -> list[T]:
        """Those whose deadline has come; each is told once, and has none after that."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, _, timer = heappop(self._heap)
            timer.standing.pop()
            if timer.at <= now:
                timer.at = inf
                found.append(timer.owner)
            else:
                self.set(timer, timer.at)
        return found

    @property
    def next(self) -> float | None:
        """When to call `due` again."""
        return self._heap[0][0] if self._heap else None
