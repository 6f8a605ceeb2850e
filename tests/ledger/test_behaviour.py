"""The promises of `tailrace.ledger.interface`, on every backend."""

import asyncio
import math
from dataclasses import replace

import pytest

from tailrace.ledger.errors import CallerError, Conflict, NotFound, StaleEpoch, WrongIndex
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import MAX_TTL_S, Append, Appends, Ledger, Record, StreamKind
from tests.ledger.backends import (
    A,
    B,
    Backend,
    C,
    end,
    everything,
    finish,
    indexes,
    new,
    opened,
    refusals,
    token,
    tokens,
)

pytestmark = pytest.mark.anyio


# ---- create ----


async def test_a_new_stream_is_at_epoch_1_and_empty(ledger: Ledger, backend: Backend) -> None:
    info, created = await ledger.create(new(durability=Durability.POWER))
    assert created
    assert info == await ledger.info(A)
    assert (info.stream, info.epoch, info.next_index, info.ended) == (A, 1, 0, False)
    assert info.durability is Durability.POWER
    assert info.recipe == '{"prompt_ids":[1,2]}'
    assert info.created_ms == backend.clock.now
    assert info.kind is StreamKind.GENERATION
    assert await ledger.read(A, 0, 10) == []
    assert await ledger.frames(A, 0, 10) == []


async def test_the_same_key_and_request_give_the_first_stream(ledger: Ledger) -> None:
    await ledger.create(new(A, key="k", request_hash=b"h"))
    await ledger.append(tokens(A, range(3)))
    info, created = await ledger.create(new(B, key="k", request_hash=b"h"))
    assert (info.stream, info.next_index, created) == (A, 3, False)
    with pytest.raises(NotFound):
        await ledger.info(B)


async def test_the_same_key_with_another_request_is_a_conflict(ledger: Ledger) -> None:
    await ledger.create(new(A, key="k", request_hash=b"h"))
    with pytest.raises(Conflict, match="key"):
        await ledger.create(new(B, key="k", request_hash=b"other"))


async def test_a_stream_is_found_by_the_key_and_the_request_that_made_it(ledger: Ledger) -> None:
    assert await ledger.made_by("k", b"h") is None
    made, _ = await ledger.create(new(A, key="k", request_hash=b"h"))
    assert await ledger.made_by("k", b"h") == made
    with pytest.raises(Conflict, match="key"):
        await ledger.made_by("k", b"other")


async def test_creates_with_one_key_at_once_make_one_stream(ledger: Ledger) -> None:
    made = await asyncio.gather(
        *(ledger.create(new(bytes([n]) * 16, key="k", request_hash=b"h")) for n in range(8))
    )
    assert sum(created for _, created in made) == 1
    assert len({info.stream for info, _ in made}) == 1


async def test_a_stream_id_is_not_given_twice(ledger: Ledger) -> None:
    await ledger.create(new(A))
    with pytest.raises(Conflict, match="taken"):
        await ledger.create(new(A))


async def test_streams_are_created_together_or_not_at_all(ledger: Ledger) -> None:
    info, created = await ledger.create(new(A, key="k"), new(B), new(C))
    assert (info.stream, created) == (A, True)
    assert [(await ledger.info(s)).next_index for s in (A, B, C)] == [0, 0, 0]
    others = [bytes([n]) * 16 for n in (7, 8, 9)]
    for taken in ((others[0], others[1], B), (A, *others), (others[0], others[1], others[1])):
        with pytest.raises(Conflict, match="taken"):
            await ledger.create(*map(new, taken))
    again, created = await ledger.create(new(others[0], key="k"), *map(new, others[1:]))
    assert (again.stream, created) == (A, False)
    for stream in others:
        with pytest.raises(NotFound):
            await ledger.info(stream)


@pytest.mark.parametrize("ttl_s", [1e17, -1.0, math.nan, math.inf])
def test_a_stream_is_kept_for_a_time_that_there_is(ttl_s: float) -> None:
    with pytest.raises(CallerError, match="is not a valid time to live") as error:
        new(ttl_s=ttl_s)
    assert error.value.field == "ttl_s"


