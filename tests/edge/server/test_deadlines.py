"""Deadlines on a clock that the test advances."""

import gc
import weakref

from tailrace.edge.server.deadlines import Deadline, Deadlines
from tests.edge.server.manual_clock import ManualClock


def test_deadlines_are_called_in_time_put_off_brought_forward_and_cleared() -> None:
    clock = ManualClock(100.25)
    deadlines = Deadlines(clock)
    over: list[str] = []

    def deadline(name: str, after_s: float) -> Deadline:
        made = Deadline(deadlines, lambda: over.append(f"{name} {clock.now}"))
        made.set(after_s)
        return made

    deadline("soon", 2)
    deadline("put off", 2).set(4)
    deadline("sooner", 600).set(1)
    deadline("cleared", 1).clear()
    clearing = Deadline(deadlines, lambda: None)
    clearing.set(3)
    clearing.on_expired = deadline("cleared when it was due", 3).clear
    again = deadline("again", 1)
    while clock.now < 106:
        clock.now += 0.5
        clock.fire()
        if over[-1:] == [f"again {clock.now}"] and not again.is_set:
            again.set(2)
    at = ["sooner 101.25", "again 101.25", "soon 102.25", "again 103.25", "put off 104.25"]
    at.append("again 105.25")
    assert over == at


def test_what_a_deadline_has_caused_is_flushed_behind_it() -> None:
    clock = ManualClock()
    happened: list[str] = []
    deadlines = Deadlines(clock, lambda: happened.append("flushed"))
    deadline = Deadline(deadlines, lambda: happened.append("over"))
    deadline.set(1)
    clock.now = 1
    clock.fire()
    assert happened == ["over", "flushed"]


def test_a_timer_that_fires_a_little_early_is_in_time_and_one_that_fires_far_too_early_is_not() -> (
    None
):
    clock = ManualClock()
    over: list[float] = []
    deadline = Deadline(Deadlines(clock), lambda: over.append(clock.now))
    deadline.set(1)
    deadline.set(5)  # the timer stays
    clock.now = 1
    clock.fire()
    assert over == [] and deadline.is_set
    clock.now = 5
    clock.fire()
    assert over == [5]


def test_a_cleared_deadline_keeps_nobody() -> None:
    """Connections that have ended would wait for the timer, each for as long as it might have."""

    class Owner:
        def over(self) -> None:
            raise AssertionError

    deadlines, owner = Deadlines(ManualClock()), Owner()
    deadline = Deadline(deadlines, owner.over)
    deadline.set(600)
    deadline.set(1)
    deadline.end()
    left = weakref.ref(owner)
    del owner, deadline
    gc.collect()
    assert left() is None
