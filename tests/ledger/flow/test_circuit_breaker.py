"""A circuit breaker on a clock that is a number."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.circuit_breaker import CircuitBreaker, CircuitState

TRIPS = 3
TRIAL_S = 5.0


def breaker() -> CircuitBreaker:
    return CircuitBreaker(TRIPS, Backoff(10, 10), TRIAL_S)


def tripped() -> CircuitBreaker:
    made = breaker()
    for _ in range(TRIPS):
        made.failed(0)
    return made


def test_some_failures_in_a_row_and_no_fewer_open_it() -> None:
    made = breaker()
    for _ in range(3):
        for _ in range(TRIPS - 1):
            made.failed(0)
        made.succeeded()
    assert made.allows(0)
    assert not tripped().allows(0)
    assert tripped().rest_s(4) == 6


def test_after_its_rest_one_request_tries_it_and_no_second_one() -> None:
    made = tripped()
    assert not made.allows(9.9)
    assert made.allows(10)
    made.sent(10)
    assert not made.allows(10)
    assert not made.allows(10 + TRIAL_S - 0.1)


def test_a_trial_that_works_closes_it_and_one_that_fails_opens_it_again() -> None:
    made = tripped()
    assert made.allows(10)
    made.sent(10)
    made.failed(11)
    assert not made.allows(20.9)
    assert made.allows(21)
    made.sent(21)
    made.succeeded()
    assert made.state is CircuitState.CLOSED
    assert made.allows(21)
    made.failed(22)
    assert made.allows(22)  # failures count from zero again


def test_a_trial_without_an_outcome_makes_room_for_another() -> None:
    made = tripped()
    assert made.allows(10)
    made.sent(10)
    assert made.allows(10 + TRIAL_S)


def test_an_outcome_of_what_was_sent_before_it_opened_changes_nothing() -> None:
    made = tripped()
    made.succeeded()
    assert made.state is CircuitState.OPEN
    made.failed(9)
    assert made.allows(10)


def test_a_peer_that_is_known_to_work_is_let_through_at_once() -> None:
    made = tripped()
    made.reset()
    assert made.allows(0)
    assert made.failures == 0


@given(st.lists(st.sampled_from(["ask", "worked", "failed"])), st.floats(0, 1000))
def test_whatever_happens_it_lets_something_through_in_time(events: list[str], now: float) -> None:
    made = breaker()
    for event in events:
        now += 1
        if event == "ask" and made.allows(now):
            made.sent(now)
        elif event == "worked":
            made.succeeded()
        elif event == "failed":
            made.failed(now)
    assert made.allows(now + 10) or made.allows(now + 10 + TRIAL_S)
