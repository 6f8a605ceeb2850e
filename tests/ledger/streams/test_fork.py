from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import CallerError, Conflict
from ledger.streams.config import Config, Create, ForkOrder, Part
from ledger.streams.expiry import NEVER, Expiry
from ledger.streams.fork import (
    MAX_DEPTH,
    Claim,
    Cut,
    Cutter,
    Grant,
    confirms,
    created,
    inherited,
)
from ledger.streams.message import CHUNK_BYTES, chunks, piece
from ledger.streams.offset import START, Offset
from ledger.streams.page import Tip

ONE, TWO, NEW = bytes(16), bytes([2]) * 16, bytes([9]) * 16
messages_of = st.lists(
    st.binary(min_size=1, max_size=4) | st.integers(1, 3 * CHUNK_BYTES).map(bytes), max_size=5
)


def frames_of(messages: Sequence[bytes]) -> list[bytes]:
    return [record.frame for record in chunks(messages, 0)]


def cut(frames: list[bytes], order: ForkOrder, *, json: bool = False) -> Cut:
    cutter = Cutter(order, Tip(len(frames), closed=False), json=json)
    if cutter.cut is None:
        cutter.feed(frames[cutter.first_index :])
    assert cutter.cut is not None
    return cutter.cut


def held(frames: list[bytes], place: Cut) -> bytes:
    return b"".join(piece(raw).data for raw in frames[: place.end]) + place.head


@given(messages_of, st.data())
def test_a_fork_of_bytes_holds_what_lies_before_its_place(
    messages: list[bytes], data: st.DataObject
) -> None:
    frames = frames_of(messages)
    sizes = [len(piece(raw).data) for raw in frames]
    index = data.draw(st.integers(0, len(frames)))
    ends = [at for at in range(index, len(frames)) if piece(frames[at]).last]
    room = sum(sizes[index : ends[0] + 1]) if ends else 0
    sub_offset = data.draw(st.integers(0, room))
    place = cut(frames, ForkOrder("s", Offset(index), sub_offset))
    assert held(frames, place) == b"".join(messages)[: sum(sizes[:index]) + sub_offset]
    # What it inherits ends with a message, so that none runs on into what is appended.
    assert place.end == 0 or piece(frames[place.end - 1]).last or place.head
    assert len(place.head) <= CHUNK_BYTES
    with pytest.raises(CallerError):
        cut(frames, ForkOrder("s", Offset(index), room + 1))


@given(messages_of, st.data())
def test_a_fork_of_json_counts_messages(messages: list[bytes], data: st.DataObject) -> None:
    frames = frames_of(messages)
    first = data.draw(st.integers(0, len(messages)))
    index = len(frames_of(messages[:first]))
    sub_offset = data.draw(st.integers(0, len(messages) - first))
    place = cut(frames, ForkOrder("s", Offset(index), sub_offset), json=True)
    assert held(frames, place) == b"".join(messages[: first + sub_offset])
    assert not place.head
    with pytest.raises(CallerError):
        cut(frames, ForkOrder("s", Offset(index), len(messages) - first + 1), json=True)


def test_without_an_offset_a_fork_leaves_at_the_end() -> None:
    frames = frames_of([b"ab", b"c"])
    assert cut(frames, ForkOrder("s")) == Cut(2)
    assert cut([], ForkOrder("s")) == cut(frames, ForkOrder("s", START)) == Cut(0)
    with pytest.raises(CallerError):
        cut(frames, ForkOrder("s", None, 1))


def test_a_cut_between_two_frames_of_a_message_is_within_the_message() -> None:
    data = bytes(CHUNK_BYTES)
    frames = frames_of([data + data])
    assert cut(frames, ForkOrder("s", START, CHUNK_BYTES)) == Cut(0, data)
    assert cut(frames, ForkOrder("s", Offset(1))) == Cut(0, data)
    assert cut(frames, ForkOrder("s", START, 2 * CHUNK_BYTES)) == Cut(2)


