"""The breaker of one origin, on a clock that is a number."""

from tailrace.edge.origins.choice import PROBE_S, TRIPS, Breaker, State
from tailrace.ledger.flow.backoff import Backoff


def tripped() -> Breaker:
    breaker = Breaker(Backoff(10, 10))
    for _ in range(TRIPS):
        breaker.failed(0)
    return breaker


def test_some_failures_in_a_row_and_no_fewer_open_it() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(TRIPS - 1):
            breaker.failed(0)
        breaker.worked()
    assert breaker.allows(0)
    assert not tripped().allows(0)


def test_after_its_rest_one_request_tries_it_and_no_second_one() -> None:
    breaker = tripped()
    assert not breaker.allows(9.9)
    assert breaker.allows(10)
    breaker.asked(10)
    assert not breaker.allows(10)
    assert not breaker.allows(10 + PROBE_S - 0.1)


def test_a_probe_that_works_closes_it_and_one_that_fails_opens_it_again() -> None:
    breaker = tripped()
    assert breaker.allows(10)
    breaker.asked(10)
    breaker.failed(11)
    assert not breaker.allows(20.9)
    assert breaker.allows(21)
    breaker.asked(21)
    breaker.worked()
    assert breaker.state is State.CLOSED
    assert breaker.allows(21)
    breaker.failed(22)
    assert breaker.allows(22)  # it is counted anew


def test_a_probe_without_an_answer_makes_room_for_another() -> None:
    breaker = tripped()
    assert breaker.allows(10)
    breaker.asked(10)
    assert breaker.allows(10 + PROBE_S)


def test_an_answer_to_what_was_asked_before_does_not_close_it() -> None:
    breaker = tripped()
    breaker.worked()
    assert breaker.state is State.OPEN
