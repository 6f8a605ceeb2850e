"""A clock that is set ahead ends nothing; time that has passed does."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Append, NewStream
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.steady_clock import (
    MARK_NAME,
    MAX_LEAP_MS,
    ClockMark,
    KeptClock,
    SteadyClock,
    now_ms,
)
from tests.ledger.backends import end

DAY_MS = 86_400_000
STREAMS = 50


class Machine:
    """Its clock, and how long it has been up."""

    def __init__(self) -> None:
        self.system = 20_000 * DAY_MS
        self.uptime = 5_000

    def system_ms(self) -> int:
        return self.system

    def uptime_ms(self) -> int:
        return self.uptime

    def pass_ms(self, ms: int) -> None:
        self.system += ms
        self.uptime += ms

    def clock(self, before: ClockMark | None = None) -> SteadyClock:
        return SteadyClock(self.system_ms, self.uptime_ms, before)

    def mark(self, clock: SteadyClock) -> ClockMark:
        return ClockMark("boot", self.uptime, clock())


spans = st.integers(0, 3 * DAY_MS)
steps = st.one_of(st.just(0), st.integers(-2 * DAY_MS, 2 * DAY_MS))


@given(st.lists(st.tuples(spans, steps), max_size=30))
def test_it_runs_at_twice_the_pace_of_time_at_most_and_is_never_ahead(
    life: list[tuple[int, int]],
) -> None:
    machine = Machine()
    clock = machine.clock()
    seen = [(machine.uptime, clock())]
    for passed, step in life:
        machine.pass_ms(passed)
        machine.system += step
        seen.append((machine.uptime, clock()))
        assert seen[-1][1] <= machine.system
        for uptime, told in seen:
            assert seen[-1][1] - told <= 2 * (machine.uptime - uptime) + MAX_LEAP_MS


@given(st.lists(spans, max_size=30), st.integers(0, MAX_LEAP_MS))
def test_without_a_step_or_with_a_small_one_it_is_the_systems_clock(
    life: list[int], step: int
) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.system += step
    assert clock() == machine.system
    for passed in life:
        machine.pass_ms(passed)
        assert clock() == machine.system
        assert clock.behind_ms == 0


def test_time_that_passes_while_it_is_read_is_no_step() -> None:
    machine = Machine()

    def system_ms() -> int:
        machine.pass_ms(1)
        return machine.system

    clock = SteadyClock(system_ms, machine.uptime_ms)
    assert [clock.behind_ms for _ in range(3)] == [0, 0, 0]


def test_a_step_ahead_is_followed_slowly_and_one_back_at_once() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.system += DAY_MS
    assert clock.behind_ms == DAY_MS - MAX_LEAP_MS
    machine.pass_ms(DAY_MS // 2)
    clock()
    machine.pass_ms(DAY_MS // 2)
    assert 0 < clock.behind_ms < DAY_MS  # a sweep that comes late makes no greater leap
    machine.system -= DAY_MS
    assert clock() == machine.system


@pytest.mark.anyio
async def test_a_clock_that_is_set_a_day_ahead_removes_nothing(tmp_path: Path) -> None:
    machine, path = Machine(), tmp_path / "ledger.db"
    clock = machine.clock()
    ledger = await SqliteLedger.open(path, clock)
    for number in range(STREAMS):
        stream = number.to_bytes(16, "big")
        await ledger.create(NewStream(stream, "{}", Durability.PROCESS, DAY_MS / 1000))
        await ledger.append([Append(stream, 1, 0, end(0))])
    machine.system += DAY_MS
    for _ in range(10):
        assert await ledger.expire() == 0
        machine.pass_ms(60_000)
    mark = machine.mark(clock)
    await ledger.close()
    machine.pass_ms(60_000)  # the process restarts, and the clock is still wrong
    ledger = await SqliteLedger.open(path, machine.clock(mark))
    assert await ledger.expire() == 0
    await ledger.close()
    machine.pass_ms(DAY_MS)  # a long pause is no step
    ledger = await SqliteLedger.open(path, machine.clock(mark))
    removed = 0
    for _ in range(5):  # ends may be noted some at a time
        removed += await ledger.expire()
        machine.pass_ms(DAY_MS)
    assert removed == STREAMS
    await ledger.close()


def test_the_next_process_goes_on_from_the_mark_of_the_one_before(tmp_path: Path) -> None:
    clock = KeptClock(tmp_path)
    assert abs(clock() - now_ms()) < MAX_LEAP_MS
    clock._now -= 3 * DAY_MS  # as if the system's clock had been set ahead a moment ago
    clock.keep()
    again = KeptClock(tmp_path)
    assert again.behind_ms > 2 * DAY_MS
    mark = tmp_path / MARK_NAME
    mark.write_text(mark.read_text().replace('"boot": "', '"boot": "another'))
    assert KeptClock(tmp_path).behind_ms == 0


@pytest.mark.parametrize("text", ["", "[]", '{"boot": 1}', '{"boot": "a", "uptime_ms": "b"}'])
def test_a_mark_that_is_not_whole_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MARK_NAME).write_text(text)
    assert KeptClock(tmp_path).behind_ms == 0
