"""The promises of `tailrace.ledger.interface` for objects, on every backend."""

import asyncio

import pytest

from tailrace.ledger.errors import (
    CallerError,
    Conflict,
    NotFound,
    StaleEpoch,
    TailraceError,
    WrongIndex,
)
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import (
    Alarm,
    Append,
    Ledger,
    ObjectKey,
    ObjectStore,
    ObjectWrite,
    StreamKind,
    ValueRange,
)
from tests.ledger.backends import A, B, Backend, end, indexes, new, opened, token, tokens
from tests.ledger.next_alarm import next_alarm_ms

pytestmark = pytest.mark.anyio

KEY, OTHER = ObjectKey("stream", "one"), ObjectKey("stream", "two")


@pytest.fixture
def objects(ledger: Ledger) -> ObjectStore:
    return ledger.objects


async def written(objects: ObjectStore, key: ObjectKey = KEY, **puts: bytes) -> int:
    """Claim an object and give it values; returns the epoch."""
    epoch = (await objects.claim(key)).epoch
    await objects.write(ObjectWrite(key, epoch, puts=puts))
    return epoch


# ---- values ----


async def test_a_new_object_has_nothing(objects: ObjectStore) -> None:
    assert await objects.get(KEY, ["a"]) == {}
    assert await objects.list(KEY) == {}
    assert (await objects.claim(KEY)).alarm is None
    assert await objects.names("stream") == []


async def test_values_are_read_as_they_were_put(objects: ObjectStore) -> None:
    await written(objects, a=b"1", b=b"", c=bytes(range(256)))
    assert await objects.get(KEY, ["c", "a", "x"]) == {"a": b"1", "c": bytes(range(256))}
    assert await objects.list(KEY) == {"a": b"1", "b": b"", "c": bytes(range(256))}


async def test_a_value_of_two_mebibytes_is_kept(objects: ObjectStore) -> None:
    value = bytes(range(256)) * 8192
    await written(objects, large=value)
    assert await objects.get(KEY, ["large"]) == {"large": value}


async def test_objects_do_not_mix(objects: ObjectStore) -> None:
    await written(objects, KEY, a=b"1")
    await written(objects, OTHER, a=b"2")
    await written(objects, ObjectKey("other", "one"), a=b"3")
    assert await objects.get(KEY, ["a"]) == {"a": b"1"}
    assert await objects.get(OTHER, ["a"]) == {"a": b"2"}


async def test_the_order_of_a_write_is_clear_deletes_puts(objects: ObjectStore) -> None:
    epoch = await written(objects, a=b"1", b=b"2", c=b"3")
    await objects.write(ObjectWrite(KEY, epoch, puts={"a": b"new"}, deletes=["a", "b", "none"]))
    assert await objects.list(KEY) == {"a": b"new", "c": b"3"}
    await objects.write(ObjectWrite(KEY, epoch, puts={"d": b"4"}, clear=True))
    assert await objects.list(KEY) == {"d": b"4"}


async def test_writes_of_one_group_are_stored_in_their_order(objects: ObjectStore) -> None:
    epoch = await written(objects, a=b"0")
    writes = [
        ObjectWrite(KEY, epoch, puts={"a": b"1", "b": b"1"}),
        ObjectWrite(KEY, epoch, clear=True),
        ObjectWrite(KEY, epoch, puts={"a": b"2", "c": b"2"}),
        ObjectWrite(KEY, epoch, deletes=["c"], puts={"d": b"3"}),
    ]
    await asyncio.gather(*map(objects.write, writes))
    assert await objects.list(KEY) == {"a": b"2", "d": b"3"}


