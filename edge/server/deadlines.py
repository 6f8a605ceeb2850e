"""Deadlines that are set, put off and cleared often, and that rarely pass.

Sans-I/O: the scheduler is the event loop of the server, or a clock that a test advances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

EARLY_S = 0.002
"""Time in seconds by which a timer may fire early: the event loop rounds to milliseconds."""


def nothing() -> None:
    """Do nothing: the callback of a deadline whose owner has ended."""


class Timer(Protocol):
    """A scheduled call that can be cancelled, such as `asyncio.TimerHandle`."""

    def cancel(self) -> None: ...


class Scheduler(Protocol):
    """A clock with timers, such as an event loop."""

    def time(self) -> float:
        """Return the time in seconds."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:
        """Call back after `delay` seconds."""


class Deadlines:
    """The scheduler of a server's deadlines; `after` is called after each `on_expired` callback."""

    def __init__(self, scheduler: Scheduler, after: Callable[[], None] = nothing) -> None:
        self.clock_s = scheduler.time
        self.call_later = scheduler.call_later
        self.after = after


class Deadline:
    """A deadline that calls `on_expired` when it passes, and that can be set and cleared often.

    The owner must call `end` when it closes. Otherwise `on_expired`, a method of the owner, keeps
    the owner and this deadline in a reference cycle.
    """

    __slots__ = ("_at_s", "_deadlines", "_timer", "_timer_s", "on_expired")

    def __init__(self, deadlines: Deadlines, on_expired: Callable[[], None]) -> None:
        self._deadlines = deadlines
        self.on_expired = on_expired
        self._at_s: float | None = None
        self._timer: Timer | None = None
        # Time (`clock_s`) at which the timer fires; never later than the deadline.
        self._timer_s = 0.0

    def set(self, after_s: float) -> None:
        """Set the deadline to `after_s` seconds from now, whatever was set before."""
        self._at_s = at_s = self._deadlines.clock_s() + after_s
        if self._timer is None or at_s < self._timer_s:
            self._stop()
            self._start(at_s, after_s)
        # For a later deadline the running timer is kept: `_fired` starts the timer again if it
        # fires too early. So postponing a deadline, as each request does, costs only an assignment.

    def clear(self) -> None:
        """Forget the deadline; it may be set again."""
        self._at_s = None
        self._stop()

    def end(self) -> None:
        """Forget the deadline and its owner; it is never set again."""
        self.clear()
        self.on_expired = nothing

    @property
    def is_set(self) -> bool:
        """True until the deadline has passed or is cleared."""
        return self._at_s is not None

    def _start(self, at_s: float, after_s: float) -> None:
        self._timer_s = at_s
        self._timer = self._deadlines.call_later(after_s, self._fired)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fired(self) -> None:
        self._timer = None
        at_s = self._at_s
        if at_s is None:
            return
        left_s = at_s - self._deadlines.clock_s()
        if left_s > EARLY_S:
            self._start(at_s, left_s)
            return
        self._at_s = None
        self.on_expired()
        self._deadlines.after()
