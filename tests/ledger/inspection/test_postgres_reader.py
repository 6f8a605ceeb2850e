"""Inspection of a shared ledger: findings that only a database can have."""

from pathlib import Path

import psycopg
import pytest

from tailrace.ledger.errors import ConfigError, LedgerFailed, NotFound
from tailrace.ledger.inspection.commands import Finding, verify
from tailrace.ledger.inspection.postgres_reader import reading_database
from tailrace.ledger.interface import StreamKind
from tailrace.ledger.postgres.retention import HOUR_MS
from tests.ledger.backends import new
from tests.ledger.ledger_files import A, B, C, PostgresPlace, append, three_streams, token
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ledger(database: str) -> PostgresPlace:
    ledger = PostgresPlace(database)
    await (await three_streams(ledger)).close()
    return ledger


async def findings(ledger: PostgresPlace) -> list[Finding]:
    async with reading_database(ledger.place) as reader:
        return (await verify(reader)).findings


async def test_status_counts_what_every_origin_has_written(database: str) -> None:
    place = PostgresPlace(database)
    first, second = await three_streams(place), await place.open()
    try:
        await second.create(new(b"o" * 16, kind=StreamKind.OBJECT))
        async with reading_database(place.place) as reader:
            status = await reader.status()
    finally:
        await first.close()
        await second.close()
    assert (status.streams, status.unfinished, status.ended) == (4, 2, 1)
    assert (status.object_streams, status.objects, status.alarms) == (1, 1, 0)
    assert (status.frames, status.origins, status.partitions) == (1206, 2, 3)
    assert status.next_expiry_ms == place.clock.now + 60_000
    assert status.bytes_per_frame == round(status.frame_bytes / 1206, 2)
    assert status.table_bytes > status.frame_bytes


async def test_it_is_the_state_of_one_moment_until_it_is_released(ledger: PostgresPlace) -> None:
    opened = await ledger.open()
    async with reading_database(ledger.place) as reader:
        row = await reader.stream(B)
        await append(opened, B, [token(5)])
        await opened.delete(A)
        assert len([x async for x in reader.records(row)]) == 5
        assert len([x async for x in reader.records(await reader.stream(A))]) == 1201
        await reader.release()
        assert len([x async for x in reader.records(row)]) == 6
        with pytest.raises(NotFound):
            await reader.stream(A)
    await opened.close()


async def test_a_partition_stays_as_long_as_its_frames_are_read(ledger: PostgresPlace) -> None:
    """PostgreSQL keeps old rows for an old moment, but not old tables."""
    opened = await ledger.open()
    async with reading_database(ledger.place) as reader:
        assert (await reader.status()).streams == 3
        await append(opened, B, [token(5)])
        for stream in (B, C):
            await opened.delete(stream)
        ledger.clock.now += 4 * HOUR_MS
        assert await opened.expire() == 1
        read = [x async for row in reader.streams() async for x in reader.records(row)]
    await opened.expire()
    assert len(read) == 1206
    async with reading_database(ledger.place) as reader:
        assert ((await reader.status()).streams, (await reader.status()).frames) == (0, 0)
        assert (await verify(reader)).whole
    await opened.close()


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("UPDATE head SET next_index = 9", "it has 5 frames, but its head says 9"),
        ("UPDATE head SET next_index = 3", "it has 5 frames, but its head says 3"),
    ],
)
async def test_a_next_index_that_is_not_the_next_is_named(
    ledger: PostgresPlace, sql: str, what: str
) -> None:
    ledger.edit(f"{sql} WHERE sid = (SELECT sid FROM stream WHERE id = %s)", B)
    assert await findings(ledger) == [Finding(B.hex(), what)]


async def test_an_end_that_is_not_marked_is_named(ledger: PostgresPlace) -> None:
    ledger.edit("UPDATE head SET ended = false")
    what = "it has a StreamEnd, but is not marked as ended"
    assert await findings(ledger) == [Finding(A.hex(), what)]


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("DELETE FROM head", "3 streams have no head"),
        ("UPDATE head SET kind = 1", "3 heads are of another kind than their stream"),
    ],
)
async def test_rows_that_do_not_belong_together_are_named(
    ledger: PostgresPlace, sql: str, what: str
) -> None:
    ledger.edit(sql)
    assert await findings(ledger) == [Finding(None, what)]


