import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import Damaged, NotFound
from ledger.frame import Chunk, Token, encode
from ledger.interface import Record
from ledger.sqlite import dictionary_maker
from ledger.sqlite.cold import (
    COLD_FRAMES,
    MAX_PAYLOAD_BYTES,
    index_tails,
    pack_cold,
    unpack_cold,
    unpack_stored,
)
from ledger.sqlite.cold_packer import ColdPacker
from ledger.sqlite.cold_run import RUN_SEGMENTS, Run, take_run
from ledger.sqlite.dictionary import MAX_PAIRS, Dictionary, Vocabulary, code_of, put_uint
from ledger.sqlite.record import pack_segment
from ledger.sqlite.storage import SegmentRow
from tests.ledger.sqlite.cold_material import (
    COLD_AFTER_S,
    Clock,
    all_is_there,
    codings,
    extend,
    fill,
    flip_bit,
    learnt,
    opened,
    sentence,
    store,
)

pytestmark = pytest.mark.anyio

LEARNT = learnt()
EMPTY = Dictionary((), b"", 0)

texts = st.sampled_from((" the", " cat", " sat")) | st.text(max_size=200)
ids = st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple) | st.sampled_from(
    ((1_000,), (1_001,), (1_002,))
)
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
        records.append(Record(frame, draw(ids)))
    return first, records


@given(runs(), st.sampled_from((LEARNT, EMPTY)))
def test_any_run_of_records_comes_back_bit_for_bit(
    run: tuple[int, list[Record]], dictionary: Dictionary
) -> None:
    first, records = run
    packed = pack_cold(7, first, records, 1, dictionary)
    assert packed is not None
    assert unpack_cold(packed.row, dictionary, where="").records() == records
    again = Dictionary.unpack(dictionary.pack(), where="")
    assert unpack_cold(packed.row, again, where="").records() == records


@given(st.binary(max_size=30), st.lists(st.tuples(st.binary(max_size=30), ids), max_size=5))
def test_bytes_that_are_no_frames_come_back_too(
    start: bytes, rest: list[tuple[bytes, tuple[int, ...]]]
) -> None:
    records = [Record(start, ()), *(Record(*pair) for pair in rest)]
    packed = pack_cold(7, 0, records, 1, LEARNT)
    assert packed is not None
    assert unpack_cold(packed.row, LEARNT, where="").records() == records


def packed_sentence() -> SegmentRow:
    packed = pack_cold(7, 100, sentence(150, seed=99)[100:], 3, LEARNT)
    assert packed is not None
    return packed.row


def test_any_flipped_bit_is_damage_that_is_named() -> None:
    row = packed_sentence()
    for bit in range(len(row.records) * 8):
        bad = bytearray(row.records)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged, match="stream 07: segment at 100"):
            unpack_cold(row._replace(records=bytes(bad)), LEARNT, where="stream 07: segment at 100")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_segment_or_damage(data: bytes) -> None:
    with pytest.raises(Damaged):
        unpack_cold(SegmentRow(1, 0, 5, 1, data), LEARNT, where="here")


def test_a_row_that_says_another_place_or_length_is_damaged() -> None:
    row = packed_sentence()
    for wrong in (row._replace(first=101), row._replace(length=50), row._replace(coding=2)):
        with pytest.raises(Damaged):
            unpack_cold(wrong, LEARNT, where="here")


def test_another_dictionary_or_none_is_damage() -> None:
    row = packed_sentence()
    with pytest.raises(Damaged):
        unpack_cold(row, EMPTY, where="here")
    with pytest.raises(Damaged, match="here: its dictionary is gone"):
        unpack_stored(row, b"", where="here")
    assert unpack_stored(row, LEARNT.pack(), where="") == sentence(150, seed=99)[100:]


def test_a_damaged_dictionary_is_named() -> None:
    good = LEARNT.pack()
    for at in range(0, len(good), 7):
        bad = bytearray(good)
        bad[at] ^= 0x10
        with pytest.raises(Damaged, match="dictionary 3"):
            Dictionary.unpack(bytes(bad), where="dictionary 3")


