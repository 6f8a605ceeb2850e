"""Forks of streams."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError, Conflict, LedgerFailed
from tailrace.ledger.interface import Ledger
from tailrace.ledger.objects.object import (
    ObjectContext,
    ObjectFactory,
    ObjectRequest,
    ObjectResponse,
)
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.streams.chunks import CHUNK_BYTES, chunks, piece
from tailrace.origin.streams.config import Create, ForkOrder, Part, StreamConfig, packed
from tailrace.origin.streams.expiry import NEVER, Expiry
from tailrace.origin.streams.fork import (
    GIVE_BACK,
    MAX_DEPTH,
    RETRY_MS,
    TAKE,
    Cut,
    Cutter,
    ForkRequest,
    Grant,
    confirms,
    created,
    inherited,
)
from tailrace.origin.streams.json_messages import join_json
from tailrace.origin.streams.object import StreamObject, stream_class
from tailrace.origin.streams.offsets import START, Offset
from tailrace.origin.streams.page import Tip
from tailrace.origin.streams.settings import StreamSettings
from tests.ledger.next_alarm import next_alarm_ms
from tests.ledger.objects.object_world import crashed
from tests.origin.streams.stream_world import ROOT, ZERO, StreamWorld, done, streams_at

ONE, TWO, NEW = bytes(16), bytes([2]) * 16, bytes([9]) * 16
messages_of = st.lists(
    st.binary(min_size=1, max_size=4) | st.integers(1, 3 * CHUNK_BYTES).map(bytes), max_size=5
)

pytestmark = pytest.mark.anyio


def frames_of(messages: Sequence[bytes]) -> list[bytes]:
    return [record.frame for record in chunks(messages, 0)]


def cut(frames: list[bytes], order: ForkOrder, *, json: bool = False) -> Cut:
    cutter = Cutter(order, Tip(len(frames), closed=False), json=json)
    if cutter.cut is None:
        done(cutter.feed(frames[cutter.first_index :]))
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
    # The inherited part ends with a whole message, so that an append cannot extend one.
    assert place.end == 0 or piece(frames[place.end - 1]).last or place.head
    assert len(place.head) <= CHUNK_BYTES
    with pytest.raises(CallerError):
        cut(frames, ForkOrder("s", Offset(index), room + 1))


values = st.sampled_from([b"1", b'"x,y"', b'{"a": [1, 2]}', b"[[]]", b'"' + b"x" * 70_000 + b'"'])


@given(st.lists(st.lists(values, min_size=1, max_size=4), max_size=4), st.data())
def test_a_fork_of_json_counts_values(messages: list[list[bytes]], data: st.DataObject) -> None:
    written = [b" ,".join(message) for message in messages]
    frames = frames_of(written)
    first = data.draw(st.integers(0, len(messages)))
    index = len(frames_of(written[:first]))
    room = sum(map(len, messages[first:]))
    sub_offset = data.draw(st.integers(0, room))
    place = cut(frames, ForkOrder("s", Offset(index), sub_offset), json=True)
    kept = [value for message in messages[:first] for value in message]
    kept += [value for message in messages[first:] for value in message][:sub_offset]
    inherited_messages, pieces = list[bytes](), b""
    for raw in frames[: place.end]:
        pieces += piece(raw).data
        if piece(raw).last:
            inherited_messages, pieces = [*inherited_messages, pieces], b""
    assert not pieces, "what it inherits ends with a message"
    head = [place.head] if place.head else []
    shown = json.loads(join_json([*inherited_messages, *head]))
    assert shown == [json.loads(value) for value in kept]
    with pytest.raises(CallerError):
        cut(frames, ForkOrder("s", Offset(index), room + 1), json=True)


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
    source = StreamConfig(TWO, "text/plain", Create(), parts=(Part(ONE, 3),))
    assert inherited(source, 5) == (Part(ONE, 3), Part(TWO, 5))
    assert inherited(source, 3) == (Part(ONE, 3),)
    assert inherited(source, 2) == (Part(ONE, 2),)
    assert inherited(source, 0) == ()


def test_forks_of_forks_are_not_endless() -> None:
    parts = tuple(Part(bytes([at]) * 16, at + 1) for at in range(MAX_DEPTH - 1))
    source = StreamConfig(NEW, "text/plain", Create(), parts=parts)
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
    assert Grant.unpack(packed(grant)) == grant
    for order in (ForkOrder("s"), ForkOrder("s", Offset(0, 3), 4)):
        for content_type in (None, "text/plain"):
            claim = ForkRequest(NEW.hex(), "fork", content_type, order)
            assert ForkRequest.unpack(packed(claim)) == claim


async def fork(world: StreamWorld, name: str, source: str, **headers: str) -> ObjectResponse:
    return await world.ask("PUT", name, b"", stream_forked_from=f"{ROOT}{source}", **headers)


async def test_offsets_of_the_source_are_offsets_of_the_fork(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("s", b"one")
        middle = (await world.post("s", b"two")).header("stream-next-offset")
        await world.post("s", b"three")
        await fork(world, "f", "s", stream_fork_offset=middle or "")
        await world.post("f", b"four")
        assert await world.text("f") == b"onetwofour"
        assert await world.text("f", f"?offset={middle}") == b"four"
        assert await world.text("s") == b"onetwothree"


async def test_a_fork_is_readable_after_a_restart_and_its_source_is_gone(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("s", b"abc")
        await fork(world, "f", "s", stream_fork_offset=ZERO, stream_fork_sub_offset="2")
        await world.post("f", b"!")
        assert (await world.ask("DELETE", "s")).status == 204
    async with streams_at(tmp_path) as world:
        assert await world.text("f") == b"ab!"
        assert [await world.status("s", m) for m in ("GET", "DELETE", "PUT")] == [410, 410, 409]
        assert (await fork(world, "g", "s")).status == 409
        assert (await world.ask("DELETE", "f")).status == 204
        await world.becomes("s", 404)
        assert (await world.put("s", b"new")).status == 201
        assert await world.text("s") == b"new"


async def test_what_a_chain_of_forks_held_goes_with_the_last(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        names = ["a", "b", "c", "d"]
        await world.put("a", b"0")
        for source, name in pairwise(names):
            await fork(world, name, source)
            await world.post(name, name.encode())
        assert await world.text("d") == b"0bcd"
        for name in names:
            await world.ask("DELETE", name)
        for name in reversed(names):
            await world.becomes(name, 404)
        await world.is_empty()


async def test_an_expired_fork_lets_its_source_go(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("s", b"x")
        await fork(world, "f", "s", stream_ttl="1")
        await world.ask("DELETE", "s")
        assert await world.status("s") == 410
        world.clock.move_to(world.clock.now + 1_000)
        await world.becomes("s", 404)


async def test_a_fork_outlives_its_expired_source(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("s", b"x", stream_ttl="1")
        await fork(world, "f", "s", stream_ttl="60")
        world.clock.move_to(world.clock.now + 1_000)
        assert await world.status("s") == 410
        assert await world.text("f") == b"x"


async def test_a_refused_fork_holds_nothing(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("s", b"x")
        await world.put("empty")
        refusals = [
            await fork(world, "f", "s", content_type="text/html"),
            await fork(world, "f", "s", stream_fork_offset="9" * 16 + "_" + "0" * 16),
            await fork(world, "f", "s", stream_fork_offset=ZERO, stream_fork_sub_offset="2"),
            await fork(world, "f", "s", stream_fork_sub_offset="1"),
            await fork(world, "f", "empty", stream_fork_offset=ZERO, stream_fork_sub_offset="1"),
            await fork(world, "f", "none"),
            await fork(world, "f", "f"),
        ]
        assert [refusal.status for refusal in refusals] == [409, 400, 400, 400, 400, 404, 404]
        await world.ask("DELETE", "s")
        assert await world.status("s") == 404


async def test_a_fork_whose_own_body_is_refused_gives_the_reference_back(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("s", b"[1]", content_type="application/json")
        source = f"{ROOT}s"
        refused = await world.ask("PUT", "f", b"{", stream_forked_from=source)
        assert refused.status == 400
        await world.ask("DELETE", "s")
        await world.becomes("s", 404)


async def test_two_who_create_the_same_fork_create_it_once(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("s", b"x")
        made = await asyncio.gather(*(fork(world, "f", "s") for _ in range(5)))
        assert sorted(answer.status for answer in made) == [200, 200, 200, 200, 201]
        await world.ask("DELETE", "f")
        await world.ask("DELETE", "s")
        await world.becomes("s", 404)


async def test_forks_that_are_made_while_their_source_goes_are_whole_or_not_there(
    tmp_path: Path,
) -> None:
    async with streams_at(tmp_path) as world:
        for round_ in range(8):
            source, names = f"s{round_}", [f"f{round_}-{at}" for at in range(4)]
            await world.put(source, b"x")
            made = await asyncio.gather(
                *(fork(world, name, source) for name in names[:2]),
                world.ask("DELETE", source),
                *(fork(world, name, source) for name in names[2:]),
            )
            kept = [
                name
                for name, answer in zip(names, made[:2] + made[3:], strict=True)
                if answer.status == 201
            ]
            for name in kept:
                assert await world.text(name) == b"x"
                await world.ask("DELETE", name)
            await world.becomes(source, 404)


async def test_a_fork_keeps_its_reference_for_good(tmp_path: Path) -> None:
    async with streams_at(tmp_path) as world:
        await world.put("s", b"x")
        await fork(world, "f", "s")
        alarm = await next_alarm_ms(world.ledger.objects)
        assert alarm is not None
        world.clock.move_to(alarm)
        while await next_alarm_ms(world.ledger.objects) is not None:
            await world.clock.parks.get()
        await world.ask("DELETE", "s")
        assert [await world.status("s"), await world.text("f")] == [410, b"x"]


class SlowLedger:
    """A ledger from which frames come only when they are let through."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self.asked, self.let_through = asyncio.Event(), asyncio.Event()

    async def frames(self, stream: bytes, start: int, limit: int) -> list[bytes]:
        frames = await self._ledger.frames(stream, start, limit)
        self.asked.set()
        await self.let_through.wait()
        return frames

    def __getattr__(self, name: str) -> object:
        return getattr(self._ledger, name)


