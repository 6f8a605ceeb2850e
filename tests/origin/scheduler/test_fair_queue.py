"""Weighted fair queueing: shares, no credit for the idle, no debt from spare time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.plan import ScheduledRun
from tailrace.origin.scheduler.run_table import WEIGHTS, FairQueue

INTERACTIVE, STANDARD, BATCH = Priority


def serve(queue: FairQueue, classes: Iterable[Priority], sizes: Iterable[int]) -> Counter[Priority]:
    """Give each size to whoever is next of `classes`, which all have more to do."""
    backlogged = list(classes)
    served: Counter[Priority] = Counter()
    for size in sizes:
        first = queue.first(backlogged)
        queue.charge(first, size)
        queue.settle(backlogged)
        served[first] += size
    return served


def test_every_class_has_a_weight_and_the_more_urgent_the_more() -> None:
    assert list(WEIGHTS) == list(Priority)
    assert sorted(WEIGHTS.values(), reverse=True) == list(WEIGHTS.values())


def test_between_equals_the_more_urgent_is_first() -> None:
    queue = FairQueue()
    assert queue.first([BATCH, STANDARD, INTERACTIVE]) is INTERACTIVE
    assert queue.first([BATCH, STANDARD]) is STANDARD


@given(
    classes=st.sets(st.sampled_from(Priority), min_size=2),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=400),
)
def test_classes_that_want_more_than_they_get_share_by_weight(
    classes: set[Priority], sizes: list[int]
) -> None:
    """At every moment, to within one piece of work each (Goyal et al., theorem 1)."""
    queue = FairQueue()
    served: Counter[Priority] = Counter()
    for size in sizes:
        served += serve(queue, classes, [size])
        for one in classes:
            for other in classes:
                ahead = served[one] / WEIGHTS[one] - served[other] / WEIGHTS[other]
                assert ahead <= 64 / WEIGHTS[one] + 64 / WEIGHTS[other]


@given(idle=st.sampled_from(Priority), spell=st.integers(1, 300))
def test_a_class_saves_nothing_while_it_is_idle(idle: Priority, spell: int) -> None:
    queue = FairQueue()
    others = set(Priority) - {idle}
    serve(queue, others, [64] * spell)
    assert queue.time(idle) >= min(queue.time(other) for other in others)
    served = serve(queue, Priority, [64] * 130)
    expected = 130 * 64 * WEIGHTS[idle] / sum(WEIGHTS.values())
    assert served[idle] <= expected + 2 * 64


def test_what_was_spare_is_held_against_nobody() -> None:
    queue = FairQueue()
    queue.charge(BATCH, 100_000)
    queue.settle([])
    assert len({queue.time(priority) for priority in Priority}) == 1


def test_what_was_taken_while_others_waited_is_owed() -> None:
    queue = FairQueue()
    queue.charge(BATCH, 100)
    queue.settle([INTERACTIVE])
    assert queue.time(BATCH) == 100
    assert queue.time(INTERACTIVE) == queue.time(STANDARD) == 0
    assert serve(queue, Priority, [1] * 1200)[BATCH] == 0


def test_virtual_time_never_goes_back() -> None:
    queue = FairQueue()
    queue.charge(STANDARD, 400)
    queue.settle([STANDARD])
    queue.settle([INTERACTIVE])
    assert [queue.time(priority) for priority in Priority] == [100, 100, 100]


def test_turns_follow_what_is_charged_meanwhile_and_keep_the_order_in_a_class() -> None:
    queue, numbers = FairQueue(), count()
    runs = [
        ScheduledRun(number, priority, number, [1], [], 1)
        for number, priority in zip(numbers, [BATCH] * 3 + [INTERACTIVE] * 9, strict=False)
    ]
    order = []
    for run in queue.turns(runs):
        order.append(run.run)
        queue.charge(run.priority, 1)
    assert order == [3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2]


def test_weights_of_ones_own_are_used() -> None:
    weights = {INTERACTIVE: 1, STANDARD: 1, BATCH: 2}
    served = serve(FairQueue(weights), Priority, [1] * 400)
    assert served == pytest.approx({INTERACTIVE: 100, STANDARD: 100, BATCH: 200}, abs=2)
