"""Data stored beside records, and how older ledgers stored it within their token ids."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import Damaged
from tailrace.ledger.frame import FinishReason, Notice, StreamEnd, Token, encode
from tailrace.ledger.interface import Record
from tailrace.ledger.marked_ids import LIFE, STEER_BEGINS, STEERED, UNKNOWN, unmarked
from tailrace.ledger.record_extra import (
    IdSpan,
    RecordExtra,
    StreamLife,
    life_numbers,
    unpack_extra,
)

TOKEN = encode(Token(" the", 7))
END = encode(StreamEnd(3, FinishReason.STOP, 2, 4))
LIFE_OF_ONE = StreamLife(3, 14, 1592, 6, 53, 58, resumes=2, takeovers=0)

numbers = st.integers(0, 2**64 - 1)
extras = st.builds(
    RecordExtra,
    st.lists(st.builds(IdSpan, numbers, numbers), max_size=3).map(tuple),
    st.none() | st.text(max_size=70),
    st.lists(st.none() | numbers, max_size=9).map(tuple),
)


@given(extras)
def test_an_extra_is_read_as_it_was_stored(extra: RecordExtra) -> None:
    assert RecordExtra.of(Record(TOKEN, (), extra.pack())) == extra


def test_a_record_with_nothing_to_say_takes_no_bytes() -> None:
    assert RecordExtra().pack() == b""
    assert RecordExtra.of(Record(TOKEN, (1,))) == RecordExtra()


@pytest.mark.parametrize("packed", [b"\1", b"\0\0\0\0", b"\0\2"])
def test_bytes_that_are_no_extra_are_damage(packed: bytes) -> None:
    with pytest.raises(Damaged):
        unpack_extra(packed)


def test_a_life_is_read_as_it_was_stored() -> None:
    extra = RecordExtra(life=life_numbers(LIFE_OF_ONE))
    assert StreamLife.of(Record(END, (), extra.pack())) == LIFE_OF_ONE
    assert StreamLife.of(Record(END, ())) is None


def test_numbers_that_another_release_has_more_or_fewer_of_are_no_fault() -> None:
    stored = life_numbers(LIFE_OF_ONE)
    fewer = RecordExtra(life=stored[:-2]).pack()
    more = RecordExtra(life=(*stored, 5, None)).pack()
    assert StreamLife.of(Record(END, (), fewer)) == LIFE_OF_ONE._replace(
        resumes=None, takeovers=None
    )
    assert StreamLife.of(Record(END, (), more)) == LIFE_OF_ONE


# ---- older ledgers ----


def marked(orders: list[tuple[bool, list[int]]]) -> tuple[int, ...]:
    """Ids as older ledgers held them: of each group whether an order brought it, and its ids."""
    return tuple(
        id_ | (STEERED | STEER_BEGINS * (at == 0) if is_order else 0)
        for is_order, ids in orders
        for at, id_ in enumerate(ids)
    )


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 2**20), min_size=1, max_size=4)),
        max_size=6,
    )
)
def test_marks_of_steered_ids_become_spans(orders: list[tuple[bool, list[int]]]) -> None:
    begins = accumulate((len(ids) for _, ids in orders), initial=0)
    spans = tuple(
        IdSpan(begin, len(ids))
        for begin, (is_order, ids) in zip(begins, orders, strict=False)
        if is_order
    )
    found = unmarked(TOKEN, marked(orders))
    assert found.ids == tuple(id_ for _, ids in orders for id_ in ids)
    assert RecordExtra.of(found) == RecordExtra(steered=spans)


def test_numbers_behind_the_ids_of_an_end_become_its_life() -> None:
    ids = (7, 9 | STEERED | STEER_BEGINS, LIFE, 3, 14, 1592, UNKNOWN, 53, 58, 2, 0)
    found = unmarked(END, ids)
    assert found.ids == (7, 9)
    assert StreamLife.of(found) == LIFE_OF_ONE._replace(gap_p50_ms=None)
    assert RecordExtra.of(found).steered == (IdSpan(1, 1),)


def test_a_notice_of_the_engine_becomes_the_engine() -> None:
    told = encode(Notice("engine", "a fingerprint", 1))
    assert RecordExtra.of(unmarked(told, ())).engine == "a fingerprint"
    other = encode(Notice("loading", "soon", 0))
    assert unmarked(other, ()) == Record(other, ())


def test_records_without_marks_are_as_they_were() -> None:
    assert unmarked(TOKEN, (1, 2)) == Record(TOKEN, (1, 2))
    assert unmarked(END, ()) == Record(END, ())
