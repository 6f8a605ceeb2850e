"""The bytes of cold segments."""

import re
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import Damaged
from tailrace.ledger.frame import Chunk, Token, encode
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite.compaction import COLD_FRAMES
from tailrace.ledger.sqlite.encoding import (
    COLD,
    MAX_PAYLOAD_BYTES,
    Unpacked,
    index_tails,
    pack_cold,
    unpack_cold,
    unpack_segment,
)
from tailrace.ledger.sqlite.storage import SegmentRow
from tests.ledger.sqlite.cold_material import plain_rows, sentence

ROOT = Path(__file__).parents[3]

texts = st.sampled_from((" the", " cat", " sat")) | st.text(max_size=200)
ids = st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple) | st.sampled_from(
    ((1_000,), (1_001,), (1_002,))
)
extras = st.sampled_from((b"", b"", b"", b"")) | st.binary(max_size=300)
offsets = st.sampled_from((0, 0, 0, 0, 0, 1))  # an index that is not the record's own
firsts = st.sampled_from((0, 1, 100, 127, 16_300, 2**21 - 3, 2**28, 2**35 - 1, 2**40))


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[Record]]:
    """Consecutive records of one stream, most of them tokens."""
    first = draw(firsts)
    records = []
    for at in range(draw(st.integers(1, 60))):
        index = first + at + draw(offsets)
        frame = draw(
            st.one_of(
                texts.map(lambda text, index=index: encode(Token(text, index))),  # type: ignore[misc]
                st.binary(max_size=40).map(
                    lambda data, index=index: encode(Chunk(data, True, index))  # type: ignore[misc]
                ),
            )
        )
        records.append(Record(frame, draw(ids), draw(extras)))
    return first, records


def packed(first: int, records: list[Record]) -> SegmentRow:
    columns = ([r.frame for r in records], [r.ids for r in records], [r.extra for r in records])
    return pack_cold(7, first, Unpacked(*columns))


@given(runs())
def test_any_run_of_records_comes_back_bit_for_bit(run: tuple[int, list[Record]]) -> None:
    first, records = run
    assert unpack_cold(packed(first, records), where="").records() == records


@given(st.lists(st.tuples(st.binary(max_size=30), ids), max_size=5))
def test_bytes_that_are_no_frames_come_back_too(
    some: list[tuple[bytes, tuple[int, ...]]],
) -> None:
    records = [Record(*pair) for pair in some]
    assert unpack_cold(packed(0, records), where="").records() == records


def test_a_plain_segment_and_a_cold_one_are_read_alike() -> None:
    records = sentence(150, seed=99)
    [plain] = plain_rows(7, records, each=1_000)
    cold = packed(0, records)
    assert unpack_segment(cold, where="") == unpack_segment(plain, where="")
    assert (cold.coding, cold.length) == (COLD, 151)


def packed_sentence() -> SegmentRow:
    return packed(100, sentence(150, seed=99)[100:])


def test_any_flipped_bit_is_damage_that_is_named() -> None:
    row = packed_sentence()
    for bit in range(len(row.records) * 8):
        bad = bytearray(row.records)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged, match="stream 07: segment at 100"):
            unpack_cold(row._replace(records=bytes(bad)), where="stream 07: segment at 100")


@given(st.binary(max_size=200) | st.none() | st.text(max_size=9))
def test_whatever_lies_there_is_a_segment_or_damage(data: bytes) -> None:
    with pytest.raises(Damaged):
        unpack_cold(SegmentRow(1, 0, 5, COLD, data), where="here")


def sealed(row: SegmentRow, payload: bytes) -> SegmentRow:
    """Return the row with another payload, under a checksum that holds."""
    body = zstandard.ZstdCompressor().compress(payload)
    place = row.first.to_bytes(8, "little") + row.length.to_bytes(8, "little")
    crc = zlib.crc32(body, zlib.crc32(place)).to_bytes(4, "little")
    return row._replace(records=crc + body)


@given(st.integers(0, 300), st.binary(min_size=1, max_size=4))
def test_a_payload_that_is_none_is_damage_or_another_one(at: int, put: bytes) -> None:
    row = packed_sentence()
    payload = bytearray(zstandard.ZstdDecompressor().decompress(row.records[4:]))
    payload[at : at + len(put)] = put
    with suppress(Damaged):
        assert len(unpack_cold(sealed(row, bytes(payload)), where="").frames) == row.length


def test_a_row_that_says_another_place_or_length_is_damaged() -> None:
    row = packed_sentence()
    for wrong in (row._replace(first=101), row._replace(length=50), row._replace(first=-1)):
        with pytest.raises(Damaged):
            unpack_cold(wrong, where="here")


def test_a_bomb_is_refused_before_it_expands() -> None:
    row = sealed(packed_sentence(), bytes(MAX_PAYLOAD_BYTES + 1))
    assert len(row.records) < 1_000
    with pytest.raises(Damaged, match="here"):
        unpack_cold(row, where="here")


def test_english_that_it_has_not_seen_takes_less_than_four_bytes_a_token_with_ids() -> None:
    """Pieces of 3.6 characters, ids over a vocabulary of 128,256 without any order."""
    text = "\n".join(path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
    prose = [line for line in text.splitlines() if re.match(r"(- \W*)?[A-Za-z]", line)]
    pieces = re.findall(r" ?[A-Za-z]{1,6}| ?[^A-Za-z ]{1,3}| ", "\n".join(prose))
    assert len("".join(pieces)) / len(pieces) > 3.3
    records = [
        Record(encode(Token(piece, index)), (zlib.crc32(piece.encode()) % 128_256,))
        for index, piece in enumerate(pieces)
    ]
    size = tokens = 0
    for first in range(0, len(records) - COLD_FRAMES, COLD_FRAMES):
        size += len(packed(first, records[first : first + COLD_FRAMES]).records)
        tokens += COLD_FRAMES
    assert tokens >= 8 * COLD_FRAMES
    assert size / tokens < 4


@given(st.integers(0, 2**42), st.integers(0, 300))
def test_tails_are_the_varints_that_frames_end_with(first: int, count: int) -> None:
    tails = index_tails(first, count)
    assert tails == [encode(Token("", first + n))[10:] for n in range(count)]
