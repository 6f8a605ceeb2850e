"""Encoding of log rows and segments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import Damaged
from tailrace.ledger.frame import Token, encode
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite.encoding import (
    PLAIN,
    Entry,
    column,
    pack_batch,
    pack_segment,
    places_of,
    unpack_batch,
    unpack_segment,
)
from tailrace.ledger.sqlite.storage import SegmentRow

sids = st.integers(0, 2**32 - 1)
indexes = st.integers(0, 2**40)
records = st.builds(
    Record,
    st.builds(lambda text, index: encode(Token(text, index)), st.text(max_size=300), indexes),
    st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
    st.sampled_from((b"", b"", b"")) | st.binary(max_size=300),
)


def batch(entries: list[Entry]) -> bytes:
    return pack_batch(
        column([entry.sid for entry in entries]),
        [entry.at for entry in entries],
        [entry.record.frame for entry in entries],
        [entry.record.ids for entry in entries],
        [entry.record.extra for entry in entries],
    )


def segment(run: list[Record]) -> bytes:
    ids, extras = [record.ids for record in run], [record.extra for record in run]
    return pack_segment([record.frame for record in run], ids, extras)


def unpack(blob: bytes, where: str = "segment") -> list[Record]:
    return unpack_segment(SegmentRow(1, 0, 0, PLAIN, blob), where=where).records()


@given(st.lists(st.builds(Entry, sids, indexes, records), max_size=20))
def test_a_batch_gives_back_its_entries(entries: list[Entry]) -> None:
    assert list(unpack_batch(batch(entries), where="log row 1")) == entries


@given(st.lists(records, max_size=20))
def test_a_segment_gives_back_its_records(run: list[Record]) -> None:
    assert unpack(segment(run)) == run


@given(st.lists(records, min_size=1, max_size=5), st.data())
def test_any_flipped_bit_is_noticed_and_the_place_is_named(
    run: list[Record], data: st.DataObject
) -> None:
    blob = bytearray(segment(run))
    at = data.draw(st.integers(0, len(blob) * 8 - 1))
    blob[at // 8] ^= 1 << at % 8
    with pytest.raises(Damaged, match="segment 7 of stream x"):
        unpack(bytes(blob), where="segment 7 of stream x")


@given(st.lists(st.builds(Entry, sids, indexes, records), min_size=1, max_size=5), st.data())
def test_of_a_rotten_batch_either_the_right_places_are_known_or_none(
    entries: list[Entry], data: st.DataObject
) -> None:
    blob = bytearray(batch(entries))
    at = data.draw(st.integers(0, len(blob) * 8 - 1))
    blob[at // 8] ^= 1 << at % 8
    known = places_of(bytes(blob))
    assert known is None or known == [(entry.sid, entry.at) for entry in entries]


def test_a_torn_blob_is_noticed() -> None:
    blob = segment([Record(encode(Token("a", 0)), (1,))])
    for size in range(len(blob)):
        with pytest.raises(Damaged):
            unpack(blob[:size])


@pytest.mark.parametrize("blob", [None, 0, 0.5, "a long text"])
def test_what_sqlite_reads_on_a_rotten_page_is_noticed(blob: bytes) -> None:
    with pytest.raises(Damaged, match="log row 0"):
        list(unpack_batch(blob, where="log row 0"))