@pytest.mark.parametrize("created_anew", [False, True])
async def test_a_source_that_goes_while_it_is_being_read_is_not_forked(
    tmp_path: Path, created_anew: bool
) -> None:
    slow: list[SlowLedger] = []

    def seen_as(ledger: SqliteLedger) -> Ledger:
        slow.append(SlowLedger(ledger))
        return cast(Ledger, slow[0])

    async with streams_at(tmp_path, seen_as=seen_as) as world:
        await world.put("s", b"x")
        making = asyncio.create_task(fork(world, "f", "s"))
        await slow[0].asked.wait()
        await world.ask("DELETE", "s")
        if created_anew:
            await world.put("s", b"another")
        slow[0].let_through.set()
        assert (await making).status == 404
        await world.ask("DELETE", "s")
        assert await world.status("s") == 404


def stalled(operation: str, reached: asyncio.Event, go_on: asyncio.Event) -> type[StreamObject]:
    class Stalled(StreamObject):
        """Does what it is asked, and then does not say so."""

        async def fetch(self, request: ObjectRequest) -> ObjectResponse:
            answer = await super().fetch(request)
            if request.operation == operation:
                reached.set()
                await self.context.outside(go_on.wait())
            return answer

    return Stalled


async def test_the_alarm_lets_a_fork_be_that_is_being_made(tmp_path: Path) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    kind = stalled(TAKE, reached, go_on)

    def factory(settings: StreamSettings) -> ObjectFactory:
        return replace(stream_class(settings), make=lambda context: kind(context, settings))

    async with streams_at(tmp_path, factory=factory) as world:
        await world.put("s", b"x")
        making = asyncio.create_task(fork(world, "f", "s"))
        await reached.wait()
        world.clock.move_to(world.clock.now + RETRY_MS)
        while await next_alarm_ms(world.ledger.objects) != world.clock.now + RETRY_MS:
            await world.clock.parks.get()
        go_on.set()
        assert (await making).status == 201
        await world.ask("DELETE", "s")
        assert [await world.status("s"), await world.text("f")] == [410, b"x"]


