"""The work of a compactor, and how it is asked for."""

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import Damaged
from ledger.frame import Token, encode
from ledger.interface import Record
from ledger.sqlite import compaction, compactor_message, dictionary
from ledger.sqlite.cold import MAX_PAYLOAD_BYTES, is_whole, unpack_cold
from ledger.sqlite.compaction import MAX_KNOWN, Compaction
from ledger.sqlite.compactor_child import serve
from ledger.sqlite.compactor_message import HEADER, Kind, Message, body_size, decode, with_rows
from ledger.sqlite.dictionary import Dictionary, Parsing, Vocabulary
from ledger.sqlite.storage import SegmentRow
from tests.ledger.sqlite.cold_material import learnt, plain_rows, sentence

ROW = learnt().pack()

numbers = st.lists(st.integers(0, 2**64 - 1), max_size=9).map(tuple)
blobs = st.lists(st.binary(max_size=50), max_size=5).map(tuple)


def taught() -> Compaction:
    work = Compaction()
    work.know(1, ROW)
    return work


# ---- the work ----


def test_what_is_packed_is_whole_and_comes_back() -> None:
    records = sentence(300, seed=5)
    packed = taught().pack(plain_rows(7, records), 1)
    assert packed is not None
    assert packed.row[:4] == (7, 0, 301, 1)
    known = Dictionary.unpack(ROW, where="")
    assert is_whole(packed.row, known)
    assert unpack_cold(packed.row, known, where="").records() == records


def test_a_segment_with_any_flipped_bit_is_not_whole() -> None:
    packed = taught().pack(plain_rows(7, sentence(60, seed=5)), 1)
    assert packed is not None
    known = Dictionary.unpack(ROW, where="")
    for bit in range(len(packed.row.records) * 8):
        bad = bytearray(packed.row.records)
        bad[bit // 8] ^= 1 << bit % 8
        assert not is_whole(packed.row._replace(records=bytes(bad)), known)
    assert not is_whole(packed.row._replace(first=1), known)


def test_a_damaged_segment_is_named_by_its_index() -> None:
    rows = plain_rows(7, sentence(300))
    bad = bytearray(rows[2].records)
    bad[30] ^= 1
    rows[2] = rows[2]._replace(records=bytes(bad))
    with pytest.raises(Damaged, match="segment at index 100"):
        taught().pack(rows, 1)
    with pytest.raises(Damaged, match="segment at index 100"):
        taught().sample(rows)


def test_a_segment_that_holds_fewer_frames_than_its_row_says_is_damaged() -> None:
    [row, *_] = plain_rows(7, sentence(300))
    with pytest.raises(Damaged, match="segment at index 0 has 50 frames, not 51"):
        taught().pack([row._replace(length=51)], 1)


def test_only_the_newest_dictionaries_are_held() -> None:
    work = Compaction()
    for coding in range(1, MAX_KNOWN + 3):
        held = work.know(coding, ROW)
    assert held == tuple(range(3, MAX_KNOWN + 3))
    with pytest.raises(Damaged, match="dictionary 9"):
        work.know(9, ROW[:-1])


def test_what_is_learnt_knows_the_words_and_packs_with_them() -> None:
    work = Compaction()
    for seed in range(40):
        assert work.sample(plain_rows(seed, sentence(100, seed))) == 101
    found = work.learn()
    assert (found.frames, found.pairs) == (40 * 101, len(set(sentence_words())))
    work.know(2, found.row)
    records = sentence(1_000, seed=77)
    packed = work.pack(plain_rows(9, records), 2)
    assert packed is not None
    assert packed.strange == 0
    assert unpack_cold(packed.row, Dictionary.unpack(found.row, where=""), where="").records() == (
        records
    )


def sentence_words() -> Sequence[tuple[int, ...]]:
    return [record.ids for seed in range(40) for record in sentence(100, seed, ends=False)]


def test_cold_segments_can_be_learnt_from_too() -> None:
    work = taught()
    packed = work.pack(plain_rows(7, sentence(300)), 1)
    assert packed is not None
    assert work.sample([packed.row]) == 301


def test_samples_are_bounded_and_forgotten_when_they_were_learnt_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = plain_rows(7, sentence(100))
    size = sum(len(row.records) for row in rows)
    monkeypatch.setattr(compaction, "MAX_SAMPLE_BYTES", 2 * size + 1)
    work = Compaction()
    assert [work.sample(rows) for _ in range(3)] == [101, 101, 0]
    assert work.learn().frames == 202
    assert work.sample(rows) == 101
    work.begin()
    assert work.learn().frames == 0


def test_only_so_many_pairs_are_counted_and_the_frequent_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dictionary, "MAX_COUNTED", 100)
    vocabulary = Vocabulary()
    for n in range(500):
        often, once = encode(Token(" often", n)), encode(Token(f" {n}", n))
        vocabulary.count([Record(often, (1,)), Record(often, (1,)), Record(once, (n,))])
        assert len(vocabulary._seen) <= 100
    assert vocabulary.pairs() == [((1,), b" often")]