def test_a_sub_offset_counts_on_from_within_a_frame() -> None:
    assert cut(frames_of([b"abcdef"]), ForkOrder("s", Offset(0, 2), 3)) == Cut(0, b"abcde")
    assert cut(frames_of([b"abcdef"]), ForkOrder("s", Offset(0, 2), 4)) == Cut(1)


@pytest.mark.parametrize("offset", [Offset(3), Offset(2, 1), Offset(0, 2), Offset(9, 9)])
def test_a_place_that_the_source_has_not_is_refused(offset: Offset) -> None:
    with pytest.raises(CallerError) as refused:
        cut(frames_of([b"ab", b"c"]), ForkOrder("s", offset))
    assert refused.value.status == 400


def test_json_is_not_forked_within_a_value() -> None:
    frames = frames_of([bytes(CHUNK_BYTES + 1)])
    for offset in (Offset(1), Offset(0, 1)):
        with pytest.raises(CallerError):
            cut(frames, ForkOrder("s", offset), json=True)


def test_a_fork_of_a_fork_inherits_from_both() -> None:
    source = Config(TWO, "text/plain", Create(), parts=(Part(ONE, 3),))
    assert inherited(source, 5) == (Part(ONE, 3), Part(TWO, 5))
    assert inherited(source, 3) == (Part(ONE, 3),)
    assert inherited(source, 2) == (Part(ONE, 2),)
    assert inherited(source, 0) == ()


def test_forks_of_forks_are_not_endless() -> None:
    parts = tuple(Part(bytes([at]) * 16, at + 1) for at in range(MAX_DEPTH - 1))
    source = Config(NEW, "text/plain", Create(), parts=parts)
    assert len(inherited(source, MAX_DEPTH - 1)) == MAX_DEPTH - 1
    with pytest.raises(Conflict):
        inherited(source, MAX_DEPTH)


def test_a_fork_takes_from_its_source_what_is_not_asked_for() -> None:
    grant = Grant("application/json", Expiry(ttl_s=5), (Part(ONE, 1),), b"")
    asked = Create(fork=ForkOrder("s"))
    config = created(NEW, asked, grant)
    assert (config.content_type, config.expiry) == ("application/json", Expiry(ttl_s=5))
    assert created(NEW, replace(asked, expiry=Expiry(ttl_s=9)), grant).expiry == Expiry(ttl_s=9)
    assert created(NEW, Create(), None).content_type == "application/octet-stream"


def test_an_equal_request_confirms_and_another_does_not() -> None:
    grant = Grant("text/plain", Expiry(ttl_s=5), (), b"")
    asked = Create(fork=ForkOrder("s", START, 2))
    config = created(NEW, asked, grant)
    assert confirms(asked, config, closed=False)
    assert confirms(replace(asked, content_type="Text/Plain"), config, closed=False)
    assert confirms(replace(asked, expiry=Expiry(ttl_s=5)), config, closed=False)
    for other in (
        replace(asked, closed=True),
        replace(asked, content_type="text/html"),
        replace(asked, expiry=Expiry(ttl_s=6)),
        replace(asked, fork=ForkOrder("s", START, 3)),
        replace(asked, fork=ForkOrder("other", START, 2)),
        replace(asked, fork=None),
    ):
        assert not confirms(other, config, closed=False)
    plain = created(NEW, Create("text/plain"), None)
    assert not confirms(Create(), plain, closed=False)
    assert not confirms(Create("text/plain", NEVER), plain, closed=True)


def test_what_objects_tell_each_other_is_unpacked_as_it_was_packed() -> None:
    grant = Grant("text/plain", Expiry(at_ms=5), (Part(ONE, 1), Part(TWO, 3)), b"\x00\xff")
    assert Grant.unpack(grant.pack()) == grant
    for order in (ForkOrder("s"), ForkOrder("s", Offset(0, 3), 4)):
        for content_type in (None, "text/plain"):
            claim = Claim(NEW.hex(), "fork", content_type, order)
            assert Claim.unpack(claim.pack()) == claim
