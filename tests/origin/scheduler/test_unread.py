"""Rows of runs that nobody reads."""

from __future__ import annotations

import pytest

from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.scheduler.plan import Plan
from tailrace.origin.scheduler.scheduler import Scheduler


def decoding(target: Scheduler, unread: int, read: int) -> None:
    """Add runs and bring them past their prompts; the unread ones come first."""
    for run in range(unread + read):
        target.add(run, Priority.STANDARD, [run], [], 10_000)
        target.set_unread(run, unread=run < unread)
    while target.load().running[Priority.STANDARD] < unread + read:
        step(target)


def step(target: Scheduler, row_s: float = 0.0) -> Plan:
    plan = target.plan()
    for work in plan.work:
        if work.draws:
            target.extend(work.run, [7])
    target.done(plan, 0.001 + row_s * plan.rows)
    return plan


def test_when_rows_do_not_fit_what_nobody_reads_waits() -> None:
    limits = Limits(running=200, step_tokens_least=65, step_tokens_most=65)
    target = Scheduler(PagePool(500), limits)
    decoding(target, unread=6, read=64)
    for _ in range(100):  # until all have caught up
        step(target)
    for _ in range(5):
        assert {work.run for work in step(target).work} >= set(range(6, 70))


@pytest.mark.parametrize("unread", [20, 24])
def test_when_rows_are_late_only_those_that_nobody_reads_take_turns(unread: int) -> None:
    target = Scheduler(PagePool(500), Limits(running=24))
    decoding(target, unread, read=24 - unread)
    plans = [step(target, row_s=0.004) for _ in range(60)][20:]
    rows = [{work.run for work in plan.work} for plan in plans]
    assert all(set(range(unread, 24)) <= each for each in rows)
    if unread < 24:
        assert all(4 < len(each) < 24 for each in rows)
        assert len(set.union(*rows)) == 24, "none of them stands still for ever"
    else:
        assert all(len(each) == 24 for each in rows), "alone they take no turns"
