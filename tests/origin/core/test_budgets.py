"""Budgets of API keys: what counts, when they are used up, and when they begin anew."""

from __future__ import annotations

import pytest

from tailrace.ledger.errors import TooManyRequests
from tailrace.ledger.frame import Caller
from tailrace.ledger.usage import DAY_MS, month_start_ms, next_month_ms
from tailrace.origin.core.budgets import IDLE_KEY_S, Budgets, has_budget

KEY = "0123456789ab"
NOON_MS = 20_000 * DAY_MS + DAY_MS // 2  # 2024-10-04 12:00 UTC
TODAY = NOON_MS // DAY_MS


def caller(day: int | None = None, month: int | None = None) -> Caller:
    return Caller("acme", 127, key=KEY, tokens_per_day=day, tokens_per_month=month)


def known(by_day: dict[int, int]) -> Budgets:
    budgets = Budgets()
    budgets.learn(KEY, 0, by_day, 0.0)
    return budgets


def refused(budgets: Budgets, of: Caller, running: int = 0, now_ms: int = NOON_MS) -> str | None:
    try:
        budgets.admit(of, running, 0.0, now_ms)
    except TooManyRequests as error:
        return error.code
    return None


def test_only_keys_with_a_budget_have_one() -> None:
    assert not has_budget(None)
    assert not has_budget(caller())
    assert has_budget(caller(day=1))
    assert has_budget(caller(month=1))


@pytest.mark.parametrize(
    ("used", "running", "code"),
    [(99, 0, None), (100, 0, "day_budget_spent"), (60, 40, "day_budget_spent"), (60, 39, None)],
)
def test_a_day_is_spent_by_what_has_ended_and_what_runs(
    used: int, running: int, code: str | None
) -> None:
    assert refused(known({TODAY: used}), caller(day=100), running) == code


def test_other_days_count_for_the_month_and_other_months_do_not() -> None:
    budgets = known({TODAY - 1: 50, TODAY - 3: 50, TODAY - 4: 1000})
    assert refused(budgets, caller(day=1)) is None
    assert refused(budgets, caller(month=101)) is None
    assert refused(budgets, caller(month=100)) == "month_budget_spent"
    spent = budgets.spent(KEY, 7, NOON_MS)
    assert (spent.day, spent.month) == (7, 107)


def test_a_refusal_says_when_the_next_period_begins() -> None:
    budgets = known({TODAY: 100})
    with pytest.raises(TooManyRequests) as day:
        budgets.admit(caller(day=100, month=1000), 0, 0.0, NOON_MS)
    assert day.value.retry_after_ms == DAY_MS // 2
    assert not day.value.retryable, "clients must not try again in a loop"
    with pytest.raises(TooManyRequests) as month:
        budgets.admit(caller(day=100, month=100), 0, 0.0, NOON_MS)
    assert month.value.retry_after_ms == next_month_ms(NOON_MS) - NOON_MS
    assert "100 tokens of its 100 for this month" in month.value.message
    tomorrow = NOON_MS + DAY_MS // 2
    assert refused(budgets, caller(day=100), now_ms=tomorrow - 1) == "day_budget_spent"
    assert refused(budgets, caller(day=100), now_ms=tomorrow) is None


def test_what_ends_while_the_ledger_is_read_is_never_missing() -> None:
    budgets = known({TODAY: 10})
    budgets.ended(KEY, 5)
    assert budgets.spent(KEY, 0, NOON_MS).day == 15
    budgets.begin(KEY)
    budgets.ended(KEY, 3)
    assert budgets.spent(KEY, 0, NOON_MS).day == 18
    budgets.learn(KEY, TODAY - 1, {TODAY: 15}, 0.0)
    assert budgets.spent(KEY, 0, NOON_MS).day == 18
    budgets.begin(KEY)
    budgets.learn(KEY, TODAY - 1, {TODAY: 18}, 0.0)
    assert budgets.spent(KEY, 0, NOON_MS).day == 18


def test_sums_of_earlier_days_stay_when_later_ones_are_read_again() -> None:
    budgets = known({TODAY - 2: 10, TODAY - 1: 20, TODAY: 30})
    budgets.begin(KEY)
    budgets.learn(KEY, TODAY - 1, {TODAY - 1: 21, TODAY: 31}, 0.0)
    assert budgets.spent(KEY, 0, NOON_MS).month == 62


def test_keys_that_are_no_longer_used_are_forgotten() -> None:
    budgets = known({TODAY: 10})
    budgets.admit(caller(day=100), 0, 5.0, NOON_MS)
    assert budgets.stale(5.0 + IDLE_KEY_S - 1) == [KEY]
    assert budgets.stale(5.0 + IDLE_KEY_S) == []
    assert not budgets.knows(KEY)


def test_streams_of_other_keys_count_for_no_budget() -> None:
    budgets = known({TODAY: 10})
    budgets.ended("", 1000)
    budgets.ended("ba9876543210", 1000)
    assert budgets.spent(KEY, 0, NOON_MS).day == 10


def test_months_begin_at_midnight_utc() -> None:
    start = month_start_ms(NOON_MS)
    assert start % DAY_MS == 0
    assert start // DAY_MS == TODAY - 3
    assert (next_month_ms(NOON_MS) - start) // DAY_MS == 31
    december = next_month_ms(next_month_ms(next_month_ms(NOON_MS) - 1))
    assert month_start_ms(next_month_ms(december)) == next_month_ms(december)
