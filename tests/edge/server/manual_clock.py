"""A clock for deadlines that a test advances."""

from __future__ import annotations

from collections.abc import Callable


class Scheduled:
    """A call that is due at a time."""

    def __init__(self, at_s: float, callback: Callable[[], None]) -> None:
        self.at_s = at_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A `Scheduler` whose time passes only when the test sets `now` and calls `fire`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._scheduled: list[Scheduled] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Scheduled:
        scheduled = Scheduled(self.now + delay, callback)
        self._scheduled.append(scheduled)
        return scheduled

    def fire(self) -> None:
        """Make the calls that are due by now, the earliest first."""
        self._scheduled = [each for each in self._scheduled if each.callback is not None]
        due = sorted((s for s in self._scheduled if s.at_s <= self.now), key=lambda s: s.at_s)
        self._scheduled = [each for each in self._scheduled if each not in due]
        for each in due:
            if each.callback is not None:
                each.callback()
