"""Offsets and cursors."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError
from tailrace.origin.streams.cursors import (
    EPOCH_MS,
    INTERVAL_MS,
    MAX_JITTER_S,
    next_cursor,
    parse_cursor,
)
from tailrace.origin.streams.offsets import START, Offset, parse_offset

numbers = st.integers(0, 10**16 - 1)
offsets = st.builds(Offset, numbers, numbers)

moments = st.integers(EPOCH_MS, EPOCH_MS + 10**12)


@given(offsets, offsets)
def test_offsets_sort_as_text_as_they_lie_in_the_stream(one: Offset, other: Offset) -> None:
    assert (str(one) < str(other)) == (one < other)


@given(offsets)
def test_an_offset_is_parsed_as_it_was_written(offset: Offset) -> None:
    assert parse_offset(str(offset)) == offset


def test_the_beginning_is_a_sentinel_and_the_zero_offset() -> None:
    assert parse_offset("-1") == START
    assert parse_offset("0000000000000000_0000000000000000") == START


def test_now_is_no_offset_yet() -> None:
    assert parse_offset("now") is None


@given(offsets)
def test_an_offset_is_never_a_sentinel_and_fits_a_query(offset: Offset) -> None:
    text = str(offset)
    assert text not in ("-1", "now") and len(text) < 256 and not set(text) & set(",&=?/ ")


@given(st.text().filter(lambda text: text not in ("-1", "now")))
def test_other_text_is_no_offset(text: str) -> None:
    with pytest.raises(CallerError) as refused:
        parse_offset(text)
    assert (refused.value.status, refused.value.field) == (400, "offset")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0_0",
        "0000000000000000_000000000000000",
        "0000000000000000_0000000000000000\n",
        "\u0660" * 16 + "_0000000000000000",
        "-000000000000001_0000000000000000",
        "00000000000000000_0000000000000000",
        "NOW",
    ],
)
def test_what_is_nearly_an_offset_is_none(text: str) -> None:
    with pytest.raises(CallerError):
        parse_offset(text)


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
