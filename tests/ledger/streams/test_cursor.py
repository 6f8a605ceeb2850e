import random

from hypothesis import given
from hypothesis import strategies as st

from ledger.streams.cursor import (
    EPOCH_MS,
    INTERVAL_MS,
    MAX_JITTER_S,
    next_cursor,
    parse_cursor,
)

moments = st.integers(EPOCH_MS, EPOCH_MS + 10**12)


@given(moments)
def test_without_an_echo_the_cursor_is_the_interval_of_the_moment(now_ms: int) -> None:
    assert next_cursor(now_ms, None, random.randbytes) == (now_ms - EPOCH_MS) // INTERVAL_MS


@given(moments, st.integers(0, 10**8), st.randoms(use_true_random=False))
def test_a_cursor_rises_above_the_one_that_is_echoed(
    now_ms: int, echoed: int, source: random.Random
) -> None:
    cursor = next_cursor(now_ms, echoed, source.randbytes)
    current = (now_ms - EPOCH_MS) // INTERVAL_MS
    assert cursor > echoed or cursor == current > echoed
    assert cursor <= max(current, echoed + MAX_JITTER_S * 1000 // INTERVAL_MS)


def test_what_is_no_cursor_of_ours_is_ignored() -> None:
    assert parse_cursor("1042") == 1042
    for text in (None, "", "abc", "-1", "1.5", "9" * 17, "\u0661"):
        assert parse_cursor(text) is None
