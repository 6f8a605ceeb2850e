"""Levels of load shedding: how they rise and fall, and what each one refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tailrace.ledger.frame import Priority
from tailrace.origin.core.load_shedding import (
    FALL_S,
    FREE_MEMORY_CRITICAL,
    FREE_MEMORY_HIGH,
    FREE_MEMORY_LOW,
    RISE_S,
    LoadLevel,
    LoadShedding,
    Readings,
)

MOST_WAIT_S = 30.0
FINE = Readings(wait_s=0.0, free_memory=0.5)
SLOW = Readings(wait_s=MOST_WAIT_S + 1, free_memory=0.5)
BETWEEN = Readings(wait_s=MOST_WAIT_S - 1, free_memory=0.5)


def held(shedding: LoadShedding, readings: Readings, begin_s: float, for_s: float) -> float:
    """Look every half second for so long; when that is over."""
    now = begin_s
    while now < begin_s + for_s:
        shedding.look(readings, now)
        now += 0.5
    return now


def test_it_climbs_a_level_at_a_time_to_the_top_and_descends_more_slowly() -> None:
    shedding, now, seen = LoadShedding(MOST_WAIT_S), 100.0, [LoadLevel.NORMAL]
    for _ in LoadLevel:
        now = held(shedding, SLOW, now, RISE_S)
        seen.append(shedding.level)
    assert seen == [*LoadLevel, LoadLevel.NOTHING_NEW]
    changed_s = [now]
    while shedding.level:
        if shedding.look(FINE, now):
            changed_s.append(now)
            seen.append(shedding.level)
        now += 0.5
    assert seen[len(LoadLevel) + 1 :] == [*reversed(LoadLevel)][1:]
    assert min(b - a for a, b in pairwise(changed_s)) >= FALL_S - 0.5


def test_between_the_thresholds_it_stays_where_it_is() -> None:
    shedding = LoadShedding(MOST_WAIT_S)
    now = held(shedding, SLOW, 100.0, RISE_S)
    level = shedding.level
    assert level is LoadLevel.SMALL_STEPS
    now = held(shedding, BETWEEN, now, 10 * FALL_S)
    assert shedding.level is level
    # Only a whole time in which all is well leads down.
    now = held(shedding, FINE, now, FALL_S - 1)
    now = held(shedding, BETWEEN, now, 1.0)
    held(shedding, FINE, now, FALL_S - 1)
    assert shedding.level is level


@pytest.mark.parametrize(
    ("free_memory", "level", "critical"),
    [
        (FREE_MEMORY_HIGH, LoadLevel.NORMAL, False),
        (FREE_MEMORY_LOW - 0.001, LoadLevel.SMALL_STEPS, False),
        (FREE_MEMORY_CRITICAL - 0.001, LoadLevel.SMALL_STEPS, True),
    ],
)
def test_memory_drives_it_too(free_memory: float, level: LoadLevel, critical: bool) -> None:
    shedding, readings = LoadShedding(MOST_WAIT_S), Readings(0.0, free_memory)
    held(shedding, readings, 100.0, RISE_S)
    assert (shedding.level, shedding.is_critical(readings)) == (level, critical)
    assert ("of memory is left" in shedding.reason) == bool(level)


def test_less_urgent_classes_are_refused_first() -> None:
    shedding, refused = LoadShedding(MOST_WAIT_S), {}
    for level in LoadLevel:
        shedding.level = level
        refused[level] = [priority for priority in Priority if shedding.refuses(priority)]
    assert refused[LoadLevel.SHORT_BATCH] == []
    assert refused[LoadLevel.NO_BATCH] == [Priority.BATCH]
    assert refused[LoadLevel.NO_STANDARD] == [Priority.STANDARD, Priority.BATCH]
    assert refused[LoadLevel.NOTHING_NEW] == [*Priority]
