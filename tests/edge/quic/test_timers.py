"""Deadlines of many owners, against a list that is searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge.quic.server import Timer, Timers

OWNERS = 3
NEVER = None
times = st.one_of(st.just(NEVER), st.integers(0, 50))
steps = st.lists(st.tuples(st.integers(0, OWNERS - 1), times, st.integers(0, 3)), max_size=60)


@given(steps)
def test_each_is_told_once_and_when_its_last_deadline_has_come(
    steps: list[tuple[int, int | None, int]],
) -> None:
    timers: Timers[int] = Timers()
    made = [Timer(owner) for owner in range(OWNERS)]
    expected: dict[int, int] = {}
    now = 0
    for owner, at, passes in steps:
        expected.pop(owner, None)
        if at is not None:
            expected[owner] = now + at
        timers.set(made[owner], None if at is None else float(now + at))
        if expected:
            assert timers.next is not None and timers.next <= min(expected.values())
        now += passes
        due = sorted(owner for owner, at in expected.items() if at <= now)
        assert sorted(timers.due(now)) == due
        expected = {each: at for each, at in expected.items() if each not in due}


def test_a_deadline_that_is_put_off_again_and_again_takes_one_place() -> None:
    timers: Timers[str] = Timers()
    timer = Timer("one")
    for n in range(1000):
        timers.set(timer, 60.0 + n)
        timers.set(timer, n + 0.5)
        assert timers.due(n + 0.6) == ["one"]
    assert len(timers._heap) <= 2
