"""Idempotent producers: each request is taken once and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError
from tailrace.ledger.objects.object import ObjectRequest
from tailrace.origin.streams.append import Decision, decide, due_seq
from tailrace.origin.streams.request import MAX_NUMBER, Place, Sender, parse_producer

small = st.integers(0, 3)
places = st.builds(Place, small, small)
numbers = st.integers(0, MAX_NUMBER)


def request(**fields: str) -> ObjectRequest:
    headers = tuple((f"producer-{name}", value) for name, value in fields.items())
    return ObjectRequest("POST", "http://host/v1/stream/x", headers)


@given(st.lists(places, max_size=60))
def test_whatever_arrives_each_request_is_taken_once_and_in_order(arrivals: list[Place]) -> None:
    last: Place | None = None
    taken: list[Place] = []
    for place in arrivals:
        verdict = decide(last, place)
        assert (verdict is Decision.DUPLICATE) == (
            place in taken and last is not None and place.epoch == last.epoch
        )
        if verdict is Decision.TAKE:
            taken.append(place)
            last = place
    assert taken == sorted(set(taken), key=lambda place: (place.epoch, place.seq))
    for epoch in {place.epoch for place in taken}:
        seqs = [place.seq for place in taken if place.epoch == epoch]
        assert seqs == list(range(len(seqs)))


def test_a_gap_names_the_request_that_is_due() -> None:
    assert decide(Place(0, 0), Place(0, 2)) is Decision.GAP
    assert due_seq(Place(0, 0), 0) == 1
    assert decide(None, Place(0, 7)) is Decision.GAP
    assert due_seq(None, 0) == 0


def test_a_new_epoch_begins_with_zero_and_fences_the_older_ones() -> None:
    assert decide(Place(0, 5), Place(1, 1)) is Decision.NOT_FROM_ZERO
    assert decide(Place(0, 5), Place(1, 0)) is Decision.TAKE
    assert decide(Place(1, 0), Place(0, 6)) is Decision.STALE


@given(numbers, numbers)
def test_a_place_is_unpacked_as_it_was_packed(epoch: int, seq: int) -> None:
    assert Place.unpack(Place(epoch, seq).pack()) == Place(epoch, seq)


def test_a_producer_names_itself_whole_or_not_at_all() -> None:
    assert parse_producer(request()) is None
    assert parse_producer(request(id="p", epoch="0", seq="7")) == Sender("p", Place(0, 7))
    for some in (
        {"id": "p"},
        {"epoch": "0"},
        {"id": "p", "epoch": "0"},
        {"epoch": "0", "seq": "0"},
    ):
        with pytest.raises(CallerError):
            parse_producer(request(**some))


@pytest.mark.parametrize("bad", ["", "1abc", "0xyz", "1e3", "-1", "+1", " 1", str(2**53), "9" * 40])
def test_epoch_and_seq_are_numbers_that_javascript_holds(bad: str) -> None:
    for fields in ({"epoch": bad, "seq": "0"}, {"epoch": "0", "seq": bad}):
        with pytest.raises(CallerError):
            parse_producer(request(id="p", **fields))


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_producers_id_is_neither_empty_nor_endless(name: str) -> None:
    with pytest.raises(CallerError):
        parse_producer(request(id=name, epoch="0", seq="0"))
