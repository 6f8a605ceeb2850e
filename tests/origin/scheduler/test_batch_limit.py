"""The step's limit of tokens finds the latency target on machines that it knows nothing of."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.limits import DECREASE, INCREASE_TOKENS, BatchLimit, Limits
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.scheduler.scheduler import Scheduler

LEAST, MOST, SECONDS = 128, 4096, 0.05


def limit() -> BatchLimit:
    return BatchLimit(LEAST, MOST, SECONDS)


def saturate(batch: BatchLimit, step_s: float, token_s: float, steps: int) -> list[float]:
    """Run full steps and return how long each lasted, in seconds."""
    lasted = []
    for _ in range(steps):
        lasted.append(step_s + token_s * batch.tokens)
        batch.observe(batch.tokens, lasted[-1], full=True)
    return lasted


@pytest.mark.parametrize("token_s", [0.00002, 0.00005, 0.0001, 0.0003])
@pytest.mark.parametrize("step_s", [0.0, 0.005, 0.01])
def test_steps_last_about_as_long_as_they_should(step_s: float, token_s: float) -> None:
    lasted = saturate(limit(), step_s, token_s, 300)[200:]
    assert max(lasted) <= SECONDS + (INCREASE_TOKENS + 1) * token_s
    assert mean(lasted) > 0.85 * SECONDS


def test_a_fast_machine_reaches_the_most_in_a_few_steps() -> None:
    batch = limit()
    saturate(batch, 0.001, 0.000001, 6)
    assert batch.tokens == MOST


def test_a_slow_machine_stays_at_the_least_and_goes_on() -> None:
    batch = limit()
    saturate(batch, 1.0, 0.1, 50)
    assert batch.tokens == LEAST


def test_a_step_that_was_not_full_says_nothing_about_larger_ones() -> None:
    batch = limit()
    batch.observe(10, 0.001, full=False)
    assert batch.tokens == LEAST


def test_a_late_step_counts_for_what_it_took_but_at_most_by_half() -> None:
    batch = limit()
    saturate(batch, 0, 0, 10)
    batch.observe(3000, 1.0, full=False)
    assert batch.tokens == int(3000 * DECREASE)
    batch.observe(5, 1.0, full=False)
    assert batch.tokens == int(3000 * DECREASE) // 2


def test_it_follows_a_machine_that_becomes_slower_and_faster_again() -> None:
    batch = limit()
    fast = mean(saturate(batch, 0.002, 0.00004, 200)[100:])
    before = batch.tokens
    slow = mean(saturate(batch, 0.002, 0.0002, 200)[100:])
    assert batch.tokens < before / 3
    assert fast == pytest.approx(slow, rel=0.1)
    saturate(batch, 0.002, 0.00004, 300)
    assert batch.tokens > before * 0.8


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 10), st.booleans())))
def test_whatever_it_sees_it_stays_within_its_bounds_and_falls_by_half_at_most(
    steps: list[tuple[int, float, bool]],
) -> None:
    batch = limit()
    seen = [batch.tokens]
    for tokens, seconds, full in steps:
        batch.observe(min(tokens, batch.tokens), seconds, full=full)
        seen.append(batch.tokens)
    assert all(LEAST <= tokens <= MOST for tokens in seen)
    assert all(after >= before // 2 for before, after in pairwise(seen))


def test_steps_are_as_small_as_they_may_be_while_that_is_wanted() -> None:
    target, least = Scheduler(PagePool(400)), Limits().step_tokens_least
    for run in range(1, 7):
        target.add(run, Priority.STANDARD, [run * 1000 + n for n in range(1000)], [], 200)
    while (plan := target.plan()).tokens <= 4 * least:
        target.done(plan, 0.001)  # quick steps that are full raise the limit
    target.set_small_steps(enabled=True)
    assert 0 < target.plan().tokens <= least
    target.set_small_steps(enabled=False)
    assert target.plan().tokens > 4 * least
