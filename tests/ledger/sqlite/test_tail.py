"""The tail of a stream: appends, epochs, segments."""

import pytest

from tailrace.ledger.errors import Conflict, FrameError, StaleEpoch, WrongIndex
from tailrace.ledger.frame import Detach, Durability, FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import Record, StreamInfo
from tailrace.ledger.sqlite.encoding import PLAIN, pack_segment
from tailrace.ledger.sqlite.storage import SegmentRow
from tailrace.ledger.sqlite.tail import SEGMENT_BYTES, Tail

STREAM = bytes(16)


def tail() -> Tail:
    return Tail.at(1, StreamInfo(STREAM, 1, 0, False, Durability.PROCESS, "{}", 0), 1000)


def token(index: int, text: str = "a") -> Record:
    return Record(encode(Token(text, index)), (7,))


def end(index: int) -> Record:
    return Record(encode(StreamEnd(index, FinishReason.STOP, index, 1)), ())


def test_an_append_of_an_older_epoch_is_refused_and_says_so() -> None:
    stream = tail()
    stream.epoch = 3
    with pytest.raises(StaleEpoch, match="epoch 2 was replaced by epoch 3"):
        stream.accept(2, 0, *token(0))


@pytest.mark.parametrize("index", [0, 2, 9])
def test_only_the_next_index_is_accepted(index: int) -> None:
    stream = tail()
    stream.accept(1, 0, *token(0))
    with pytest.raises(WrongIndex, match="the next index is 1"):
        stream.accept(1, index, *token(index))


WHOLE = encode(Token("a", 0))


@pytest.mark.parametrize(
    "frame",
    [b"", WHOLE[:3], WHOLE[:8], WHOLE[:-1], WHOLE + b"\x00", WHOLE * 2, encode(Detach())],
    ids=["nothing", "header", "prefix", "too_short", "too_long", "two", "never_logged"],
)
def test_what_is_not_one_whole_frame_that_may_be_logged_is_refused(frame: bytes) -> None:
    """It would shift the frames behind it in the log row, which are other streams'."""
    stream = tail()
    with pytest.raises(FrameError):
        stream.accept(1, 0, *Record(frame, ()))
    assert stream.accepted == 0
    stream.accept(1, 0, *token(0))


def test_nothing_follows_the_end() -> None:
    stream = tail()
    stream.accept(1, 0, *end(0))
    with pytest.raises(Conflict, match="has ended"):
        stream.accept(1, 1, *token(1))


def filled(*texts: str) -> Tail:
    """Return a tail of tokens, all released."""
    stream = tail()
    for index, text in enumerate(texts):
        stream.accept(1, index, *token(index, text))
    stream.released = stream.accepted
    return stream


def test_an_accepted_record_is_unreadable_until_it_is_released() -> None:
    stream = tail()
    stream.accept(1, 0, *token(0))
    assert stream.take(0, 10) == []
    assert stream.snapshot().next_index == 0
    stream.released = 1
    assert stream.take(0, 10) == [token(0).frame]
    assert stream.records(0, 10) == [token(0)]
    assert stream.snapshot().next_index == 1


def test_a_stream_has_ended_only_when_its_end_is_released() -> None:
    stream = tail()
    stream.accept(1, 0, *end(0))
    assert not stream.ended
    stream.released = 1
    assert stream.ended


def test_a_tail_is_ripe_for_a_segment_when_large_or_ended() -> None:
    ended = tail()
    ended.accept(1, 0, *end(0))
    assert filled("x" * SEGMENT_BYTES).is_due
    assert ended.is_due
    assert not filled("a").is_due


def test_what_a_segment_holds_is_no_longer_in_the_tail() -> None:
    stream = filled("a", "b", "c")
    stream.was_stored(2)
    assert stream.take(0, 10) is None
    assert stream.take(2, 10) == [token(2, "c").frame]
    blob = pack_segment([token(2, "c").frame], [(7,)])
    assert stream.segments() == [SegmentRow(1, 2, 1, PLAIN, blob)]
    assert stream.unstored_bytes == len(token(2, "c").frame)


def test_the_last_segment_stays_for_those_who_watch() -> None:
    long = "x" * SEGMENT_BYTES
    stream = filled(long, long, "c")
    stream.watchers[lambda: None] = None
    stream.was_stored(1)
    stream.was_stored(2)
    assert stream.take(0, 10) is None
    assert stream.take(1, 10) == [token(1, long).frame, token(2, "c").frame]
    assert stream.unstored_bytes == len(token(2, "c").frame)


def test_a_short_segment_that_was_stored_for_its_age_does_not_stay() -> None:
    stream = filled("a", "b", "c")
    stream.watchers[lambda: None] = None
    stream.was_stored(2)
    assert stream.take(1, 10) is None
    assert stream.take(2, 10) == [token(2, "c").frame]


def test_a_withdrawn_end_may_be_followed_again() -> None:
    stream = filled("a")
    before = stream.unstored_bytes
    stream.accept(1, 1, *token(1))
    stream.accept(1, 2, *end(2))
    stream.withdraw(1)
    assert (stream.accepted, stream.end_accepted, stream.unstored_bytes) == (1, False, before)
    stream.accept(1, 1, *token(1))