@pytest.mark.parametrize("size", [10_000, MAX_PAYLOAD_BYTES + 1, 2**62])
def test_a_bomb_is_refused_before_it_expands(size: int) -> None:
    body = bytearray()
    put_uint(body, size)
    body += EMPTY.compress(b"\0" * 20_000_000)
    blob = struct.pack("<I", zlib.crc32(body)) + bytes(body)
    assert len(blob) < 4_000
    with pytest.raises(Damaged):
        unpack_cold(SegmentRow(1, 0, 1, 1, blob), EMPTY, where="here")


def test_a_zstd_frame_that_claims_to_be_huge_is_refused() -> None:
    claim = b"\xc0\x00" + (2**61).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(ValueError, match="size of its own"):
        EMPTY.decompress(claim, 100)


def test_known_tokens_cost_a_fraction_of_their_plain_segment() -> None:
    records = sentence(1_000, seed=77)
    packed = pack_cold(7, 0, records, 1, LEARNT)
    assert packed is not None
    plain = pack_segment([r.frame for r in records], [r.ids for r in records])
    assert len(packed.row.records) * 15 < len(plain)
    assert packed.strange == 0


def test_what_was_seen_once_is_no_pair_and_is_counted_as_strange() -> None:
    vocabulary = Vocabulary()
    vocabulary.count([Record(encode(Token(" once", 0)), (5,))])
    vocabulary.count([Record(encode(Token(" twice", n)), (6,)) for n in range(2)])
    assert vocabulary.pairs() == [((6,), b" twice")]
    dictionary = Dictionary(vocabulary.pairs(), b"", 3)
    records = [
        Record(encode(Token(text, n)), (5 + n,)) for n, text in enumerate((" once", " twice"))
    ]
    packed = pack_cold(1, 0, records, 1, dictionary)
    assert packed is not None
    assert packed.strange == 1


def test_every_pair_has_a_code_of_its_own() -> None:
    codes = [code_of(at) for at in range(MAX_PAIRS)]
    assert len(set(codes)) == MAX_PAIRS
    assert {len(code) for code in codes} == {1, 2}
    assert b"\0" not in codes
    assert codes[-1] == b"\xff\xff"


@given(st.integers(0, 2**42), st.integers(0, 300))
def test_tails_are_the_varints_that_frames_end_with(first: int, count: int) -> None:
    tails = index_tails(first, count)
    assert tails == [encode(Token("", first + n))[10:] for n in range(count)]


# ---- runs ----


def plain(first: int, length: int, size: int = 100, coding: int = 0) -> SegmentRow:
    return SegmentRow(1, first, length, coding, bytes(size))


def test_a_run_is_bounded_in_frames_bytes_and_segments() -> None:
    by_frames = [plain(at, 1_000) for at in range(0, 5_000, 1_000)]
    assert take_run(by_frames, 0, None).beyond == COLD_FRAMES // 1_000 * 1_000
    by_bytes = [plain(at, 10, size=100_000) for at in range(0, 50, 10)]
    assert take_run(by_bytes, 0, None).beyond == 20
    by_segments = [plain(at, 1) for at in range(100)]
    assert len(take_run(by_segments, 0, None).rows) == RUN_SEGMENTS


def test_a_run_passes_over_cold_segments_and_ends_before_the_next() -> None:
    rows = [plain(0, 10, coding=1), plain(10, 10), plain(20, 10), plain(30, 10, coding=1)]
    run = take_run(rows, 0, None)
    assert (run.rows, run.beyond) == (rows[1:3], 30)


def test_a_run_ends_at_a_gap_and_before_what_is_still_warm() -> None:
    assert take_run([plain(0, 10), plain(20, 10)], 0, None).beyond == 10
    assert take_run([plain(0, 10), plain(10, 10)], 0, 15).beyond == 10
    assert take_run([plain(0, 10)], 0, 5).beyond == 0


# ---- in a ledger ----


@pytest.fixture(autouse=True)
def learns_from_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary_maker, "MIN_TRAIN_FRAMES", 2_000)