async def test_values_are_listed_in_the_order_of_their_bytes(objects: ObjectStore) -> None:
    names = ["", "Z", "a", "a\x00", "ab", "b", "é", "\ud7ff", "\ue000", "𝄞"]
    await written(objects)
    epoch = (await objects.claim(KEY)).epoch
    await objects.write(ObjectWrite(KEY, epoch, puts={name: name.encode() for name in names}))
    assert list(await objects.list(KEY)) == names
    assert list(await objects.list(KEY, ValueRange(reverse=True))) == names[::-1]
    assert list(await objects.list(KEY, ValueRange(limit=2))) == names[:2]
    assert list(await objects.list(KEY, ValueRange(limit=2, reverse=True))) == names[:-3:-1]
    assert list(await objects.list(KEY, ValueRange(start="a", end="b"))) == ["a", "a\x00", "ab"]
    assert list(await objects.list(KEY, ValueRange(prefix="a"))) == ["a", "a\x00", "ab"]
    assert list(await objects.list(KEY, ValueRange(prefix="a", start="a\x00"))) == ["a\x00", "ab"]
    assert list(await objects.list(KEY, ValueRange(prefix="a", end="ab"))) == ["a", "a\x00"]
    assert list(await objects.list(KEY, ValueRange(prefix="\ud7ff"))) == ["\ud7ff"]
    assert list(await objects.list(KEY, ValueRange(prefix="𝄞"))) == ["𝄞"]
    assert await objects.list(KEY, ValueRange(start="b", end="a")) == {}
    assert await objects.list(KEY, ValueRange(end="")) == {}
    assert await objects.list(KEY, ValueRange(limit=0)) == {}


async def test_names_of_objects_come_in_order_and_in_pages(objects: ObjectStore) -> None:
    for name in ("b", "a", "é", "c"):
        await written(objects, ObjectKey("stream", name), v=b"1")
    await written(objects, ObjectKey("other", "x"), v=b"1")
    await objects.claim(ObjectKey("stream", "empty"))
    assert await objects.names("stream") == ["a", "b", "c", "é"]
    assert await objects.names("stream", after="a", limit=2) == ["b", "c"]
    assert await objects.names("none") == []


async def test_an_object_without_values_and_alarm_is_not_named(objects: ObjectStore) -> None:
    epoch = await written(objects, a=b"1")
    await objects.write(ObjectWrite(KEY, epoch, clear=True))
    assert await objects.names("stream") == []
    await objects.write(ObjectWrite(KEY, epoch, alarm=Alarm(5), sets_alarm=True))
    assert await objects.names("stream") == ["one"]


# ---- owners ----


async def test_a_claim_fences_the_owner_before(objects: ObjectStore) -> None:
    old = await written(objects, a=b"1")
    state = await objects.claim(KEY)
    assert state.epoch > old
    assert await objects.owns(KEY, state.epoch)
    assert not await objects.owns(KEY, old)
    with pytest.raises(StaleEpoch):
        await objects.write(ObjectWrite(KEY, old, puts={"a": b"2"}))
    await objects.write(ObjectWrite(KEY, state.epoch, puts={"b": b"3"}))
    assert await objects.list(KEY) == {"a": b"1", "b": b"3"}


async def test_an_object_that_nobody_claimed_takes_no_writes(objects: ObjectStore) -> None:
    with pytest.raises(StaleEpoch):
        await objects.write(ObjectWrite(KEY, 1, puts={"a": b"2"}))


async def test_after_a_restart_objects_are_there_and_old_owners_are_fenced(
    backend: Backend,
) -> None:
    async with opened(backend) as ledger:
        old = await written(ledger.objects, a=b"1")
        write = ObjectWrite(KEY, old, alarm=Alarm(77, 3), sets_alarm=True)
        await ledger.objects.write(write)
    async with opened(backend) as ledger:
        assert await ledger.objects.get(KEY, ["a"]) == {"a": b"1"}
        state = await ledger.objects.claim(KEY)
        assert state.epoch > old
        assert state.alarm == Alarm(77, 3)
        with pytest.raises(StaleEpoch):
            await ledger.objects.write(ObjectWrite(KEY, old, puts={"a": b"2"}))


# ---- alarms ----


async def test_alarms_are_due_in_order(objects: ObjectStore) -> None:
    keys = [ObjectKey("stream", name) for name in "abc"]
    for key, at_ms in zip(keys, (30, 10, 20), strict=True):
        epoch = (await objects.claim(key)).epoch
        await objects.write(ObjectWrite(key, epoch, alarm=Alarm(at_ms), sets_alarm=True))
    assert await objects.due(9, 10) == []
    assert await objects.due(20, 10) == [(keys[1], Alarm(10)), (keys[2], Alarm(20))]
    assert await objects.due(100, 2) == [(keys[1], Alarm(10)), (keys[2], Alarm(20))]


