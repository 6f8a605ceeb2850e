import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import LedgerFailed
from ledger.frame import Token, encode
from ledger.interface import Record
from ledger.record import Entry, pack_batch, pack_segment, unpack_batch, unpack_segment

numbers = st.integers(0, 2**40)
records = st.builds(
    Record,
    st.builds(lambda text, index: encode(Token(text, index)), st.text(max_size=300), numbers),
    st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
)


@given(st.lists(st.builds(Entry, numbers, numbers, records), max_size=20))
def test_a_batch_gives_back_its_entries(entries: list[Entry]) -> None:
    assert list(unpack_batch(pack_batch(entries), where="log row 1")) == entries


@given(st.lists(records, max_size=20))
def test_a_segment_gives_back_its_records(run: list[Record]) -> None:
    assert list(unpack_segment(pack_segment(run), where="segment")) == run


@given(st.lists(records, min_size=1, max_size=5), st.data())
def test_any_flipped_bit_is_noticed_and_the_place_is_named(
    run: list[Record], data: st.DataObject
) -> None:
    blob = bytearray(pack_segment(run))
    at = data.draw(st.integers(0, len(blob) * 8 - 1))
    blob[at // 8] ^= 1 << at % 8
    with pytest.raises(LedgerFailed, match="segment 7 of stream x"):
        list(unpack_segment(bytes(blob), where="segment 7 of stream x"))


def test_a_torn_blob_is_noticed() -> None:
    blob = pack_segment([Record(encode(Token("a", 0)), (1,))])
    for size in range(len(blob)):
        with pytest.raises(LedgerFailed):
            list(unpack_segment(blob[:size], where="segment"))