async def test_frames_of_no_stream_are_named_unless_they_are_about_to_go(
    ledger: PostgresPlace,
) -> None:
    ledger.edit(
        "WITH a AS (DELETE FROM stream WHERE id = %s RETURNING sid), h AS (DELETE FROM head h"
        " USING a WHERE h.sid = a.sid) INSERT INTO expired SELECT sid FROM a",
        A,
    )
    assert await findings(ledger) == []
    ledger.edit("DELETE FROM expired")
    assert await findings(ledger) == [Finding(None, "1 sids of frames belong to no stream")]


async def test_a_broken_page_is_named_and_does_not_stop_it() -> None:
    server = PostgresServer.make()
    try:
        with server.database() as dsn:
            place = PostgresPlace(dsn)
            await (await three_streams(place)).close()
            [(table,)] = server.execute("SELECT pg_relation_filepath('tailrace.value')", dsn)
            server.execute("CHECKPOINT")
            server.kill()
            with (server.data / str(table)).open("r+b") as raw:
                raw.write(b"\xff" * 8192)
            server.start()
            async with reading_database(place.place) as reader:
                verdict = await verify(reader)
            assert (verdict.streams, verdict.frames) == (3, 1206)
            [finding] = verdict.findings
            assert finding.stream is None
            assert "invalid page" in finding.what
    finally:
        server.stop()


async def test_a_standby_can_be_read() -> None:
    server = PostgresServer.make()
    try:
        standby = server.standby()
        try:
            await (await three_streams(PostgresPlace(server.dsn()))).close()
            async with reading_database(PostgresPlace(standby.dsn()).place) as reader:
                await reader.release()
                assert (await verify(reader)).whole
        finally:
            standby.stop()
    finally:
        server.stop()


async def test_a_role_that_may_only_read_is_enough(
    ledger: PostgresPlace, postgres: PostgresServer
) -> None:
    guest = ledger.dsn.replace("user=postgres", "user=guest_reader")
    postgres.execute("CREATE ROLE guest_reader LOGIN")
    try:
        with pytest.raises(ConfigError, match="USAGE on the schema") as refused:
            async with reading_database(guest):
                pass
        assert "permission denied" in refused.value.message
        ledger.edit("GRANT USAGE ON SCHEMA tailrace TO guest_reader")
        ledger.edit("GRANT SELECT ON ALL TABLES IN SCHEMA tailrace TO guest_reader")
        async with reading_database(guest) as reader:
            assert (await verify(reader)).whole
            assert (await reader.status()).streams == 3
    finally:
        postgres.execute("DROP OWNED BY guest_reader", ledger.dsn)
        postgres.execute("DROP ROLE guest_reader")


async def test_a_reader_changes_nothing(ledger: PostgresPlace) -> None:
    async with reading_database(ledger.place) as reader:
        await reader.status()
        connection = reader._connection
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            await connection.execute("DELETE FROM stream")


async def test_a_database_without_a_ledger_stays_without_one(
    database: str, postgres: PostgresServer
) -> None:
    with pytest.raises(ConfigError, match="there is no ledger in"):
        async with reading_database(database):
            pass
    assert postgres.execute("SELECT to_regnamespace('tailrace')", database) == [(None,)]


async def test_a_ledger_of_another_version_is_not_read(ledger: PostgresPlace) -> None:
    ledger.edit("UPDATE version SET version = version + 1")
    with pytest.raises(ConfigError, match="has another version than"):
        async with reading_database(ledger.place):
            pass


async def test_a_server_that_is_away_or_goes_away_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(LedgerFailed, match="is the server running"):
        async with reading_database(f"host={tmp_path} user=postgres"):
            pass
    server = PostgresServer.make()
    try:
        with server.database() as dsn:
            await (await PostgresPlace(dsn).open()).close()
            async with reading_database(dsn) as reader:
                server.kill()
                with pytest.raises(LedgerFailed, match="PostgreSQL"):
                    await reader.status()
            server.start()
    finally:
        server.stop()
