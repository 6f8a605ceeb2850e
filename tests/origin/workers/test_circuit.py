"""When workers of a model are started again, and when not."""

from __future__ import annotations

from random import Random

from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.origin.workers.liveness import (
    MOST_DEATHS,
    OPEN_MAX_S,
    OPEN_MIN_S,
    TRIAL_LOOK_S,
    Circuit,
)

NOW = 100.0


def opened() -> Circuit:
    circuit = Circuit(Random(1))
    for _ in range(MOST_DEATHS):
        circuit.died(0, NOW, was_ready=True)
    return circuit


def after_open(circuit: Circuit, now: float) -> float:
    """Return when the trial may begin."""
    return now + circuit.wait_s(0, now)


def test_a_worker_that_was_ready_is_replaced_at_once_and_others_a_little_later() -> None:
    circuit = Circuit(Random(1))
    circuit.died(0, NOW, was_ready=True)
    assert circuit.wait_s(0, NOW) == 0
    circuit.died(0, NOW, was_ready=False)
    assert circuit.wait_s(0, NOW) > 0
    assert circuit.state is CircuitState.CLOSED


def test_deaths_between_which_something_is_made_open_nothing() -> None:
    circuit = Circuit(Random(1))
    for _ in range(MOST_DEATHS * 10):
        circuit.died(0, NOW, was_ready=True)
        circuit.made()
    assert (circuit.state, circuit.reason) == (CircuitState.CLOSED, "")


def test_after_many_deaths_in_a_row_none_is_started_for_a_while_and_the_reason_is_told() -> None:
    circuit = opened()
    assert circuit.state is CircuitState.OPEN
    assert circuit.wait_s(0, NOW) >= OPEN_MIN_S
    assert circuit.retry_s(NOW) == circuit.wait_s(0, NOW)
    assert circuit.reason.startswith(f"{MOST_DEATHS} workers in a row died")


def test_one_slot_tries_and_the_others_wait_for_how_it_goes() -> None:
    circuit = opened()
    now = after_open(circuit, NOW)
    assert circuit.wait_s(1, now) == 0
    assert circuit.reason.endswith("one is on trial")
    assert circuit.wait_s(0, now) == TRIAL_LOOK_S
    circuit.made()
    assert circuit.wait_s(0, now) == 0
    assert circuit.reason == ""


def test_pauses_between_trials_grow_up_to_a_limit_and_are_short_again_after_a_success() -> None:
    circuit, now, pauses = opened(), NOW, []
    for _ in range(12):
        pauses.append(circuit.wait_s(0, now))
        now = after_open(circuit, now)
        assert circuit.wait_s(0, now) == 0
        circuit.died(0, now, was_ready=False)
        assert circuit.state is CircuitState.OPEN
    assert max(pauses) <= OPEN_MAX_S
    assert max(pauses[6:]) > 4 * max(pauses[:2])
    circuit.made()
    for _ in range(MOST_DEATHS):
        circuit.died(0, now, was_ready=True)
    assert circuit.wait_s(0, now) <= 2 * OPEN_MIN_S
