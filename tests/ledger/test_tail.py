import pytest

from ledger.errors import Conflict, StaleEpoch, WrongIndex
from ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from ledger.interface import Append, Record, StreamInfo
from ledger.tail import MAX_TAIL_BATCHES, SEGMENT_BYTES, Tail

STREAM = bytes(16)


def tail() -> Tail:
    info = StreamInfo(STREAM, 1, 0, False, Durability.PROCESS, "{}", 0)
    return Tail(sid=1, info=info, first=0, accepted=0, released=0, ttl_ms=1000)


def token(index: int, text: str = "a") -> Record:
    return Record(encode(Token(text, index)), (7,))


def end(index: int) -> Record:
    return Record(encode(StreamEnd(index, FinishReason.STOP, index, 1)), ())


def test_an_append_of_an_older_epoch_is_refused_and_says_so() -> None:
    stream = tail()
    stream.epoch = 3
    with pytest.raises(StaleEpoch, match="epoch 2 was replaced by epoch 3"):
        stream.accept(Append(STREAM, 2, 0, token(0)))


@pytest.mark.parametrize("index", [0, 2, 9])
def test_only_the_next_index_is_accepted(index: int) -> None:
    stream = tail()
    stream.accept(Append(STREAM, 1, 0, token(0)))
    with pytest.raises(WrongIndex, match="the next index is 1"):
        stream.accept(Append(STREAM, 1, index, token(index)))


def test_nothing_follows_the_end() -> None:
    stream = tail()
    stream.accept(Append(STREAM, 1, 0, end(0)))
    with pytest.raises(Conflict, match="has ended"):
        stream.accept(Append(STREAM, 1, 1, token(1)))


def test_an_accepted_record_is_unreadable_until_it_is_released() -> None:
    stream = tail()
    stream.accept(Append(STREAM, 1, 0, token(0)))
    assert stream.take(0, 10) == []
    assert stream.snapshot().next_index == 0
    stream.release(token(0), seq=1)
    assert stream.take(0, 10) == [token(0)]
    assert stream.snapshot().next_index == 1


def test_a_stream_has_ended_only_when_its_end_is_released() -> None:
    stream = tail()
    stream.accept(Append(STREAM, 1, 0, end(0)))
    assert not stream.ended
    stream.release(end(0), seq=1)
    assert stream.ended


def test_a_tail_becomes_a_segment_when_large_or_old_or_ended() -> None:
    large, old, ended, fresh = tail(), tail(), tail(), tail()
    large.release(token(0, "x" * SEGMENT_BYTES), seq=1)
    old.release(token(0), seq=1)
    fresh.release(token(0), seq=MAX_TAIL_BATCHES)
    ended.accept(Append(STREAM, 1, 0, end(0)))
    ended.release(end(0), seq=1)
    assert large.wants_segment(1)
    assert ended.wants_segment(1)
    assert old.wants_segment(1 + MAX_TAIL_BATCHES)
    assert not fresh.wants_segment(1 + MAX_TAIL_BATCHES)
    assert not tail().wants_segment(10 * MAX_TAIL_BATCHES)


def test_what_a_segment_holds_is_no_longer_in_the_tail() -> None:
    stream = tail()
    for index in range(3):
        stream.release(token(index), seq=1)
    stream.drop(2)
    assert stream.take(0, 10) is None
    assert stream.take(2, 10) == [token(2)]
    assert stream.record_bytes == len(token(2).frame)
