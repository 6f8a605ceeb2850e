"""Partitions by the hour: frames go with them, and nothing that lives does."""

import asyncio

import psycopg
import pytest

from tailrace.ledger.errors import NotFound
from tailrace.ledger.interface import Append, ObjectKey, ObjectWrite, StreamKind
from tailrace.ledger.postgres.retention import (
    EXPIRE_STREAMS,
    FORGET_OBJECTS_AFTER_MS,
    HOUR_MS,
    LINGER_HOURS,
)
from tailrace.origin.steady_clock import now_ms
from tests.ledger.backends import (
    TTL_S,
    A,
    B,
    C,
    PostgresBackend,
    end,
    everything,
    finish,
    new,
    opened,
    token,
    tokens,
)
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

TTL_MS = int(TTL_S * 1000)
KEY = ObjectKey("stream", "one")


@pytest.fixture
def backend(database: str) -> PostgresBackend:
    return PostgresBackend(database)


class Tables:
    """The tables as they lie in the database."""

    def __init__(self, server: PostgresServer, dsn: str) -> None:
        self._server, self._dsn = server, dsn

    def partitions(self) -> set[int]:
        rows = self._server.execute(
            "SELECT substring(relname FROM 7)::int FROM pg_class"
            " WHERE relkind = 'r' AND relname ~ '^frame_[0-9]+$'",
            self._dsn,
        )
        return {int(str(number)) for (number,) in rows}

    def count(self, table: str) -> int:
        [(count,)] = self._server.execute(f"SELECT count(*) FROM tailrace.{table}", self._dsn)
        return int(str(count))

    def until_somebody_waits(self) -> None:
        self._server.until(
            "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            f" WHERE NOT l.granted AND d.datname = '{self._dsn.rpartition('=')[2]}'"
        )


@pytest.fixture
def tables(postgres: PostgresServer, database: str) -> Tables:
    return Tables(postgres, database)


async def test_a_partition_goes_when_its_last_stream_is_gone(
    backend: PostgresBackend, tables: Tables
) -> None:
    async with opened(backend) as ledger:
        await ledger.create(new(A))
        await finish(ledger, A, 10)
        backend.clock.now += 2 * HOUR_MS
        await ledger.create(new(B))
        await finish(ledger, B, 10)
        assert tables.partitions() == {0, 1, 2, 3, 4}
        assert await ledger.expire() == 1
        assert tables.partitions() == {0, 2, 3, 4}  # the last hour stays: clocks differ
        assert tables.count("frame") == 11
        assert tables.count("expired") == 0
        assert len(await everything(ledger, B)) == 11


