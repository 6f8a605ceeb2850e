"""What an origin does less of while it has too much to do."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tailrace.ledger.frame import Priority
from tailrace.origin.generations.load_shedding import (
    CLIMB_S,
    DESCEND_S,
    FREE_MEMORY_CRITICAL,
    FREE_MEMORY_HIGH,
    FREE_MEMORY_LOW,
    Ladder,
    Readings,
    Rung,
)

MOST_WAIT_S = 30.0
FINE = Readings(wait_s=0.0, free_memory=0.5)
SLOW = Readings(wait_s=MOST_WAIT_S + 1, free_memory=0.5)
BETWEEN = Readings(wait_s=MOST_WAIT_S - 1, free_memory=0.5)


def held(ladder: Ladder, readings: Readings, begin_s: float, for_s: float) -> float:
    """Look every half second for so long; when that is over."""
    now = begin_s
    while now < begin_s + for_s:
        ladder.look(readings, now)
        now += 0.5
    return now


def test_it_climbs_a_rung_at_a_time_to_the_top_and_descends_more_slowly() -> None:
    ladder, now, seen = Ladder(MOST_WAIT_S), 100.0, [Rung.NORMAL]
    for _ in Rung:
        now = held(ladder, SLOW, now, CLIMB_S)
        seen.append(ladder.rung)
    assert seen == [*Rung, Rung.NOTHING_NEW]
    changed_s = [now]
    while ladder.rung:
        if ladder.look(FINE, now):
            changed_s.append(now)
            seen.append(ladder.rung)
        now += 0.5
    assert seen[len(Rung) + 1 :] == [*reversed(Rung)][1:]
    assert min(b - a for a, b in pairwise(changed_s)) >= DESCEND_S - 0.5


def test_between_the_thresholds_it_stays_where_it_is() -> None:
    ladder = Ladder(MOST_WAIT_S)
    now = held(ladder, SLOW, 100.0, CLIMB_S)
    rung = ladder.rung
    assert rung is Rung.SMALL_STEPS
    now = held(ladder, BETWEEN, now, 10 * DESCEND_S)
    assert ladder.rung is rung
    # Only a whole time in which all is well leads down.
    now = held(ladder, FINE, now, DESCEND_S - 1)
    now = held(ladder, BETWEEN, now, 1.0)
    held(ladder, FINE, now, DESCEND_S - 1)
    assert ladder.rung is rung


@pytest.mark.parametrize(
    ("free_memory", "rung", "critical"),
    [
        (FREE_MEMORY_HIGH, Rung.NORMAL, False),
        (FREE_MEMORY_LOW - 0.001, Rung.SMALL_STEPS, False),
        (FREE_MEMORY_CRITICAL - 0.001, Rung.SMALL_STEPS, True),
    ],
)
def test_memory_drives_it_too(free_memory: float, rung: Rung, critical: bool) -> None:
    ladder, readings = Ladder(MOST_WAIT_S), Readings(0.0, free_memory)
    held(ladder, readings, 100.0, CLIMB_S)
    assert (ladder.rung, ladder.is_critical(readings)) == (rung, critical)
    assert ("of memory is left" in ladder.reason) == bool(rung)


def test_less_urgent_classes_are_refused_first() -> None:
    ladder, refused = Ladder(MOST_WAIT_S), {}
    for rung in Rung:
        ladder.rung = rung
        refused[rung] = [priority for priority in Priority if ladder.refuses(priority)]
    assert refused[Rung.SHORT_BATCH] == []
    assert refused[Rung.NO_BATCH] == [Priority.BATCH]
    assert refused[Rung.NO_STANDARD] == [Priority.STANDARD, Priority.BATCH]
    assert refused[Rung.NOTHING_NEW] == [*Priority]