async def test_an_alarm_is_replaced_kept_and_removed(objects: ObjectStore) -> None:
    epoch = await written(objects)
    await objects.write(ObjectWrite(KEY, epoch, alarm=Alarm(10), sets_alarm=True))
    await objects.write(ObjectWrite(KEY, epoch, alarm=Alarm(20, 4), sets_alarm=True))
    assert await objects.due(100, 10) == [(KEY, Alarm(20, 4))]
    await objects.write(ObjectWrite(KEY, epoch, puts={"a": b"1"}))
    assert await objects.due(100, 10) == [(KEY, Alarm(20, 4))]
    await objects.write(ObjectWrite(KEY, epoch, sets_alarm=True))
    assert await objects.due(100, 10) == []


# ---- streams ----


async def test_a_write_creates_appends_and_puts_as_one(ledger: Ledger) -> None:
    epoch = await written(ledger.objects)
    await ledger.objects.write(
        ObjectWrite(
            KEY,
            epoch,
            puts={"at": b"2"},
            creates=[new(A, kind=StreamKind.OBJECT)],
            appends=tokens(A, [0, 1]),
        )
    )
    info = await ledger.info(A)
    assert (info.kind, info.epoch, info.next_index) == (StreamKind.OBJECT, 1, 2)
    assert indexes(await ledger.read(A, 0, 10)) == [0, 1]
    await ledger.objects.write(ObjectWrite(KEY, epoch, appends=[Append(A, 1, 2, end(2))]))
    assert (await ledger.info(A)).ended


async def test_appends_of_an_object_wake_watchers(ledger: Ledger) -> None:
    epoch = await written(ledger.objects)
    await ledger.objects.write(ObjectWrite(KEY, epoch, creates=[new(A, kind=StreamKind.OBJECT)]))
    await ledger.info(A)
    woken: list[int] = []

    def wake() -> None:
        woken.append(ledger.tail(A).released)

    ledger.watch(A, wake)
    await ledger.objects.write(ObjectWrite(KEY, epoch, appends=tokens(A, [0, 1])))
    assert woken[-1] == 2
    ledger.unwatch(A, wake)


@pytest.mark.parametrize(
    ("append", "error"),
    [
        (Append(A, 1, 5, token(5)), WrongIndex),
        (Append(A, 9, 1, token(1)), StaleEpoch),
        (Append(B, 1, 0, token(0)), NotFound),
    ],
    ids=["gap", "epoch", "unknown"],
)
async def test_a_refused_append_refuses_the_whole_write(
    ledger: Ledger, append: Append, error: type[TailraceError]
) -> None:
    epoch = await written(ledger.objects, a=b"1")
    await ledger.objects.write(
        ObjectWrite(KEY, epoch, creates=[new(A, kind=StreamKind.OBJECT)], appends=tokens(A, [0]))
    )
    fresh = bytes([9]) * 16
    with pytest.raises(error):
        await ledger.objects.write(
            ObjectWrite(
                KEY,
                epoch,
                puts={"a": b"2"},
                alarm=Alarm(5),
                sets_alarm=True,
                creates=[new(fresh, kind=StreamKind.OBJECT)],
                appends=[*tokens(A, [1]), *tokens(fresh, [0]), append],
            )
        )
    assert await ledger.objects.list(KEY) == {"a": b"1"}
    assert await next_alarm_ms(ledger.objects) is None
    assert indexes(await ledger.read(A, 0, 10)) == [0]
    with pytest.raises(NotFound):
        await ledger.info(fresh)
    await ledger.objects.write(ObjectWrite(KEY, epoch, appends=tokens(A, [1])))


