"""The life of a subscription alone: a table, and what each step of it sets."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import Conflict
from tailrace.origin.subscriptions.subscription import (
    FIRST_RETRY_MS,
    JITTER,
    MAX_RETRY_MS,
    STORED_WAKE,
    TABLE,
    Phase,
    WakeEvent,
    WakeState,
    after,
)

LEASE_MS = 5_000
NOW = 1_000_000
STANDINGS = {
    Phase.IDLE: WakeState(generation=3),
    Phase.WAKING: WakeState(Phase.WAKING, 3, "w_3", notify_at_ms=NOW, failures=2),
    Phase.LEASED: WakeState(Phase.LEASED, 3, "w_3", "worker", lease_until_ms=NOW + 1),
}


def step(
    now: WakeState, event: WakeEvent, at_ms: int = NOW, holder: str | None = None
) -> WakeState:
    return after(now, event, at_ms, LEASE_MS, bytes, holder)


def test_every_phase_is_reached_and_left() -> None:
    assert {phase for phase, _ in TABLE} == set(TABLE.values()) == set(Phase)
    assert {event for _, event in TABLE} == set(WakeEvent)


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, WakeEvent)))
def test_what_is_not_in_the_table_is_refused(phase: Phase, event: WakeEvent) -> None:
    if (phase, event) in TABLE:
        assert step(STANDINGS[phase], event).phase is TABLE[phase, event]
    else:
        with pytest.raises(Conflict) as caught:
            step(STANDINGS[phase], event)
        assert caught.value.code == "FENCED"


def test_a_wake_has_a_new_generation_and_is_to_be_told_at_once() -> None:
    woken = step(STANDINGS[Phase.IDLE], WakeEvent.WORK)
    assert (woken.generation, woken.due_ms) == (4, NOW)
    assert woken.wake_id is not None and woken.wake_id.startswith("w_")


@pytest.mark.parametrize("event", [WakeEvent.DONE, WakeEvent.RELEASED, WakeEvent.EXPIRED])
def test_an_idle_subscription_keeps_nothing_but_its_generation(event: WakeEvent) -> None:
    idle = step(STANDINGS[Phase.LEASED], event)
    assert idle == WakeState(generation=3)
    assert idle.due_ms is None


def test_a_lease_begins_with_the_claim_and_each_word_of_the_holder_extends_it() -> None:
    leased = step(STANDINGS[Phase.WAKING], WakeEvent.CLAIMED, holder="w")
    assert (leased.holder, leased.due_ms, leased.failures) == ("w", NOW + LEASE_MS, 0)
    later = step(leased, WakeEvent.EXTENDED, NOW + 4_000)
    assert (later.holder, later.due_ms, later.wake_id) == ("w", NOW + 4_000 + LEASE_MS, "w_3")


def test_a_delivery_that_fails_after_the_callback_changes_nothing() -> None:
    leased = STANDINGS[Phase.LEASED]
    assert step(leased, WakeEvent.FAILED) == leased


@given(st.integers(0, 200), st.binary(min_size=2, max_size=2))
def test_retries_come_later_and_later_up_to_a_limit(failures: int, drawn: bytes) -> None:
    waking = WakeState(Phase.WAKING, 1, "w", notify_at_ms=NOW, failures=failures)
    failed = after(waking, WakeEvent.FAILED, NOW, LEASE_MS, lambda _size: drawn)
    assert failed.notify_at_ms is not None
    delay_ms = min(FIRST_RETRY_MS * 2**failures, MAX_RETRY_MS)
    assert abs(failed.notify_at_ms - NOW - delay_ms) <= JITTER * delay_ms + 1
    assert (failed.failures, failed.wake_id) == (failures + 1, "w")


@pytest.mark.parametrize("standing", list(STANDINGS.values()))
def test_a_standing_is_the_same_after_a_restart(standing: WakeState) -> None:
    assert STORED_WAKE.validate_json(STORED_WAKE.dump_json(standing)) == standing
