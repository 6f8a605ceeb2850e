"""Silence of a peer, measured on a clock that is a number."""

from tailrace.ledger.flow.idle_timer import LONGEST_LOOK_S, IdleTimer


def test_silence_is_what_passes_between_looks() -> None:
    silence = IdleTimer(1000.0)
    assert [silence.seconds(now) for now in (1000.25, 1000.5, 1000.75)] == [0.25, 0.5, 0.75]


def test_a_word_breaks_it() -> None:
    silence = IdleTimer(1000.0)
    silence.seconds(1000.5)
    silence.broken()
    assert silence.seconds(1000.75) == 0.25


def test_time_in_which_nobody_listened_is_no_silence() -> None:
    silence = IdleTimer(1000.0)
    assert silence.seconds(2000.0) == LONGEST_LOOK_S
