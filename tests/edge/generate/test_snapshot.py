"""Snapshots: what they stand for, and that nothing is lost or doubled beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge.generate.encoders import FrameEncoder, SseEncoder
from tailrace.edge.generate.snapshot import (
    MAX_SNAPSHOT_BYTES,
    SnapshotFolder,
    as_text,
)
from tailrace.edge.generate.snapshot_encoder import SnapshotEncoder
from tailrace.ledger.frame import (
    FinishReason,
    Frame,
    Logged,
    Notice,
    Opened,
    Reasoning,
    Revision,
    ScoredToken,
    Snapshot,
    StreamEnd,
    StreamError,
    Token,
    ToolCall,
    decode,
    encode,
)
from tailrace.ledger.stream_text import StreamText

STREAM = bytes(16)


def raw(frames: Sequence[Frame]) -> list[bytes]:
    return [encode(frame) for frame in frames]


def folded(frames: Sequence[Frame]) -> list[Frame]:
    folder = SnapshotFolder()
    out = [each for index, one in enumerate(raw(frames)) for each in folder.add(one, index)]
    return [decode(each)[1] for each in [*out, *folder.finish()]]


def opened(next_index: int, first: int = 0) -> Opened:
    return Opened(STREAM, next_index, "", "demo", 3, first=first)


def text_of(frames: Sequence[Frame]) -> str:
    """Return the text of a stream whose snapshots were never revised."""
    text = StreamText()
    for frame in frames:
        if isinstance(frame, Snapshot) and not frame.reasoning:
            text.add(Token(frame.text, frame.index))
        else:
            text.add(frame)
    return text.text


# ---- what becomes of frames ----


def test_tokens_become_one_snapshot() -> None:
    tokens = [Token("a", 0), ScoredToken("b", (), 1), Token("", 2), Token("c", 3)]
    assert folded(tokens) == [Snapshot(0, "abc", 3)]


def test_other_frames_stay_between_snapshots() -> None:
    call = ToolCall(0, "call-1", "add", "{}", 4)
    frames = [Notice("loading", "", 0), Reasoning("h", 1), Reasoning("m", 2), Token("x", 3), call]
    assert folded([*frames, Token("y", 5)]) == [
        Notice("loading", "", 0),
        Snapshot(1, "hm", 2, reasoning=True),
        Snapshot(3, "x", 3),
        call,
        Snapshot(5, "y", 5),
    ]


def test_a_final_revision_stands_for_the_interim_ones_that_it_replaces() -> None:
    heard = [
        Token("So: ", 0),
        Revision(1, "wreck", False, 1),
        Revision(1, "recognise speech", False, 2),
        Revision(1, "Recognise speech. ", True, 3),
        Revision(4, "it", False, 4),
    ]
    assert folded(heard) == [Snapshot(0, "So: Recognise speech. ", 3), heard[-1]]


def test_interim_revisions_that_are_not_replaced_stay() -> None:
    heard = [Revision(0, "a", False, 0), Revision(1, "b", True, 1), Token("c", 2)]
    assert folded(heard) == [heard[0], Snapshot(1, "bc", 2)]
    unfinished = [Revision(0, "a", False, 0), Token("c", 1)]
    assert folded(unfinished) == [unfinished[0], Snapshot(1, "c", 1)]


def test_a_long_text_is_several_snapshots() -> None:
    long = "x" * (MAX_SNAPSHOT_BYTES - 1)
    assert folded([Token(long, 0), Token("ab", 1), Token("c", 2)]) == [
        Snapshot(0, long, 0),
        Snapshot(1, "abc", 2),
    ]


kinds = st.sampled_from(["token", "scored", "reasoning", "notice", "interim", "final"])


@st.composite
def streams(draw: st.DrawFn) -> list[Logged]:
    """Draw the frames of a stream: a revision replaces what came since the last final text."""
    frames: list[Logged] = []
    interim: int | None = None
    for index, kind in enumerate(draw(st.lists(kinds, max_size=30))):
        text = draw(st.text(max_size=3))
        if kind in ("interim", "final"):
            replaces = index if interim is None else interim
            frames.append(Revision(replaces, text, kind == "final", index))
            interim = replaces if kind == "interim" else None
            continue
        interim = None
        of = {
            "token": Token(text, index),
            "scored": ScoredToken(text, (), index),
            "reasoning": Reasoning(text, index),
            "notice": Notice("note", text, index),
        }
        frames.append(of[kind])
    return frames


@given(streams(), st.integers(0, 30))
def test_the_snapshot_of_any_prefix_and_the_rest_are_the_whole(
    frames: list[Logged], cut: int
) -> None:
    read = [*folded(frames[:cut]), *frames[cut:]]
    assert text_of(read) == text_of(frames)
    due = 0
    for frame in read:  # without a gap, and nothing twice
        assert isinstance(frame, Logged | Snapshot)
        assert (frame.first if isinstance(frame, Snapshot) else frame.index) == due
        due = frame.index + 1
    assert due == len(frames)


def test_a_revision_of_what_the_reader_has_stays_as_it_is() -> None:
    frames = [Revision(1, "right", True, 3), Token("!", 4)]
    folder = SnapshotFolder()
    out = [each for at, one in enumerate(raw(frames), 3) for each in folder.add(one, at)]
    assert [decode(each)[1] for each in out] == frames[:1]
    assert folder.finish() == raw([Snapshot(4, "!", 4)])


# ---- the encoder ----


@pytest.mark.parametrize("batch", [1, 2, 5, 100])
def test_what_was_there_is_folded_and_what_follows_is_not(batch: int) -> None:
    encoder = SnapshotEncoder(FrameEncoder())
    encoder.opened(opened(6, 2))
    frames = raw([Token(str(n), n) for n in range(2, 9)])
    out = b"".join(encoder.frames(frames[at : at + batch]) for at in range(0, len(frames), batch))
    assert out == encode(Snapshot(2, "2345", 5)) + b"".join(frames[4:])


def test_nothing_is_written_before_the_snapshot_is_whole() -> None:
    encoder = SnapshotEncoder(FrameEncoder())
    encoder.opened(opened(3))
    first, second, third = raw([Token(str(n), n) for n in range(3)])
    assert encoder.frames([first]) == encoder.frames([second]) == b""
    assert encoder.frames([third]) == encode(Snapshot(0, "012", 2))


def test_a_stream_that_has_ended_is_a_snapshot_and_its_end() -> None:
    end = StreamEnd(2, FinishReason.STOP, 2, 3)
    encoder = SnapshotEncoder(FrameEncoder())
    encoder.opened(opened(3))
    out = encoder.frames(raw([Token("a", 0), Token("b", 1), end]))
    assert out == encode(Snapshot(0, "ab", 1)) + encode(end)


def test_a_failure_in_the_middle_comes_after_the_text_before_it() -> None:
    error = StreamError("damaged", "a row is damaged", False, 500)
    encoder = SnapshotEncoder(FrameEncoder())
    encoder.opened(opened(9))
    out = encoder.frames(raw([Token("a", 0), error]))
    assert out == encode(Snapshot(0, "a", 0)) + encode(error)


def test_a_reader_at_the_tip_gets_no_snapshot() -> None:
    encoder = SnapshotEncoder(FrameEncoder())
    encoder.opened(opened(4, 4))
    [token] = raw([Token("a", 4)])
    assert encoder.frames([token]) == token


def test_an_event_tells_which_frames_it_stands_for() -> None:
    encoder = SnapshotEncoder(SseEncoder())
    encoder.opened(opened(2))
    assert encoder.frames([]).startswith(b"retry: ")
    out = encoder.frames(raw([Token("a", 0), Token('"b', 1)]))
    data = b'{"first":0,"text":"a\\"b","index":1,"reasoning":false}'
    assert out == b"id: 1\nevent: snapshot\ndata: " + data + b"\n\n"


def test_other_dialects_get_one_token() -> None:
    encoder = SnapshotEncoder(FrameEncoder(), as_text)
    encoder.opened(opened(3))
    out = encoder.frames(raw([Reasoning("hm", 0), Token("a", 1), Token("b", 2)]))
    assert out == encode(Reasoning("hm", 0)) + encode(Token("ab", 2))
