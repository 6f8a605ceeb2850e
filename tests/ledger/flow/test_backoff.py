"""Delays between attempts to reconnect."""

from random import Random

from tailrace.ledger.flow.backoff import Backoff


class Highest(Random):
    """Draws the upper end of every range."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_the_ceiling_doubles_up_to_the_most() -> None:
    backoff = Backoff(0.1, 2.0, Highest())
    assert [backoff.next_delay_s() for _ in range(6)] == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_success_brings_the_ceiling_down_again() -> None:
    backoff = Backoff(0.1, 2.0, Highest())
    delays = [backoff.next_delay_s() for _ in range(3)]
    backoff.reset()
    assert backoff.next_delay_s() == delays[0]


def test_delays_are_drawn_from_the_whole_range() -> None:
    backoff = Backoff(0.1, 2.0, Random(1))
    delays = [backoff.next_delay_s() for _ in range(5_000)]
    assert all(0.1 <= delay <= 2.0 for delay in delays)
    assert min(delays) < 0.2
    assert max(delays) > 1.9