async def test_a_stream_may_be_kept_for_a_hundred_years(ledger: Ledger) -> None:
    await ledger.create(new(ttl_s=MAX_TTL_S))
    await finish(ledger, A, 1)
    assert await ledger.expire() == 0


async def test_nobody_watches_a_stream_that_there_is_not(ledger: Ledger) -> None:
    with pytest.raises(NotFound):
        ledger.watch(A, lambda: None)


async def test_a_recipe_is_kept_whatever_its_characters(ledger: Ledger) -> None:
    recipe = '{"text":"é\\u0000 ☃ 𝄞"}'
    await ledger.create(replace(new(), recipe=recipe))
    assert (await ledger.info(A)).recipe == recipe


# ---- append ----


async def test_what_was_appended_is_read_from_any_index(ledger: Ledger) -> None:
    await ledger.create(new())
    assert await ledger.append(tokens(A, range(50))) == []
    for start in (0, 1, 17, 49):
        assert await ledger.read(A, start, 1000) == [token(i) for i in range(start, 50)]
        assert await ledger.frames(A, start, 1000) == [token(i).frame for i in range(start, 50)]
    assert await ledger.read(A, 10, 3) == [token(10), token(11), token(12)]
    assert await ledger.frames(A, 10, 3) == [token(i).frame for i in (10, 11, 12)]
    assert await ledger.read(A, 50, 10) == []
    assert await ledger.frames(A, 50, 10) == []


async def test_ids_are_kept_beside_the_frames_and_never_in_them(ledger: Ledger) -> None:
    await ledger.create(new())
    ids = [(), (0,), (127, 128), (151_935,), tuple(range(300)), (2**32 - 1,)]
    records = [Record(token(index).frame, some) for index, some in enumerate(ids)]
    await ledger.append([Append(A, 1, index, record) for index, record in enumerate(records)])
    assert await ledger.read(A, 0, 10) == records


async def test_streams_do_not_mix(ledger: Ledger) -> None:
    for stream in (A, B, C):
        await ledger.create(new(stream))
    texts = {A: " a", B: " b", C: " c"}
    for index in range(20):
        await ledger.append(
            [Append(stream, 1, index, token(index, text)) for stream, text in texts.items()]
        )
    for stream, text in texts.items():
        assert await ledger.read(stream, 0, 100) == [token(i, text) for i in range(20)]


async def test_large_frames_and_many_frames_come_back(ledger: Ledger) -> None:
    await ledger.create(new())
    records = [token(index, "x" * (60_000 if index % 50 == 0 else 5)) for index in range(300)]
    await ledger.append([Append(A, 1, index, record) for index, record in enumerate(records)])
    assert await everything(ledger, A) == records


async def test_an_empty_batch_is_nothing(ledger: Ledger) -> None:
    assert await ledger.append([]) == []


async def test_a_wrong_index_is_refused_and_the_rest_is_stored(ledger: Ledger) -> None:
    await ledger.create(new(A))
    await ledger.create(new(B))
    gap, twice = tokens(A, [5]), tokens(A, [0])
    await ledger.append(tokens(A, [0]))
    assert await refusals(ledger, *gap, *tokens(A, [1]), *twice, *tokens(B, [0])) == [
        (gap[0], WrongIndex),
        (twice[0], WrongIndex),
    ]
    assert indexes(await ledger.read(A, 0, 10)) == [0, 1]
    assert indexes(await ledger.read(B, 0, 10)) == [0]


async def test_columns_are_appended_as_rows_are(ledger: Ledger) -> None:
    for stream in (A, B):
        await ledger.create(new(stream))
    rows = [*tokens(A, [0]), *tokens(B, [5]), *tokens(C, [0]), *tokens(A, [1, 2]), *tokens(B, [0])]
    refused = await ledger.append(Appends.of(rows))
    assert [(r.append, type(r.error)) for r in refused] == [
        (rows[1], WrongIndex),
        (rows[2], NotFound),
    ]
    assert await ledger.read(A, 0, 9) == [row.record for row in tokens(A, range(3))]
    assert await ledger.read(B, 0, 9) == [token(0)]