async def test_a_stream_that_slides_keeps_its_partition(
    backend: PostgresBackend, tables: Tables
) -> None:
    async with opened(backend) as ledger:
        await ledger.create(new(A))
        await ledger.create(new(B))
        records = await finish(ledger, A, 10)
        await finish(ledger, B, 10)
        for _ in range(3 * HOUR_MS // TTL_MS):
            backend.clock.now += TTL_MS - 1
            assert await everything(ledger, A) == records
            await ledger.expire()
        assert tables.partitions() >= {1}
        with pytest.raises(NotFound):
            await ledger.info(B)
        backend.clock.now += TTL_MS
        assert await ledger.expire() == 1
        assert 1 not in tables.partitions()


async def test_frames_beside_a_long_lived_stream_are_removed_row_by_row(
    backend: PostgresBackend, tables: Tables
) -> None:
    async with opened(backend) as ledger:
        for stream in (A, B, C):
            await ledger.create(new(stream))
        await ledger.append(tokens(A, range(5)))  # this stream never ends
        await finish(ledger, B, 3000)
        await finish(ledger, C, 10)
        backend.clock.now += TTL_MS
        assert await ledger.expire() == 2
        assert tables.count("frame") == 5 + 3001 + 11  # perhaps all of it can go at once
        backend.clock.now += (LINGER_HOURS + 1) * HOUR_MS
        assert await ledger.expire() == 0
        assert tables.count("frame") == 5
        assert tables.count("expired") == 0
        assert len(await everything(ledger, A)) == 5


async def test_a_deleted_streams_frames_are_removed_at_once(
    backend: PostgresBackend, tables: Tables
) -> None:
    async with opened(backend) as ledger:
        await ledger.create(new(A))
        await finish(ledger, A, 5000)
        await ledger.delete(A)
        assert [tables.count(table) for table in ("frame", "stream", "head", "expired")] == [0] * 4


async def test_a_dropped_object_streams_frames_go_with_the_next_sweep(
    backend: PostgresBackend, tables: Tables
) -> None:
    async with opened(backend) as ledger:
        epoch = (await ledger.objects.claim(KEY)).epoch
        creates = [new(A, kind=StreamKind.OBJECT)]
        await ledger.objects.write(
            ObjectWrite(KEY, epoch, creates=creates, appends=tokens(A, range(10)))
        )
        await ledger.objects.write(ObjectWrite(KEY, epoch, drops=[A]))
        await ledger.expire()
        assert [tables.count(table) for table in ("frame", "stream", "head", "expired")] == [0] * 4


async def test_an_object_that_holds_nothing_is_forgotten_and_its_owner_fenced(
    backend: PostgresBackend, tables: Tables
) -> None:
    async with opened(backend) as ledger:
        old = (await ledger.objects.claim(KEY)).epoch
        kept = ObjectKey("stream", "kept")
        await ledger.objects.write(
            ObjectWrite(kept, (await ledger.objects.claim(kept)).epoch, puts={"a": b""})
        )
        backend.clock.now += HOUR_MS + 1
        await ledger.expire()
        assert tables.count("object") == 1
        assert (await ledger.objects.claim(KEY)).epoch > old
        assert await ledger.objects.names("stream") == ["kept"]


async def test_a_stream_whose_partition_another_origin_dropped_gets_it_back(
    backend: PostgresBackend, tables: Tables, postgres: PostgresServer
) -> None:
    """The other one's clock is hours ahead."""
    async with opened(backend) as ledger:
        await ledger.create(new(A))
        ahead = PostgresBackend(backend.dsn)
        ahead.clock.now += 5 * HOUR_MS
        postgres.execute("DROP TABLE tailrace.frame_1", backend.dsn)
        assert await ledger.append(tokens(A, range(3))) == []
        async with opened(ahead) as other:
            assert len(await everything(other, A)) == 3
            await other.expire()
        assert len(await everything(ledger, A)) == 3


async def test_a_read_on_one_origin_keeps_the_stream_from_anothers_sweep(
    backend: PostgresBackend,
) -> None:
    async with opened(backend) as reader, opened(backend) as sweeper:
        await reader.create(new(A))
        records = await finish(reader, A, 3)
        backend.clock.now += TTL_MS - 1
        assert await reader.read(A, 0, 10) == records
        backend.clock.now += 1
        assert await sweeper.expire() == 0
        assert await reader.read(A, 0, 10) == records
        backend.clock.now += TTL_MS
        assert await sweeper.expire() == 1
        with pytest.raises(NotFound):
            await reader.read(A, 0, 10)


async def test_the_end_begins_the_retention_on_every_origin(backend: PostgresBackend) -> None:
    async with opened(backend) as one, opened(backend) as other:
        await one.create(new(A))
        backend.clock.now += 10 * TTL_MS
        await one.append([Append(A, 1, 0, end(0))])
        backend.clock.now += TTL_MS - 1
        assert await other.expire() == 0
        backend.clock.now += 1
        assert await other.expire() == 1


async def test_a_stream_made_while_its_partition_is_about_to_go_keeps_its_frames(
    backend: PostgresBackend, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An origin whose clock is hours behind creates it between the check and the drop."""
    monkeypatch.setattr("tailrace.ledger.postgres.retention.DROP_LOCK_MS", 60_000)
    async with opened(backend) as late, opened(backend) as sweeping:
        await late.create(new(A))
        await late.delete(A)
        with psycopg.connect(backend.dsn) as writing:
            writing.execute("LOCK TABLE tailrace.frame_1 IN ROW EXCLUSIVE MODE")
            await late.create(new(B))
            backend.clock.now += 3 * HOUR_MS
            sweep = asyncio.create_task(sweeping.expire())
            await asyncio.to_thread(tables.until_somebody_waits)
            writing.execute(
                "INSERT INTO tailrace.frame SELECT sid, 0, NULL, %s FROM tailrace.stream"
                " WHERE id = %s",
                (token(0).frame, B),
            )
            writing.execute("UPDATE tailrace.head SET next_index = 1")
        await sweep
        assert await late.frames(B, 0, 10) == [token(0).frame]


async def test_objects_that_hold_nothing_are_all_forgotten_in_one_sweep(
    backend: PostgresBackend, tables: Tables
) -> None:
    async with opened(backend) as ledger:
        for number in range(2 * EXPIRE_STREAMS + 1):
            await ledger.objects.claim(ObjectKey("stream", str(number)))
        backend.clock.now += FORGET_OBJECTS_AFTER_MS + 1
        await ledger.expire()
        assert tables.count("object") == 0


async def test_a_clock_that_is_ahead_of_the_servers_removes_nothing_too_early(
    backend: PostgresBackend,
) -> None:
    backend.clock.now = now_ms() - 25 * HOUR_MS
    async with opened(backend) as ledger:
        await ledger.create(new(B, ttl_s=3600))
        await finish(ledger, B, 3)
        backend.clock.now += 25 * HOUR_MS
        await ledger.create(new(A, ttl_s=3600))
        await finish(ledger, A, 3)
        backend.clock.now += 24 * HOUR_MS
        assert await ledger.expire() == 1
        assert (await ledger.info(A)).ended
        with pytest.raises(NotFound):
            await ledger.info(B)
