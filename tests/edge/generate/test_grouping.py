"""Grouped text: what a piece is, that nothing is lost, and that no complete unit is held."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from operator import itemgetter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.edge.ai_sdk import UiEvents
from tailrace.edge.generate.encoders import FrameEncoder, SseEncoder
from tailrace.edge.generate.group_encoder import GroupEncoder, grouped
from tailrace.edge.generate.grouping import MAX_GROUP_CHARS, FrameGrouper, Grouping
from tailrace.edge.generate.json_lines import JsonLinesEncoder
from tailrace.edge.generate.snapshot import as_text
from tailrace.edge.generate.snapshot_encoder import SnapshotEncoder
from tailrace.edge.sse import PING, event, events
from tailrace.ledger.frame import (
    FinishReason,
    Frame,
    Logged,
    Notice,
    Opened,
    Reasoning,
    ScoredToken,
    Snapshot,
    Splitter,
    StreamEnd,
    StreamError,
    Token,
    ToolCall,
    decode,
    encode,
)
from tailrace.ledger.text_units import ENDS, Unit, unsettled_from

WORD, PHRASE = Grouping(Unit.WORD), Grouping(Unit.PHRASE)
SENTENCE, PARAGRAPH = Grouping(Unit.SENTENCE), Grouping(Unit.PARAGRAPH)
TEXTS = st.text(st.sampled_from('ab.!?,\u3002\uff0c\u300d)" \n'), max_size=6)
GROUPINGS = st.builds(
    Grouping, st.sampled_from([None, *Unit]), chars=st.sampled_from([1, 5, 40, MAX_GROUP_CHARS])
)


def tokens(*texts: str) -> list[Token]:
    return [Token(text, index) for index, text in enumerate(texts)]


def pieces(grouping: Grouping, frames: Sequence[Frame]) -> tuple[list[Frame], list[Frame]]:
    """Return the pieces that the frames complete, and what is held after them."""
    grouper = FrameGrouper(grouping, as_text)
    sent = [each for frame in frames for each in grouper.add(encode(frame))]
    held = grouper.release()
    assert grouper.release() == []
    assert grouper.first_held is None
    return [decode(raw)[1] for raw in sent], [decode(raw)[1] for raw in held]


# ---- what a piece is ----


NUMBER = ["Pi is 3", ".", "14", ".", "\n", "\n", "So"]
QUOTED = ['"No', '."', " He"]
CHINESE = ["\u4f60\u597d", "\u3002", "\u518d\u89c1"]


@pytest.mark.parametrize(
    ("grouping", "given", "ends", "held"),
    [
        (WORD, [" Fo", "und", " it", "."], [1], 3),
        (WORD, ["Found ", "it"], [0], 1),
        (PHRASE, ["Well", ",", " I", " think", ";", " yes"], [1, 4], 5),
        (SENTENCE, ["Hi", ".", " How", " are"], [1], 3),
        (SENTENCE, NUMBER, [5], 6),
        (SENTENCE, QUOTED, [1], 2),
        (SENTENCE, CHINESE, [1], 2),
        (SENTENCE, ["Hi.", " ", " ", "So"], [2], 3),
        (PARAGRAPH, ["One. Two.", "\n\n", "Three"], [1], 2),
    ],
)
def test_a_piece_ends_with_a_frame_that_ends_with_the_unit(
    grouping: Grouping, given: list[str], ends: list[int], held: int
) -> None:
    """`ends` are the last frames of the pieces that are sent, and `held` is the last held one."""
    sent, rest = pieces(grouping, tokens(*given))
    begins = [0, *(end + 1 for end in ends)]
    last = [*ends, held]
    texts = ["".join(given[begin : end + 1]) for begin, end in zip(begins, last, strict=True)]
    assert [*sent, *rest] == [Token(*each) for each in zip(texts, last, strict=True)]
    assert len(rest) == 1


def test_a_frame_with_the_end_of_a_unit_and_more_is_the_end_of_the_piece() -> None:
    sent, held = pieces(SENTENCE, tokens("Hello wor", "ld. How", " are"))
    assert (sent, held) == ([Token("Hello world. How", 1)], [Token(" are", 2)])


def test_text_is_sent_when_it_has_so_many_characters() -> None:
    sent, held = pieces(Grouping(chars=5), tokens("abc", "d", "ef", "g"))
    assert (sent, held) == ([Token("abcdef", 2)], [Token("g", 3)])


def test_a_frame_that_is_long_enough_by_itself_is_not_joined() -> None:
    frames = tokens("ab", "c" * 5, "d")
    assert pieces(Grouping(chars=5), frames) == (frames[:2], frames[2:])


def test_frames_without_text_are_not_held_without_limit() -> None:
    sent, held = pieces(SENTENCE, [Token("", index) for index in range(MAX_GROUP_CHARS + 1)])
    assert sent == [Token("", MAX_GROUP_CHARS - 1)]
    assert held == [Token("", MAX_GROUP_CHARS)]


def test_reasoning_is_grouped_by_itself() -> None:
    frames = [Reasoning("Let me", 0), Reasoning(" see", 1), Token("It", 2), Token(" is", 3)]
    sent, held = pieces(SENTENCE, frames)
    assert (sent, held) == ([Reasoning("Let me see", 1)], [Token("It is", 3)])


@pytest.mark.parametrize(
    "other",
    [
        ScoredToken("b", (), 2),
        ToolCall(0, "call-1", "add", "{}", 2),
        Notice("inexact", "", 2),
        StreamEnd(2, FinishReason.STOP, 2, 3),
        StreamError("unavailable", "", True, 503),
    ],
)
def test_another_frame_comes_behind_the_held_text(other: Frame) -> None:
    sent, held = pieces(SENTENCE, [*tokens("It", " is"), other])
    assert (sent, held) == ([Token("It is", 1), other], [])


def test_a_piece_of_one_frame_is_that_frame() -> None:
    grouper = FrameGrouper(SENTENCE)
    raws = [encode(frame, corr=9) for frame in tokens("Hi.", " So")]
    assert next(each for raw in raws for each in grouper.add(raw)) is raws[0]


def test_the_pieces_are_snapshots_for_a_reader_of_frames() -> None:
    grouper = FrameGrouper(SENTENCE)
    first = [each for frame in tokens("Hi", ".", " So") for each in grouper.add(encode(frame))]
    assert [decode(raw)[1] for raw in first] == [Snapshot(0, "Hi.", 1)]
    assert grouper.first_held == 2


# ---- for any text ----


@given(GROUPINGS, st.lists(st.tuples(TEXTS, st.sampled_from("TTTTTRN")), max_size=30))
@example(SENTENCE, [("a. b. ", "T"), ("", "T"), ("c", "R")])
def test_the_pieces_are_the_text_in_order(grouping: Grouping, said: list[tuple[str, str]]) -> None:
    kinds: dict[str, Callable[[str, int], Logged]] = {
        "T": Token,
        "R": Reasoning,
        "N": lambda text, index: Notice("loading", text, index),
    }
    frames = [kinds[kind](text, index) for index, (text, kind) in enumerate(said)]
    sent, held = pieces(grouping, frames)
    got = [frame for frame in (*sent, *held) if isinstance(frame, Logged)]
    assert runs(got) == runs(frames)
    indexes = [frame.index for frame in got]
    assert indexes == sorted(set(indexes))
    assert indexes[-1:] == [len(frames) - 1][: len(frames)]


def runs(frames: Sequence[Frame]) -> list[tuple[type, str]]:
    """Return the text of each run of frames of one type; notices are shown whole."""
    shown = [
        (type(one), one.text if isinstance(one, Token | Reasoning) else str(one)) for one in frames
    ]
    return [
        (kind, "".join(text for _, text in run))
        for kind, run in itertools.groupby(shown, itemgetter(0))
    ]


@given(st.sampled_from(list(Unit)), st.lists(TEXTS, max_size=30))
def test_no_complete_unit_is_held(unit: Unit, texts: list[str]) -> None:
    """The search for the end begins late in the text, and finds what a whole search finds."""
    grouper, text, shown = FrameGrouper(Grouping(unit), as_text), "", 0
    for frame in tokens(*texts):
        text += frame.text
        for raw in grouper.add(encode(frame)):
            piece = decode(raw)[1]
            assert isinstance(piece, Token)
            assert ENDS[unit].search(text[shown:]) is not None
            shown += len(piece.text)
        assert ENDS[unit].search(text[shown:]) is None


@given(st.sampled_from(list(Unit)), TEXTS, TEXTS)
def test_a_search_from_there_finds_what_a_search_of_the_whole_finds(
    unit: Unit, text: str, more: str
) -> None:
    if ENDS[unit].search(text) is None:
        whole = ENDS[unit].search(text + more)
        rest = ENDS[unit].search(text + more, unsettled_from(text))
        assert (whole and whole.span()) == (rest and rest.span())


@given(GROUPINGS, st.lists(TEXTS, max_size=30), st.data())
def test_a_reader_that_is_cut_off_between_two_pieces_gets_the_rest(
    grouping: Grouping, texts: list[str], data: st.DataObject
) -> None:
    frames = tokens(*texts)
    sent, held = pieces(grouping, frames)
    seen = [*sent, *held][: data.draw(st.integers(0, len(sent) + len(held)))]
    after = max((frame.index for frame in seen if isinstance(frame, Token)), default=-1)
    rest = itertools.chain(*pieces(grouping, frames[after + 1 :]))
    got = "".join(frame.text for frame in [*seen, *rest] if isinstance(frame, Token))
    assert got == "".join(texts)


# ---- encoders ----

END = StreamEnd(4, FinishReason.STOP, 4, 3)
TALK = [*tokens("Hi", ".", " So", " it"), END]


def test_events_have_the_index_of_the_last_frame() -> None:
    encoder = GroupEncoder(SseEncoder(), SENTENCE)
    begin = encoder.frames([])
    assert begin.startswith(b"retry: ")
    body = b"".join([encoder.frames([encode(frame)]) for frame in TALK])
    assert body == b"".join(map(event, [Token("Hi.", 1), Token(" So it", 3), END]))
    assert encoder.keepalive() == PING


@given(st.lists(st.tuples(st.integers(0, 20_000), st.text(max_size=300)), max_size=20))
def test_events_of_pieces_are_encoded_one_by_one_or_together_alike(
    said: list[tuple[int, str]],
) -> None:
    """The indexes of pieces have gaps, which the fast encoding of a run must not overlook."""
    frames = [Token(text, index) for index, text in sorted(said)]
    assert events([encode(frame) for frame in frames]) == b"".join(map(event, frames))


def test_lines_and_messages_have_the_same_pieces() -> None:
    lines = grouped(JsonLinesEncoder("application/jsonl"), SENTENCE)
    told = b"".join([lines.frames([encode(frame)]) for frame in TALK]).splitlines()
    assert [json.loads(each).get("text") for each in told] == ["Hi.", " So it", None]
    chat = grouped(UiEvents(), SENTENCE)
    chat.opened(Opened(bytes(16), 5, "", "demo", 3))
    begin = chat.frames([])
    assert b"text-delta" not in begin
    body = b"".join([chat.frames([encode(frame)]) for frame in TALK]).decode()
    data = [json.loads(each[6:]) for each in body.split("\n\n") if each.startswith("data: {")]
    assert [each["delta"] for each in data if each["type"] == "text-delta"] == ["Hi.", " So it"]


def test_frames_are_without_a_gap() -> None:
    encoder = grouped(FrameEncoder(), SENTENCE)
    assert encoder.shows_corr
    body = b"".join([encoder.frames([encode(frame)]) for frame in TALK])
    assert [decode(raw)[1] for raw in Splitter().feed(body)] == [
        Snapshot(0, "Hi.", 1),
        Snapshot(2, " So it", 3),
        END,
    ]


def test_released_text_is_a_piece() -> None:
    encoder = GroupEncoder(JsonLinesEncoder("application/jsonl"), Grouping(Unit.SENTENCE, ms=200))
    assert encoder.hold_s == 0.2
    assert encoder.first_held is None
    assert encoder.frames([encode(frame) for frame in TALK[:2]]) == b""
    released = [encoder.release(), encoder.release()]
    assert json.loads(released[0]) == {"type": "token", "text": "Hi.", "index": 1}
    assert released[1] == b""


def test_a_snapshot_comes_before_the_groups_of_later_text() -> None:
    encoder = SnapshotEncoder(grouped(JsonLinesEncoder("application/jsonl"), SENTENCE))
    encoder.opened(Opened(bytes(16), 2, "", "demo", 3))
    told = b"".join([encoder.frames([encode(frame)]) for frame in TALK]).splitlines()
    assert [json.loads(each)["type"] for each in told] == ["snapshot", "token", "end"]
    assert encoder.hold_s is not None
    assert encoder.first_held is None
    assert encoder.release() == b""


def test_an_answer_without_a_group_keeps_its_encoder() -> None:
    encoder = SseEncoder()
    assert grouped(encoder, None) is encoder
    assert (encoder.hold_s, encoder.first_held, encoder.release()) == (None, None, b"")