async def test_what_follows_a_gap_is_refused_too(ledger: Ledger) -> None:
    await ledger.create(new(A))
    batch = tokens(A, [0, 1, 3, 4])
    assert [refused.append.index for refused in await ledger.append(batch)] == [3, 4]
    assert indexes(await ledger.read(A, 0, 10)) == [0, 1]


async def test_nothing_follows_the_end(ledger: Ledger) -> None:
    await ledger.create(new(A))
    await finish(ledger, A, 3)
    late = tokens(A, [4])
    assert await refusals(ledger, *late) == [(late[0], Conflict)]
    info = await ledger.info(A)
    assert (info.next_index, info.ended) == (4, True)


async def test_nothing_follows_the_end_in_one_batch(ledger: Ledger) -> None:
    await ledger.create(new(A))
    late = Append(A, 1, 1, token(1))
    assert await refusals(ledger, Append(A, 1, 0, end(0)), late) == [(late, Conflict)]
    assert await ledger.read(A, 0, 10) == [end(0)]


async def test_an_append_to_an_unknown_stream_is_refused_and_the_rest_is_stored(
    ledger: Ledger,
) -> None:
    await ledger.create(new(A))
    unknown = tokens(B, [0])
    assert await refusals(ledger, *unknown, *tokens(A, [0])) == [(unknown[0], NotFound)]
    assert indexes(await ledger.read(A, 0, 10)) == [0]


async def test_appends_of_many_producers_at_once_are_all_stored_in_order(ledger: Ledger) -> None:
    streams = [bytes([n]) * 16 for n in range(16)]
    for stream in streams:
        await ledger.create(new(stream))

    async def produce(stream: bytes) -> None:
        for index in range(20):
            assert await ledger.append(tokens(stream, [index])) == []

    await asyncio.gather(*map(produce, streams))
    for stream in streams:
        assert indexes(await ledger.read(stream, 0, 100)) == list(range(20))


async def test_appends_without_waiting_keep_their_order(ledger: Ledger) -> None:
    await ledger.create(new())
    under_way = [asyncio.ensure_future(ledger.append(tokens(A, [index]))) for index in range(50)]
    assert await asyncio.gather(*under_way) == [[]] * 50
    assert indexes(await ledger.read(A, 0, 100)) == list(range(50))


async def test_a_cancelled_producer_does_not_cancel_its_neighbours(ledger: Ledger) -> None:
    await ledger.create(new(A))
    await ledger.create(new(B))
    leaving = asyncio.ensure_future(ledger.append(tokens(A, [0])))
    staying = asyncio.ensure_future(ledger.append(tokens(B, [0])))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == []
    assert indexes(await ledger.read(B, 0, 10)) == [0]


@pytest.mark.parametrize("durability", list(Durability))
async def test_everything_is_there_after_a_restart(
    backend: Backend, durability: Durability
) -> None:
    async with opened(backend) as ledger:
        await ledger.create(new(A, durability))
        await ledger.create(new(B, durability))
        records = await finish(ledger, A, 600)
        await ledger.append(tokens(B, range(7)))
    async with opened(backend) as ledger:
        assert await everything(ledger, A) == records
        assert await everything(ledger, B) == [token(index) for index in range(7)]
        info = await ledger.info(B)
        assert (info.epoch, info.next_index, info.ended) == (1, 7, False)
        assert info.recipe == new(B).recipe
        assert (await ledger.info(A)).ended
        assert await ledger.unfinished() == [B]
        assert await ledger.append(tokens(B, [7])) == []


async def test_an_unknown_stream_is_not_found(ledger: Ledger) -> None:
    for asking in (
        ledger.info(A),
        ledger.read(A, 0, 1),
        ledger.frames(A, 0, 1),
        ledger.take_over(A),
        ledger.delete(A),
    ):
        with pytest.raises(NotFound) as error:
            await asking
        assert error.value.code == "unknown_stream"
    with pytest.raises(NotFound):
        ledger.tail(A)


# ---- watching ----


async def test_a_watcher_sees_each_release_and_not_after_unwatch(ledger: Ledger) -> None:
    await ledger.create(new())
    await ledger.info(A)
    woken: list[int] = []

    def wake() -> None:
        woken.append(ledger.tail(A).released)

    ledger.watch(A, wake)
    for index in range(3):
        await ledger.append(tokens(A, [index]))
    ledger.unwatch(A, wake)
    await ledger.append(tokens(A, [3]))
    assert woken == [1, 2, 3]


