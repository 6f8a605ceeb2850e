"""Several owners of one ledger on PostgreSQL: fencing, leases, tails across origins."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tailrace.ledger.errors import HeldElsewhere, LedgerFailed, NotFound, StaleEpoch, WrongIndex
from tailrace.ledger.interface import Alarm, Append, ObjectKey, ObjectWrite, StreamKind
from tailrace.ledger.postgres.commit import MAX_NOTICE_SIDS
from tailrace.ledger.postgres.ledger import PostgresLedger
from tests.ledger.backends import (
    A,
    B,
    Clock,
    PostgresBackend,
    end,
    everything,
    finish,
    indexes,
    new,
    token,
    tokens,
)
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
KEY = ObjectKey("stream", "one")


@pytest.fixture
def backend(database: str) -> PostgresBackend:
    return PostgresBackend(database)


@asynccontextmanager
async def two(backend: PostgresBackend) -> AsyncIterator[tuple[PostgresLedger, PostgresLedger]]:
    """Two origins on one ledger."""
    first, second = await backend.open(), await backend.open()
    try:
        yield first, second
    finally:
        await first.close()
        await second.close()


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Ask the ledger again and again until it says so."""
    async with asyncio.timeout(PATIENCE_S):
        while not await true():
            continue


class Reader:
    """Follows a stream as a feed does: woken, from memory where it is, from storage where not."""

    def __init__(self, ledger: PostgresLedger, stream: bytes) -> None:
        self.frames: list[bytes] = []
        self._ledger = ledger
        self._stream = stream
        self._woken = asyncio.Event()

    async def follow(self, count: int) -> list[bytes]:
        """Read until there are `count` frames."""
        await self._ledger.info(self._stream)
        self._ledger.watch(self._stream, self._woken.set)
        async with asyncio.timeout(PATIENCE_S):
            while len(self.frames) < count:
                if self._ledger.tail(self._stream).released == len(self.frames):
                    await self._woken.wait()
                    self._woken.clear()
                    continue
                at = len(self.frames)
                tip = self._ledger.tail(self._stream).take(at, 64)
                self.frames += (
                    await self._ledger.frames(self._stream, at, 64) if tip is None else tip
                )
        self._ledger.unwatch(self._stream, self._woken.set)
        return self.frames


# ---- one ledger, several owners ----


async def test_origins_that_start_at_once_make_the_tables_once(backend: PostgresBackend) -> None:
    ledgers = await asyncio.gather(*(backend.open() for _ in range(4)))
    await ledgers[0].create(new())
    for ledger in ledgers:
        assert (await ledger.info(A)).epoch == 1
        await ledger.close()