@pytest.mark.parametrize("operation", [TAKE, GIVE_BACK])
async def test_a_crash_between_a_source_and_its_fork_leaks_no_reference(
    tmp_path: Path, operation: str
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()
    kind = stalled(operation, reached, go_on)

    def factory(settings: StreamSettings) -> ObjectFactory:
        return replace(stream_class(settings), make=lambda context: kind(context, settings))

    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    async with streams_at(before, factory=factory) as world:
        await world.put("s", b"x")
        making = asyncio.create_task(fork(world, "f", "s"))
        if operation == GIVE_BACK:
            await making
            await world.ask("DELETE", "f")
        await reached.wait()
        crashed(before, after)
        go_on.set()
        await making
    async with streams_at(after, now_ms=world.clock.now) as world:
        assert await world.status("f") == 404
        await world.ask("DELETE", "s")
        world.clock.move_to(world.clock.now + RETRY_MS)
        await world.becomes("s", 404)


async def test_a_reference_that_cannot_be_given_back_now_is_given_back_later(
    tmp_path: Path,
) -> None:
    broken = asyncio.Event()
    broken.set()

    class Unwilling(StreamObject):
        async def fetch(self, request: ObjectRequest) -> ObjectResponse:
            if request.operation == GIVE_BACK and broken.is_set():
                raise LedgerFailed("not now")
            return await super().fetch(request)

    def factory(settings: StreamSettings) -> ObjectFactory:
        def make(context: ObjectContext) -> StreamObject:
            return Unwilling(context, settings)

        return make

    async with streams_at(tmp_path, factory=factory) as world:
        await world.put("s", b"x")
        await fork(world, "f", "s")
        await world.ask("DELETE", "s")
        await world.ask("DELETE", "f")
        while await next_alarm_ms(world.ledger.objects) != world.clock.now + RETRY_MS:
            await world.clock.parks.get()
        broken.clear()
        assert await world.status("s") == 410
        world.clock.move_to(world.clock.now + RETRY_MS)
        await world.becomes("s", 404)