class CountingWatcher:
    """A watcher that counts how often it is compared with another one."""

    compared = 0

    def __call__(self) -> None:
        """Do nothing."""

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        return self is other

    __hash__ = object.__hash__


async def test_a_watcher_is_added_and_removed_without_a_look_at_the_others(ledger: Ledger) -> None:
    await ledger.create(new())
    await ledger.info(A)
    watchers = [CountingWatcher() for _ in range(100)]
    for watcher in watchers:
        ledger.watch(A, watcher)
    for watcher in reversed(watchers):
        ledger.unwatch(A, watcher)
    assert sum(watcher.compared for watcher in watchers) == 0


async def test_what_a_watcher_is_woken_for_is_at_the_tip(ledger: Ledger) -> None:
    await ledger.create(new())
    got: list[bytes] = []

    def wake() -> None:
        frames = ledger.tail(A).take(len(got), 100)
        assert frames is not None and len(got) + len(frames) == ledger.tail(A).released
        got.extend(frames)

    ledger.watch(A, wake)
    for first in range(0, 20, 2):
        await ledger.append(tokens(A, [first, first + 1]))
    ledger.unwatch(A, wake)
    assert got == [token(index).frame for index in range(20)]


async def test_tip_and_storage_join_without_gap_or_double(ledger: Ledger) -> None:
    await ledger.create(new())
    for first in range(0, 1000, 50):
        batch = [Append(A, 1, index, token(index, "x" * 300)) for index in range(first, first + 50)]
        await ledger.append(batch)
    got: list[bytes] = []
    while len(got) < 1000:
        frames = ledger.tail(A).take(len(got), 64)
        got += await ledger.frames(A, len(got), 64) if frames is None else frames
    assert got == [token(index, "x" * 300).frame for index in range(1000)]


# ---- ownership ----


async def test_taking_over_raises_the_epoch_and_fences_the_old_producer(ledger: Ledger) -> None:
    await ledger.create(new())
    await ledger.append(tokens(A, [0, 1]))
    assert await ledger.take_over(A) == 2
    old = tokens(A, [2])
    assert await refusals(ledger, *old) == [(old[0], StaleEpoch)]
    assert await ledger.append(tokens(A, [2], epoch=2)) == []
    info = await ledger.info(A)
    assert (info.epoch, info.next_index) == (2, 3)


async def test_an_epoch_of_the_future_is_refused(ledger: Ledger) -> None:
    await ledger.create(new())
    early = tokens(A, [0], epoch=7)
    assert await refusals(ledger, *early) == [(early[0], StaleEpoch)]


async def test_an_epoch_outlives_a_restart(backend: Backend) -> None:
    async with opened(backend) as ledger:
        await ledger.create(new())
        assert await ledger.take_over(A) == 2
    async with opened(backend) as ledger:
        old = tokens(A, [0])
        assert await refusals(ledger, *old) == [(old[0], StaleEpoch)]
        assert await ledger.take_over(A) == 3


async def test_what_was_appended_before_a_takeover_is_there_after_it(ledger: Ledger) -> None:
    await ledger.create(new())
    appending = asyncio.ensure_future(ledger.append(tokens(A, range(5))))
    epoch = await ledger.take_over(A)
    refused = await appending
    # Whichever came first: it was stored as a whole, or refused as a whole.
    stored = indexes(await ledger.read(A, 0, 10))
    assert stored == ([] if refused else list(range(5)))
    assert await ledger.append(tokens(A, [len(stored)], epoch)) == []


async def test_after_a_restart_unfinished_generations_are_to_be_taken_over(
    backend: Backend,
) -> None:
    async with opened(backend) as ledger:
        for stream, moment in ((B, 1), (A, 2), (C, 3)):
            backend.clock.now += moment
            await ledger.create(new(stream))
        await ledger.create(new(bytes(16), kind=StreamKind.OBJECT))
        await finish(ledger, A, 2)
        await ledger.append(tokens(C, [0]))
    async with opened(backend) as ledger:
        assert await ledger.unfinished() == [B, C]
