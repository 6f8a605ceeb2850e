import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import CallerError
from ledger.streams.offset import START, Offset, parse_offset

numbers = st.integers(0, 10**16 - 1)
offsets = st.builds(Offset, numbers, numbers)


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
