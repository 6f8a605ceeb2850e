"""Deadlines on one wheel, with a clock that the test turns."""

import gc
import weakref

from tailrace.edge.server.deadlines import Deadline, Deadlines


class Clock:
    now = 100.25

    def __call__(self) -> float:
        return self.now


def test_deadlines_are_called_in_time_put_off_brought_forward_and_cleared() -> None:
    clock = Clock()
    wheel = Deadlines(clock)
    over: list[str] = []

    def deadline(name: str, after_s: float) -> Deadline:
        made = Deadline(wheel, lambda: over.append(f"{name} {clock.now}"))
        made.set(after_s)
        return made

    deadline("soon", 2)
    deadline("put off", 2).set(4)
    deadline("sooner", 600).set(1)
    deadline("cleared", 1).clear()
    clearing = Deadline(wheel, lambda: None)
    clearing.set(3)
    clearing.over = deadline("cleared when it was due", 3).clear
    again = deadline("again", 1)
    while clock.now < 106:
        clock.now += 0.5
        wheel.turn()
        if over[-1:] == [f"again {clock.now}"] and not again.is_set:
            again.set(2)
    at = ["sooner 102.25", "again 102.25", "soon 103.25", "again 105.25", "put off 105.25"]
    assert over == at


def test_a_cleared_deadline_keeps_nobody() -> None:
    """Connections that have ended would wait in the wheel, each for as long as it might have."""

    class Owner:
        def over(self) -> None:
            raise AssertionError

    wheel, owner = Deadlines(Clock()), Owner()
    deadline = Deadline(wheel, owner.over)
    deadline.set(600)
    deadline.set(1)
    deadline.clear()
    left = weakref.ref(owner)
    del owner, deadline
    gc.collect()
    assert left() is None
