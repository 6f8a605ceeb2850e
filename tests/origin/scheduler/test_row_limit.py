"""The step's limit of rows finds the latency target where rows cost time, and only there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.origin.scheduler.limits import RowLimit

LEAST, MOST, SECONDS, PATIENCE = 8, 128, 0.05, 32


def saturate(limit: RowLimit, seconds_of: Callable[[int], float], steps: int) -> list[float]:
    """Run steps of as many rows as allowed, and return how long each lasted, in seconds."""
    lasted = []
    for _ in range(steps):
        lasted.append(seconds_of(limit.rows))
        limit.observe(limit.rows, lasted[-1], chunks=False, wanted=True)
    return lasted


def raised(rows: int) -> RowLimit:
    """Return a limit that quick steps have raised so far."""
    limit = RowLimit(LEAST, MOST, SECONDS, PATIENCE)
    while limit.rows < rows:
        limit.observe(limit.rows, 0.001, chunks=False, wanted=True)
    return limit


def alone(limit: RowLimit, seconds: float, *, chunks: bool) -> None:
    for _ in range(30):
        limit.observe(1, seconds, chunks=chunks, wanted=False)


@pytest.mark.parametrize("row_s", [0.0005, 0.001, 0.003])
def test_where_rows_cost_time_there_are_as_many_as_are_in_time(row_s: float) -> None:
    limit = RowLimit(LEAST, MOST, SECONDS, PATIENCE)
    lasted = saturate(limit, lambda rows: 0.004 + row_s * rows, 2000)[200:]
    assert sum(seconds > SECONDS for seconds in lasted) < len(lasted) / 50
    assert sum(lasted) / len(lasted) > 0.8 * SECONDS


def test_where_a_step_alone_is_late_already_there_are_as_many_rows_as_ever() -> None:
    limit = RowLimit(LEAST, MOST, SECONDS, PATIENCE)
    alone(limit, 0.08, chunks=False)
    saturate(limit, lambda rows: 0.08 + 0.0001 * rows, 100)
    assert limit.rows == MOST


def test_where_only_steps_with_chunks_are_late_alone_they_say_nothing_of_rows() -> None:
    limit = raised(MOST)
    alone(limit, 0.005, chunks=False)
    alone(limit, 0.09, chunks=True)
    limit.observe(40, 0.1, chunks=True, wanted=True)
    assert limit.rows == MOST
    limit.observe(40, 0.1, chunks=False, wanted=True)
    assert limit.rows == 35


def test_a_lowered_limit_comes_about_before_it_is_lowered_again() -> None:
    limit = raised(MOST)
    for _ in range(10):
        limit.observe(64, 0.08, chunks=False, wanted=True)
    assert limit.rows == 56
    limit.observe(56, 0.08, chunks=False, wanted=True)
    assert limit.rows == 49


def test_it_rises_only_where_more_rows_are_wanted_and_all_there_may_be_are_there() -> None:
    limit = raised(MOST)
    limit.observe(32, 0.08, chunks=False, wanted=True)
    for rows, wanted in ((28, False), (27, True)):
        for _ in range(PATIENCE):
            limit.observe(rows, 0.04, chunks=False, wanted=wanted)
        assert limit.rows == 28
    for _ in range(PATIENCE):
        limit.observe(28, 0.04, chunks=False, wanted=True)
    assert limit.rows == 29


def test_it_rises_quickly_where_steps_last_less_than_half_of_the_target() -> None:
    limit = raised(MOST)
    saturate(limit, lambda rows: 0.006 * rows, 100)
    assert limit.rows == LEAST
    saturate(limit, lambda rows: 0.001, 40)
    assert limit.rows == MOST


@given(
    st.lists(st.tuples(st.integers(0, 500), st.floats(0, 10), st.booleans(), st.booleans())),
)
def test_whatever_it_sees_it_stays_within_its_bounds(
    steps: list[tuple[int, float, bool, bool]],
) -> None:
    limit = RowLimit(LEAST, MOST, SECONDS, PATIENCE)
    seen = [limit.rows]
    for rows, seconds, chunks, wanted in steps:
        limit.observe(rows, seconds, chunks=chunks, wanted=wanted)
        seen.append(limit.rows)
    assert all(LEAST <= rows <= MOST for rows in seen)
    assert all(after <= before + before // 8 + 1 for before, after in pairwise(seen))
