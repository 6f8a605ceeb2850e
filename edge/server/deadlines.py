"""Deadlines on one wheel: thousands of connections wait, and almost none of them for nothing.

Sans-I/O: whoever owns the clock calls `turn` once a second or so. To put a deadline off costs an
assignment, not a timer taken out of a heap and a new one put in: it stays in the slot that it has,
and is moved on when that slot comes up. One that is cleared is out of the wheel at once, which else
would hold a connection that has ended, and all that was its own, for as long.
"""

from __future__ import annotations

from collections.abc import Callable

SLOT_S = 1.0
"""How late a deadline may be noticed, with the time between two calls of `turn`."""


def nothing() -> None:
    """What happens when a deadline is over whose owner has ended."""


class Deadlines:
    """All deadlines of a server; `clock_s` gives the time."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.clock_s = clock_s
        self._slots: dict[int, dict[Deadline, None]] = {}
        self.turned_s = clock_s()
        self._turned = int(self.turned_s // SLOT_S)

    def turn(self) -> None:
        """Call those that are over."""
        now = self.clock_s()
        current = int(now // SLOT_S)
        for slot in range(self._turned + 1, current + 1):
            for deadline in self._slots.pop(slot, ()):
                deadline.came_up(slot, now)
        self._turned, self.turned_s = max(self._turned, current), now

    def put(self, deadline: Deadline, at_s: float) -> int:
        """Into the first slot that comes up after `at_s`."""
        slot = max(int(at_s // SLOT_S), self._turned) + 1
        self._slots.setdefault(slot, {})[deadline] = None
        return slot

    def take_out(self, deadline: Deadline, slot: int) -> None:
        self._slots.get(slot, {}).pop(deadline, None)


class Deadline:
    """Calls `over` when it is; can be set, put off and cleared as often as one likes.

    `end` is for its owner's own end: `over` knows the owner, which has the deadline, and a circle
    is garbage that would wait to be found.
    """

    __slots__ = ("_at_s", "_slot", "_wheel", "over")

    def __init__(self, wheel: Deadlines, over: Callable[[], None]) -> None:
        self._wheel = wheel
        self.over = over
        self._at_s: float | None = None
        self._slot: int | None = None

    def set(self, after_s: float) -> None:
        """It is over `after_s` seconds from now, and not before."""
        self._at_s = at_s = self._wheel.clock_s() + after_s
        if self._slot is None or at_s < (self._slot - 1) * SLOT_S:
            self._leave()
            self._slot = self._wheel.put(self, at_s)

    def clear(self) -> None:
        self._at_s = None
        self._leave()

    def end(self) -> None:
        """It is never set again."""
        self.clear()
        self.over = nothing

    def _leave(self) -> None:
        if self._slot is not None:
            self._wheel.take_out(self, self._slot)
            self._slot = None

    @property
    def is_set(self) -> bool:
        return self._at_s is not None

    def came_up(self, slot: int, now: float) -> None:
        """For the wheel: one of its slots has come up."""
        if slot != self._slot:
            return  # it has been moved to an earlier one since
        self._slot = None
        if self._at_s is None:
            return
        if self._at_s > now:
            self._slot = self._wheel.put(self, self._at_s)
        else:
            self._at_s = None
            self.over()