async def test_a_refused_write_does_not_refuse_its_neighbours(ledger: Ledger) -> None:
    mine, theirs = await written(ledger.objects, KEY), await written(ledger.objects, OTHER)
    await ledger.create(new(B))
    done = await asyncio.gather(
        ledger.objects.write(ObjectWrite(KEY, mine, puts={"a": b"1"})),
        ledger.objects.write(ObjectWrite(OTHER, theirs - 1, puts={"a": b"2"})),
        ledger.append(tokens(B, [0])),
        ledger.objects.write(ObjectWrite(KEY, mine, puts={"b": b"3"})),
        return_exceptions=True,
    )
    assert [type(result) for result in done] == [type(None), StaleEpoch, list, type(None)]
    assert await ledger.objects.list(KEY) == {"a": b"1", "b": b"3"}
    assert await ledger.objects.list(OTHER) == {}
    assert indexes(await ledger.read(B, 0, 10)) == [0]


async def test_a_stream_id_is_not_given_to_objects_twice(ledger: Ledger) -> None:
    epoch = await written(ledger.objects)
    creates = [new(A, kind=StreamKind.OBJECT)]
    first = ObjectWrite(KEY, epoch, puts={"a": b"1"}, creates=creates)
    twice = ObjectWrite(KEY, epoch, puts={"a": b"2"}, creates=creates, appends=tokens(A, [0]))
    after = ObjectWrite(KEY, epoch, appends=tokens(A, [0]))
    done = await asyncio.gather(
        *map(ledger.objects.write, (first, twice, after)), return_exceptions=True
    )
    assert [type(result) for result in done] == [type(None), Conflict, type(None)]
    assert await ledger.objects.get(KEY, ["a"]) == {"a": b"1"}
    assert indexes(await ledger.read(A, 0, 10)) == [0]


async def test_nothing_follows_the_end_of_an_objects_stream(ledger: Ledger) -> None:
    epoch = await written(ledger.objects)
    creates = [new(A, kind=StreamKind.OBJECT)]
    appends = [Append(A, 1, 0, end(0))]
    await ledger.objects.write(ObjectWrite(KEY, epoch, creates=creates, appends=appends))
    with pytest.raises(Conflict):
        await ledger.objects.write(ObjectWrite(KEY, epoch, appends=tokens(A, [1])))


async def test_a_dropped_stream_is_gone_and_one_that_is_not_there_is_no_matter(
    ledger: Ledger,
) -> None:
    epoch = await written(ledger.objects)
    creates = [new(A, kind=StreamKind.OBJECT)]
    await ledger.objects.write(
        ObjectWrite(KEY, epoch, creates=creates, appends=tokens(A, range(5)))
    )
    await ledger.objects.write(ObjectWrite(KEY, epoch, puts={"a": b"1"}, drops=[A, B]))
    with pytest.raises(NotFound):
        await ledger.read(A, 0, 10)
    assert await ledger.objects.get(KEY, ["a"]) == {"a": b"1"}


async def test_an_object_may_not_create_a_generation(ledger: Ledger) -> None:
    epoch = await written(ledger.objects)
    with pytest.raises(CallerError):
        await ledger.objects.write(ObjectWrite(KEY, epoch, creates=[new(A)]))


async def test_an_objects_stream_has_no_retention_of_its_own(
    ledger: Ledger, backend: Backend
) -> None:
    epoch = await written(ledger.objects)
    creates = [new(A, kind=StreamKind.OBJECT)]
    appends = [Append(A, 1, 0, end(0))]
    await ledger.objects.write(ObjectWrite(KEY, epoch, creates=creates, appends=appends))
    backend.clock.now += 10**9
    assert await ledger.expire() == 0
    assert await ledger.read(A, 0, 10) == [end(0)]
    assert await ledger.unfinished() == []


@pytest.mark.parametrize("durability", list(Durability))
async def test_what_was_written_is_there_after_a_restart(
    backend: Backend, durability: Durability
) -> None:
    async with opened(backend) as ledger:
        epoch = await written(ledger.objects)
        creates = [new(A, durability, kind=StreamKind.OBJECT)]
        await ledger.objects.write(ObjectWrite(KEY, epoch, creates=creates, durability=durability))
        for index in range(50):
            await ledger.objects.write(
                ObjectWrite(
                    KEY,
                    epoch,
                    puts={"at": str(index).encode()},
                    appends=tokens(A, [index]),
                    durability=durability,
                )
            )
    async with opened(backend) as ledger:
        assert await ledger.objects.get(KEY, ["at"]) == {"at": b"49"}
        assert indexes(await ledger.read(A, 0, 100)) == list(range(50))