async def test_ended_streams_become_cold_and_read_the_same(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        await ledger.expire()
        assert codings(tmp_path) == [(0, 40)]
        clock.pass_s(COLD_AFTER_S)
        assert await ledger.expire() == 0
        assert codings(tmp_path) == [(1, 20)]
        await all_is_there(ledger, held)
    async with opened(tmp_path, clock) as ledger:
        await all_is_there(ledger, held)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        assert codings(tmp_path) == [(1, 20)]


async def test_a_stream_that_is_read_stays_plain(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        clock.pass_s(COLD_AFTER_S / 2)
        read = next(iter(held))
        await ledger.read(read, 0, 10)
        clock.pass_s(COLD_AFTER_S / 2)
        await ledger.expire()
        assert codings(tmp_path) == [(0, 2), (1, 19)]


async def test_too_little_material_stays_plain(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        await fill(ledger, streams=3)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        assert codings(tmp_path) == [(0, 6)]


async def test_of_a_long_running_stream_the_old_part_becomes_cold(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        records = sentence(4 * COLD_FRAMES, ends=False)
        stream = await store(ledger, 1, records)
        await ledger.expire()
        cold = dict(codings(tmp_path))
        assert cold[1] >= 2
        assert cold[0] > 1
        more = [
            *records,
            *[Record(encode(Token(" more", len(records) + n)), (1,)) for n in range(500)],
        ]
        await extend(ledger, stream, more[len(records) :], len(records))
        await all_is_there(ledger, {stream: more})
    async with opened(tmp_path, clock) as ledger:
        await all_is_there(ledger, {stream: more})


async def test_a_damaged_cold_segment_names_its_stream_and_spares_the_others(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
    flip_bit(tmp_path, 1, 20)
    bad = next(iter(held))
    async with opened(tmp_path, clock) as ledger:
        with pytest.raises(Damaged, match=f"stream {bad.hex()}: segment at index 0"):
            await ledger.read(bad, 0, 10)
        del held[bad]
        await all_is_there(ledger, held)


async def test_a_damaged_plain_segment_is_left_as_it_is(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
    flip_bit(tmp_path, 2, 50)
    bad = list(held)[1]
    clock.pass_s(COLD_AFTER_S)
    async with opened(tmp_path, clock) as ledger:
        await ledger.expire()
        assert codings(tmp_path) == [(0, 2), (1, 19)]
        with pytest.raises(Damaged, match=bad.hex()):
            await ledger.read(bad, 0, 10)
        del held[bad]
        await all_is_there(ledger, held)


async def test_a_dictionary_that_was_outgrown_is_kept_while_segments_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dictionary_maker, "RETRAIN_FACTOR", 1)
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        later = sentence(300, seed=1_000)
        held[await store(ledger, 1_000, later)] = later
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        assert codings(tmp_path) == [(1, 20), (2, 1)]
        await all_is_there(ledger, held)


async def test_a_dictionary_that_knows_too_little_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dictionary_maker, "STRANGE_FRAMES", 1_000)
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = {}
        for number in range(24):
            # Eight streams that teach another vocabulary, then those of other words.
            word = " early" if number < 8 else f" late{number % 3}"
            records = [Record(encode(Token(word, n)), (n % 2,)) for n in range(300)]
            records.append(sentence(300)[-1])
            held[await store(ledger, number, records)] = records
            if number % 8 == 7:
                clock.pass_s(COLD_AFTER_S)
                await ledger.expire()
        assert [coding for coding, _ in codings(tmp_path)] == [1, 2]
        await all_is_there(ledger, held)


async def test_a_stream_that_is_deleted_while_it_is_packed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        streams = list(held)
        pack = ColdPacker._pack

        async def delete_first(packer: ColdPacker, run: Run, coding: int) -> None:
            sid = run.rows[0].sid
            if sid <= 5:
                await ledger.delete(streams[sid - 1])
                del held[streams[sid - 1]]
            await pack(packer, run, coding)

        monkeypatch.setattr(ColdPacker, "_pack", delete_first)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        for stream in streams[:5]:
            with pytest.raises(NotFound):
                await ledger.info(stream)
        await all_is_there(ledger, held)
    assert codings(tmp_path) == [(1, 15)]
