"""An object's storage: what is one write, what is seen before it is stored, what is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tailrace.ledger.errors import CallerError, Conflict, NotFound, Overloaded, TooLarge
from tailrace.ledger.frame import Durability, Token, encode
from tailrace.ledger.interface import NewStream, Record, StreamKind
from tailrace.ledger.objects.object import ObjectRequest
from tailrace.ledger.objects.storage import (
    MAX_CACHE_BYTES,
    MAX_PENDING_BYTES,
    MAX_VALUE_BYTES,
    ObjectStorage,
    ValueCache,
)
from tests.ledger.next_alarm import next_alarm_ms
from tests.ledger.objects.object_world import KEY, Scripted, World

pytestmark = pytest.mark.anyio

STREAM = bytes(range(16))


async def within(world: World, work: Callable[[ObjectStorage], Awaitable[None]]) -> None:
    """Do `work` as one event of the object."""

    async def script(target: Scripted, request: ObjectRequest) -> bytes:
        await work(target.context.storage)
        return b""

    world.scripts["work"] = script
    await world.ask("work")


async def test_changes_between_two_awaits_are_one_write(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        storage.put("a", b"1")
        storage.put("b", b"2")
        storage.delete("c")
        storage.set_alarm(5_000_000)
        await storage.get("d")  # a real wait: the write begins
        storage.put("a", b"3")

    await within(world, work)
    first, second = world.store.begun
    assert (first.puts, first.deletes) == ({"a": b"1", "b": b"2"}, ["c"])
    assert first.sets_alarm and first.alarm == (5_000_000, 0)
    assert second.puts == {"a": b"3"} and not second.sets_alarm


async def test_an_event_that_changes_nothing_writes_nothing(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        await storage.get("a")
        await storage.list()
        storage.delete_alarm()
        async with storage.transaction():
            pass

    await within(world, work)
    assert world.store.begun == []


async def test_an_object_sees_its_own_changes_at_once(world: World) -> None:
    async def prepare(storage: ObjectStorage) -> None:
        for name in ("a", "b", "c", "d"):
            storage.put(name, b"old")

    async def work(storage: ObjectStorage) -> None:
        storage.put("b", b"new")
        storage.delete("c")
        storage.put("bb", b"more")
        assert await storage.get("b") == b"new"
        assert await storage.get("c") is None
        assert await storage.get_many(["d", "c", "b", "b"]) == {"d": b"old", "b": b"new"}
        assert list(await storage.list()) == ["a", "b", "bb", "d"]
        assert list(await storage.list(limit=2)) == ["a", "b"]
        assert list(await storage.list(limit=2, reverse=True)) == ["d", "bb"]
        assert list(await storage.list(prefix="b")) == ["b", "bb"]
        assert list(await storage.list(start="b", end="d", limit=3)) == ["b", "bb"]
        assert await storage.list(limit=0) == {}
        storage.delete_all()
        assert await storage.list() == {}
        assert await storage.get("a") is None
        storage.put("e", b"after")
        assert await storage.list() == {"e": b"after"}

    await within(world, prepare)
    await within(world, work)
    assert await world.ledger.objects.list(KEY) == {"e": b"after"}


async def test_a_limit_counts_what_is_left_after_the_objects_own_deletes(world: World) -> None:
    async def prepare(storage: ObjectStorage) -> None:
        for name in "abcdef":
            storage.put(name, b"")

    async def work(storage: ObjectStorage) -> None:
        for name in "abf":
            storage.delete(name)
        assert list(await storage.list(limit=2)) == ["c", "d"]
        storage.delete("c")
        assert list(await storage.list(limit=1, reverse=True)) == ["e"]

    await within(world, prepare)
    await within(world, work)


async def test_values_are_read_from_the_store_once(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        storage.put("a", b"1")
        await storage.sync()
        for name in ("a", "absent", "absent", "a"):
            await storage.get(name)

    await within(world, work)
    assert world.store.reads == 1


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    cache = ValueCache()
    size = MAX_CACHE_BYTES // 4
    for name in "abc":
        cache.keep(name, bytes(size))
    cache.find("a")
    cache.keep("d", bytes(size))
    assert [cache.find(name)[0] for name in "abcd"] == [True, False, True, True]
    cache.keep("huge", bytes(MAX_CACHE_BYTES + 1))
    assert not cache.find("huge")[0]


async def test_a_value_of_2_mb_is_stored_and_one_byte_more_names_its_key(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        storage.put("most", bytes(MAX_VALUE_BYTES))
        with pytest.raises(TooLarge, match="'more' of thing 'one' has 2097153 bytes") as caught:
            storage.put("more", bytes(MAX_VALUE_BYTES + 1))
        assert caught.value.field == "more"
        storage.put("n" * 2048, b"")
        with pytest.raises(TooLarge):
            storage.put("n" * 2049, b"")
        with pytest.raises(TooLarge):
            await storage.get("é" * 1025)

    await within(world, work)
    stored = await world.ledger.objects.list(KEY)
    assert {name: len(value) for name, value in stored.items()} == {
        "most": MAX_VALUE_BYTES,
        "n" * 2048: 0,
    }


async def test_names_and_bounds_that_cannot_be_are_refused(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        for name in ("", "\ud800"):
            with pytest.raises(CallerError):
                storage.put(name, b"")
            with pytest.raises(CallerError):
                storage.delete(name)
            with pytest.raises(CallerError):
                await storage.get(name)
        with pytest.raises(CallerError):
            await storage.list(prefix="\udfff")
        with pytest.raises(CallerError):
            await storage.list(limit=-1)
        with pytest.raises(CallerError):
            storage.set_alarm(2**53)

    await within(world, work)
    assert world.store.begun == []


async def test_more_than_may_wait_to_be_stored_is_refused_until_it_is(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        storage.put("0", bytes(MAX_VALUE_BYTES))  # a replaced value does not count
        for number in range(MAX_PENDING_BYTES // MAX_VALUE_BYTES - 1):
            storage.put(str(number), bytes(MAX_VALUE_BYTES))
        with pytest.raises(Overloaded):
            storage.put("more", bytes(MAX_VALUE_BYTES))
        await storage.sync()
        storage.put("more", bytes(MAX_VALUE_BYTES))

    async def transact(storage: ObjectStorage) -> None:
        async with storage.transaction():
            for number in range(MAX_PENDING_BYTES // MAX_VALUE_BYTES - 1):
                storage.put(str(number), bytes(MAX_VALUE_BYTES))
            with pytest.raises(Overloaded):
                storage.put("more", bytes(MAX_VALUE_BYTES))

    await within(world, work)
    await within(world, transact)


async def test_names_are_in_the_order_of_their_bytes(world: World) -> None:
    names = ["a", "~", "é", "\u07ff", "\uffff", "\U0001f600"]

    async def work(storage: ObjectStorage) -> None:
        for name in reversed(names):
            storage.put(name, b"")
            if name == "é":
                await storage.sync()
        assert list(await storage.list()) == names
        assert list(await storage.list(start="~", end="\U0001f600")) == names[1:-1]

    await within(world, work)
    assert names == sorted(names, key=str.encode)


# ---- transactions ----


async def test_a_transaction_is_one_write_over_its_awaits(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        async with storage.transaction():
            storage.put("a", b"1")
            await storage.get("not in the cache")
            storage.delete("b")
            storage.create_stream(new_stream())
            await storage.get("nor this one")
            storage.append(STREAM, 1, 0, record(0))
            assert await storage.get("a") == b"1"

    await within(world, work)
    assert len(world.store.begun) == 1
    assert len(await world.ledger.frames(STREAM, 0, 10)) == 1


async def test_an_exception_in_a_transaction_rolls_back_what_it_changed_and_no_more(
    world: World,
) -> None:
    async def fail(storage: ObjectStorage) -> None:
        async with storage.transaction():
            storage.delete_all()
            storage.put("inside", b"2")
            storage.delete_alarm()
            storage.create_stream(new_stream())
            assert await storage.list() == {"inside": b"2"}
            assert await storage.get("before") is None
            assert storage.get_alarm() is None
            raise ValueError("back")

    async def work(storage: ObjectStorage) -> None:
        storage.put("before", b"1")
        storage.set_alarm(7_000_000)
        with pytest.raises(ValueError, match="back"):
            await fail(storage)
        assert storage.get_alarm() == 7_000_000
        storage.put("after", b"3")
        assert list(await storage.list()) == ["after", "before"]

    await within(world, work)
    assert await world.ledger.objects.list(KEY) == {"before": b"1", "after": b"3"}
    assert await next_alarm_ms(world.ledger.objects) == 7_000_000
    with pytest.raises(NotFound):
        await world.ledger.info(STREAM)


# ---- streams ----


def new_stream(durability: Durability = Durability.PROCESS) -> NewStream:
    return NewStream(STREAM, "", durability, 60.0, kind=StreamKind.OBJECT)


def record(index: int) -> Record:
    return Record(encode(Token("x", index)), ())


async def test_a_stream_is_created_filled_and_dropped_with_values(world: World) -> None:
    async def fill(storage: ObjectStorage) -> None:
        storage.create_stream(new_stream())
        for index in range(3):
            storage.append(STREAM, 1, index, record(index))
        storage.put("next", b"3")

    async def drop(storage: ObjectStorage) -> None:
        storage.drop_stream(STREAM)
        storage.delete("next")

    await within(world, fill)
    assert (await world.ledger.info(STREAM)).next_index == 3
    await within(world, drop)
    with pytest.raises(NotFound):
        await world.ledger.info(STREAM)
    assert len(world.store.begun) == 2


async def test_a_stream_that_was_dropped_does_not_come_back(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        storage.drop_stream(STREAM)
        with pytest.raises(Conflict):
            storage.append(STREAM, 1, 0, record(0))
        async with storage.transaction():
            with pytest.raises(Conflict):
                storage.create_stream(new_stream())

    await within(world, work)


async def test_a_write_is_as_durable_as_the_streams_it_creates(world: World) -> None:
    async def work(storage: ObjectStorage) -> None:
        storage.put("a", b"")
        await storage.sync()
        storage.create_stream(new_stream(Durability.POWER))

    await within(world, work)
    asked = [write.durability for write in world.store.begun]
    assert asked == [Durability.PROCESS, Durability.POWER]