async def test_what_one_origin_appends_another_one_reads(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        await one.create(new())
        records = await finish(one, A, 500)
        assert await everything(other, A) == records
        assert (await other.info(A)).ended


async def test_two_origins_never_both_write_an_index(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        await one.create(new())
        winners = []
        for index in range(60):
            mine, theirs = token(index, " one"), token(index, " other")
            refused = await asyncio.gather(
                one.append([Append(A, 1, index, mine)]), other.append([Append(A, 1, index, theirs)])
            )
            assert sorted(map(len, refused)) == [0, 1]
            [refusal] = refused[0] + refused[1]
            assert isinstance(refusal.error, WrongIndex)
            winners.append(theirs if refused[0] else mine)
        assert await everything(one, A) == winners
        assert await everything(other, A) == winners


async def test_the_old_producer_is_fenced_when_another_origin_takes_over(
    backend: PostgresBackend,
) -> None:
    async with two(backend) as (old, taker):
        await old.create(new(A))
        await old.create(new(B))
        await old.append([*tokens(A, [0]), *tokens(B, [0])])
        assert await taker.take_over(A) == 2
        refused = await old.append([*tokens(A, [1]), *tokens(B, [1])])
        assert [(r.append.stream, type(r.error)) for r in refused] == [(A, StaleEpoch)]
        assert await taker.append(tokens(A, [1], epoch=2)) == []
        assert indexes(await old.read(A, 0, 10)) == [0, 1]
        assert indexes(await old.read(B, 0, 10)) == [0, 1]


async def test_a_takeover_amid_appends_leaves_no_gap_and_nothing_twice(
    backend: PostgresBackend,
) -> None:
    async with two(backend) as (old, taker):
        await old.create(new())
        acknowledged: list[int] = []

        async def produce() -> None:
            index = 0
            while not await old.append([Append(A, 1, index, token(index, " old"))]):
                acknowledged.append(index)
                index += 1

        producing = asyncio.create_task(produce())
        await Reader(taker, A).follow(20)
        epoch = await taker.take_over(A)
        stored = await everything(taker, A)
        assert await taker.append([Append(A, epoch, len(stored), token(len(stored)))]) == []
        await producing
        final = await everything(taker, A)
        assert acknowledged == list(range(len(stored)))
        assert indexes(final) == list(range(len(stored) + 1))


async def test_of_two_that_take_over_at_once_the_later_one_wins(backend: PostgresBackend) -> None:
    gone = await backend.open()
    await gone.create(new())
    await gone.append(tokens(A, range(3)))
    await gone.close()
    async with two(backend) as origins:

        async def take(origin: PostgresLedger) -> int:
            assert await origin.unfinished() in ([A], [])
            return await origin.take_over(A)

        epochs = await asyncio.gather(*map(take, origins))
        assert sorted(epochs) == [2, 3]
        texts = [" first", " second"]
        refused = await asyncio.gather(
            *(
                origin.append([Append(A, epoch, 3, token(3, text))])
                for origin, epoch, text in zip(origins, epochs, texts, strict=True)
            )
        )
        later = epochs.index(3)
        assert refused[later] == []
        [loser] = refused[1 - later]
        assert isinstance(loser.error, StaleEpoch)
        assert (await everything(origins[0], A))[3:] == [token(3, texts[later])]


# ---- leases ----


async def test_a_living_origins_streams_are_not_unfinished(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        await one.create(new())
        assert await one.unfinished() == []
        assert await other.unfinished() == []
        await other.take_over(A)
        assert await one.unfinished() == []


async def test_an_origin_that_closes_leaves_its_streams_at_once(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        await one.create(new(A))
        await one.create(new(B))
        await one.append([Append(B, 1, 0, end(0))])
        await one.close()
        assert await other.unfinished() == [A]


async def test_a_lease_that_is_not_renewed_lapses_and_one_that_is_does_not(
    backend: PostgresBackend, postgres: PostgresServer
) -> None:
    living, dead = await backend.open(lease_s=1.0), await backend.open(lease_s=0.2)
    await living.create(new(A))
    await dead.create(new(B))
    await dead._lease.stop()  # as if the process had stopped

    async def lapsed() -> bool:
        return bool(await living.unfinished())

    await until(lapsed)
    assert await living.unfinished() == [B]
    await living.close()
    await dead.close()


async def test_a_second_process_of_one_name_replaces_the_first(database: str) -> None:
    first = await PostgresLedger.open(database, Clock(), owner="same")
    await first.create(new())
    second = await PostgresLedger.open(database, Clock(), owner="same")
    assert await second.unfinished() == [A]
    with pytest.raises(LedgerFailed, match="same owner") as raised:
        await first.append(tokens(A, [0]))
    assert not raised.value.retryable
    with pytest.raises(LedgerFailed):
        await first.create(new(B))
    await first.close()
    await second.close()


async def test_alarms_are_due_to_their_owner_and_to_all_when_it_is_gone(
    backend: PostgresBackend,
) -> None:
    async with two(backend) as (one, other):
        epoch = (await one.objects.claim(KEY)).epoch
        await one.objects.write(ObjectWrite(KEY, epoch, alarm=Alarm(5), sets_alarm=True))
        assert await one.objects.due(10, 10) == [(KEY, Alarm(5))]
        assert await other.objects.due(10, 10) == []
        await one.close()
        assert await other.objects.due(10, 10) == [(KEY, Alarm(5))]


async def test_an_object_claimed_on_another_origin_is_fenced_here(
    backend: PostgresBackend,
) -> None:
    async with two(backend) as (one, other):
        old = (await one.objects.claim(KEY)).epoch
        await one.objects.write(ObjectWrite(KEY, old, puts={"a": b"1"}))
        with pytest.raises(HeldElsewhere, match="held by origin origin 1"):
            await other.objects.claim(KEY)
        assert await one.objects.owns(KEY, old)
        await other.objects.seize(KEY)
        epoch = (await other.objects.claim(KEY)).epoch
        assert not await one.objects.owns(KEY, old)
        creates = [new(A, kind=StreamKind.OBJECT)]
        with pytest.raises(StaleEpoch):
            await one.objects.write(ObjectWrite(KEY, old, puts={"a": b"2"}, creates=creates))
        await other.objects.write(ObjectWrite(KEY, epoch, puts={"b": b"3"}))
        assert await one.objects.list(KEY) == {"a": b"1", "b": b"3"}
        with pytest.raises(NotFound):
            await one.info(A)


async def test_an_object_is_claimed_elsewhere_when_the_lease_of_its_origin_has_lapsed(
    backend: PostgresBackend,
) -> None:
    dead, living = await backend.open(lease_s=0.2), await backend.open()
    old = (await dead.objects.claim(KEY)).epoch
    await dead._lease.stop()  # as if the process had stopped

    async def claimed() -> bool:
        try:
            return (await living.objects.claim(KEY)).epoch > old
        except HeldElsewhere:
            return False

    await until(claimed)
    assert not await dead.objects.owns(KEY, old)
    await dead.close()
    await living.close()


# ---- live tails across origins ----


async def test_a_reader_on_another_origin_sees_every_frame_once(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        await one.create(new())
        following = asyncio.create_task(Reader(other, A).follow(401))
        for first in range(0, 400, 4):
            await one.append(tokens(A, range(first, first + 4)))
        await one.append([Append(A, 1, 400, end(400))])
        frames = [token(index).frame for index in range(400)]
        assert await following == [*frames, end(400).frame]
        assert (await other.info(A)).ended


async def test_many_readers_at_the_tip_on_another_origin_share_its_memory(
    backend: PostgresBackend,
) -> None:
    async with two(backend) as (one, other):
        await one.create(new())
        following = [asyncio.create_task(Reader(other, A).follow(50)) for _ in range(40)]
        for index in range(50):
            await one.append(tokens(A, [index]))
        expected = [token(index).frame for index in range(50)]
        assert await asyncio.gather(*following) == [expected] * 40


async def test_what_comes_between_info_and_watch_is_not_missed(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        await one.create(new())
        await other.info(A)
        await one.append(tokens(A, [0]))
        woken = asyncio.Event()
        other.watch(A, woken.set)
        async with asyncio.timeout(PATIENCE_S):
            await woken.wait()
        assert other.tail(A).released == 1


async def test_a_commit_of_more_streams_than_a_notice_names_wakes_readers(
    backend: PostgresBackend,
) -> None:
    count = MAX_NOTICE_SIDS + 1
    streams = [number.to_bytes(16, "big") for number in range(count)]
    async with two(backend) as (one, other):
        epoch = (await one.objects.claim(KEY)).epoch
        creates = [new(stream, kind=StreamKind.OBJECT) for stream in streams]
        await one.objects.write(ObjectWrite(KEY, epoch, creates=creates))
        following = asyncio.create_task(Reader(other, streams[-1]).follow(1))
        assert await one.append([Append(stream, 1, 0, token(0)) for stream in streams]) == []
        assert await following == [token(0).frame]


async def test_a_watcher_hears_of_a_deletion_on_another_origin(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        await one.create(new())
        await one.append(tokens(A, [0]))
        await other.info(A)
        woken = asyncio.Event()
        other.watch(A, woken.set)
        await one.delete(A)

        async def gone() -> bool:
            try:
                await other.frames(A, 0, 10)
            except NotFound:
                return True
            return False

        async with asyncio.timeout(PATIENCE_S):
            await woken.wait()
        await until(gone)
        with pytest.raises(NotFound):
            other.tail(A)


# ---- connections that are lost ----


def end_connections(postgres: PostgresServer, database: str, query: str) -> int:
    """End the connections whose last statement was like `query`; returns how many."""
    name = database.rpartition("=")[2]
    [(count,)] = postgres.execute(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        f" WHERE datname = '{name}' AND query LIKE '{query}' AND pid <> pg_backend_pid()"
    )
    assert isinstance(count, int)
    return count


def end_every_connection(postgres: PostgresServer, database: str) -> None:
    """End every connection; repeat if the ledger was between two connections."""
    while end_connections(postgres, database, "%") == 0:
        pass


async def test_a_listener_that_was_cut_off_catches_up(
    backend: PostgresBackend, postgres: PostgresServer
) -> None:
    async with two(backend) as (one, other):
        await one.create(new())
        following = asyncio.create_task(Reader(other, A).follow(40))
        for index in range(40):
            if index % 10 == 5:
                end_connections(postgres, backend.dsn, "LISTEN%")
            await one.append(tokens(A, [index]))
        assert await following == [token(index).frame for index in range(40)]


async def test_appends_survive_the_end_of_every_connection(
    backend: PostgresBackend, postgres: PostgresServer
) -> None:
    ledger = await backend.open()
    await ledger.create(new())
    ending = []
    for index in range(200):
        if index % 20 == 10:
            cut = asyncio.to_thread(end_every_connection, postgres, backend.dsn)
            ending.append(asyncio.create_task(cut))
        assert await ledger.append(tokens(A, [index])) == []
    await asyncio.gather(*ending)
    assert await everything(ledger, A) == [token(index) for index in range(200)]
    await ledger.close()


def test_the_notice_limit_keeps_within_what_postgresql_takes() -> None:
    """8,000 bytes; a sid of the year 2100 has 16 digits."""
    assert len(json.dumps([2**53] * (MAX_NOTICE_SIDS + 1))) < 8000
