"""Deadlines on one wheel, with a clock that the test turns."""

from edge.server.deadlines import Deadline, Deadlines


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
    again = deadline("again", 1)
    while clock.now < 106:
        clock.now += 0.5
        wheel.turn()
        if over[-1:] == [f"again {clock.now}"] and not again.is_set:
            again.set(2)
    at = ["sooner 102.25", "again 102.25", "soon 103.25", "again 105.25", "put off 105.25"]
    assert over == at