def test_a_dictionary_that_is_parsed_piece_by_piece_is_the_same() -> None:
    packed = taught().pack(plain_rows(7, sentence(300)), 1)
    assert packed is not None
    for pairs in (1, 3, 1_000):
        parsing = Parsing(ROW, where="")
        while (found := parsing.advance(pairs)) is None:
            pass
        assert unpack_cold(packed.row, found, where="").records() == sentence(300)
        assert found.pack() == ROW


# ---- messages ----


@given(st.sampled_from(Kind), numbers, blobs)
def test_a_message_is_read_as_it_was_written(
    kind: Kind, numbers: tuple[int, ...], blobs: tuple[bytes, ...]
) -> None:
    message = Message(kind, numbers, blobs)
    raw = compactor_message.encode(message)
    assert body_size(raw[: HEADER.size]) == len(raw) - HEADER.size
    assert decode(raw[HEADER.size :]) == message


@given(st.binary(min_size=5, max_size=60))
def test_any_bytes_are_a_message_or_none(body: bytes) -> None:
    try:
        message = decode(body)
    except ValueError:
        return
    assert compactor_message.encode(message)[HEADER.size :] == body


@pytest.mark.parametrize(
    "header",
    [b"Traceback", bytes(8), HEADER.pack(0x31_43_52_54, MAX_PAYLOAD_BYTES * 2)],
    ids=["text", "zeros", "too long"],
)
def test_what_is_no_header_begins_no_message(header: bytes) -> None:
    with pytest.raises(ValueError, match="begins no message"):
        body_size(header[: HEADER.size])


def ask(*messages: Message, cut: int = 0) -> list[Message]:
    """What a child answers to these questions, of which the last `cut` bytes are missing."""
    asked = b"".join(map(compactor_message.encode, messages))
    sink = io.BytesIO()
    serve(io.BytesIO(asked[: len(asked) - cut]), sink)
    found, at, said = [], 0, sink.getvalue()
    while at < len(said):
        begin = at + HEADER.size
        at = begin + body_size(said[at:begin])
        found.append(decode(said[begin:at]))
    return found


def test_a_child_answers_until_its_input_ends() -> None:
    rows = plain_rows(7, sentence(100))
    know, pack = Message(Kind.KNOW, (1,), (ROW,)), with_rows(Kind.PACK, rows, 1)
    done, packed = ask(know, pack)
    assert done == Message(Kind.DONE, (1,))
    assert packed.kind is Kind.PACKED
    row = SegmentRow(7, 0, 101, 1, packed.blobs[0])
    assert unpack_cold(row, learnt(), where="").records() == sentence(100)
    size = len(compactor_message.encode(pack))
    for cut in range(1, size):
        assert ask(know, pack, cut=cut) == [done]


def test_damage_is_an_answer() -> None:
    [answer] = ask(Message(Kind.KNOW, (1,), (b"no dictionary",)))
    assert answer.kind is Kind.DAMAGED
    assert b"dictionary 1" in answer.blobs[0]


def test_an_answer_is_no_question() -> None:
    with pytest.raises(ValueError, match="is no question"):
        ask(Message(Kind.DONE))
