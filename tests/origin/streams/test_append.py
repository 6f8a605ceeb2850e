"""Decisions about appends, without I/O."""

import pytest

from tailrace.ledger.errors import CallerError
from tailrace.origin.streams.append import (
    AppendContext,
    Refused,
    Repeated,
    Taken,
    judge,
    messages_of,
)
from tailrace.origin.streams.page import Tip
from tailrace.origin.streams.request import AppendRequest, Place, Sender
from tests.origin.streams.stream_world import done

OPEN, CLOSED = Tip(3, closed=False), Tip(3, closed=True)
END = "0000000000000003_0000000000000000"


def standing(
    tip: Tip = OPEN,
    content_type: str = "text/plain",
    seq: str | None = None,
    last: Place | None = None,
) -> AppendContext:
    return AppendContext(content_type, tip, seq, last)


def append(
    body: bytes = b"x",
    content_type: str | None = "text/plain",
    *,
    closes: bool = False,
    seq: str | None = None,
    place: Place | None = None,
) -> AppendRequest:
    producer = None if place is None else Sender("p", place)
    return AppendRequest(body, content_type, closes, seq, producer)


def status(verdict: object) -> int:
    assert isinstance(verdict, Refused)
    return verdict.error.status


def test_what_nothing_speaks_against_is_taken() -> None:
    assert judge(append(), standing()) == Taken(204)
    assert judge(append(place=Place(0, 0)), standing()) == Taken(200)
    assert judge(append(b"", None, closes=True), standing()) == Taken(204)
    assert judge(append(b"", None, closes=True, place=Place(0, 0)), standing()) == Taken(204)


def test_a_repeated_request_is_repeated_whatever_has_happened_since() -> None:
    again = append(b"{", "no/type", seq="0", place=Place(0, 1))
    for tip in (OPEN, CLOSED):
        assert judge(again, standing(tip, "application/json", "9", Place(0, 2))) == Repeated()


def test_a_stale_producer_is_told_the_epoch_also_of_a_closed_stream() -> None:
    for tip in (OPEN, CLOSED):
        verdict = judge(append(place=Place(0, 9)), standing(tip, last=Place(4, 0)))
        assert isinstance(verdict, Refused)
        assert status(verdict) == 403
        assert verdict.headers == (("producer-epoch", "4"),)


def test_a_closed_stream_takes_nothing_and_says_where_it_ended() -> None:
    for more in (append(), append(closes=True), append(b"", closes=True, place=Place(0, 0))):
        verdict = judge(more, standing(CLOSED, "application/json"))
        assert isinstance(verdict, Refused)
        assert status(verdict) == 409
        assert verdict.headers == (("stream-next-offset", END), ("stream-closed", "true"))


def test_closing_twice_is_closing_once() -> None:
    assert judge(append(b"", None, closes=True), standing(CLOSED)) == Repeated()


def test_another_content_type_conflicts_before_the_sequence_does() -> None:
    verdict = judge(append(content_type="text/html", seq="1"), standing(seq="2"))
    assert isinstance(verdict, Refused)
    assert verdict.error.code == "content_type_mismatch"
    assert isinstance(judge(append(content_type="TEXT/plain; a=b"), standing()), Taken)


def test_a_gap_names_what_is_expected() -> None:
    verdict = judge(append(place=Place(0, 5)), standing(last=Place(0, 1)))
    assert isinstance(verdict, Refused)
    assert status(verdict) == 409
    assert dict(verdict.headers) == {"producer-expected-seq": "2", "producer-received-seq": "5"}


def test_a_new_epoch_that_begins_elsewhere_is_a_bad_request() -> None:
    assert status(judge(append(place=Place(1, 5)), standing(last=Place(0, 1)))) == 400


@pytest.mark.parametrize(("last", "seq"), [("2", "10"), ("a", "B"), ("x", "x"), ("01", "0")])
def test_sequences_rise_byte_by_byte(last: str, seq: str) -> None:
    assert status(judge(append(seq=seq), standing(seq=last))) == 409
    if last != seq:
        assert isinstance(judge(append(seq=last), standing(seq=seq)), Taken)


def test_a_json_body_holds_messages() -> None:
    assert done(messages_of("application/json", b"[1, 2]")) == [b"1, 2"]
    assert done(messages_of("application/json", b"")) == []
    assert done(messages_of("application/json", b" [] ")) == []
    assert done(messages_of("text/plain", b"[]")) == [b"[]"]
    with pytest.raises(CallerError):
        done(messages_of("application/json", b"[1"))
