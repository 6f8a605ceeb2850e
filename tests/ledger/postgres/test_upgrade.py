"""The tables of older versions are brought up to date by the first origin, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tailrace.ledger.branch import BranchPoint
from tailrace.ledger.frame import FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import PublishedReaders, Record
from tailrace.ledger.marked_ids import LIFE, STEER_BEGINS, STEERED
from tailrace.ledger.postgres.rows import pack_ids
from tailrace.ledger.record_extra import IdSpan, RecordExtra, StreamLife
from tailrace.ledger.usage import UsageCounts, UsageQuery
from tests.ledger.backends import A, B, PostgresBackend, finish, new, opened, tokens
from tests.ledger.postgres_server import PostgresServer
from tests.ledger.test_behaviour_usage import OF_B
from tests.ledger.test_behaviour_usage import finish as finish_counted

pytestmark = pytest.mark.anyio

NUMBERS = (3, 14, 1592, 6, 53, 58, 2, 0)
ROWS = (
    (encode(Token(" then", 0)), (7, 8 | STEERED | STEER_BEGINS, 9 | STEERED)),
    (encode(StreamEnd(3, FinishReason.STOP, 1, 4)), (LIFE, *NUMBERS)),
)
EXPECTED = [
    Record(ROWS[0][0], (7, 8, 9), RecordExtra(steered=(IdSpan(1, 2),)).pack()),
    Record(ROWS[1][0], (), RecordExtra(life=NUMBERS).pack()),
]
TO_VERSION_4 = "DROP TABLE tailrace.presence; UPDATE tailrace.version SET version = 4"
TO_VERSION_3 = (
    "DROP TABLE tailrace.presence, tailrace.part, tailrace.answer, tailrace.usage;"
    " UPDATE tailrace.version SET version = 3"
)
TO_VERSION_2 = (
    f"ALTER TABLE tailrace.frame DROP COLUMN extra; {TO_VERSION_3};"
    " UPDATE tailrace.version SET version = 2"
)


async def test_version_3_gets_the_tables_of_branches(
    postgres: PostgresServer, database: str
) -> None:
    backend = PostgresBackend(database)
    async with opened(backend) as ledger:
        await ledger.create(new())
        records = await finish(ledger, A, 3)
    postgres.execute(TO_VERSION_3, database)
    async with opened(backend) as ledger:
        await ledger.create(replace(new(B), base=BranchPoint(A, 2)))
        assert await ledger.read(B, 0, 10) == records[:2]


async def test_version_4_gets_the_table_of_presence(
    postgres: PostgresServer, database: str
) -> None:
    backend = PostgresBackend(database)
    async with opened(backend) as ledger:
        await ledger.create(new())
        records = await finish(ledger, A, 3)
    postgres.execute(TO_VERSION_4, database)
    async with opened(backend) as ledger:
        assert ledger.presence is not None
        await ledger.presence.publish({A: 1})
        assert await ledger.presence.read([A]) == {A: PublishedReaders(1, 0)}
        assert await ledger.read(A, 0, 10) == records


async def test_what_an_older_origin_has_stored_is_read(
    postgres: PostgresServer, database: str
) -> None:
    backend = PostgresBackend(database)
    async with opened(backend) as ledger:
        await ledger.create(new())
    postgres.execute(TO_VERSION_2, database)
    for index, (frame, ids) in enumerate(ROWS):
        packed = pack_ids(ids)
        assert packed is not None
        postgres.execute(
            f"INSERT INTO tailrace.frame SELECT sid, {index}, '\\x{packed.hex()}',"
            f" '\\x{frame.hex()}' FROM tailrace.head",
            database,
        )
    postgres.execute("UPDATE tailrace.head SET next_index = 2, ended = true", database)
    async with opened(backend) as ledger:
        assert await ledger.read(A, 0, 10) == EXPECTED
        assert StreamLife.of(EXPECTED[1]) == StreamLife(*NUMBERS)
        await ledger.create(new(B))
        stored = await finish(ledger, B, 2)
        assert await ledger.read(B, 0, 10) == stored


async def test_tables_without_usage_get_it(postgres: PostgresServer, database: str) -> None:
    backend = PostgresBackend(database)
    async with opened(backend) as ledger:
        await ledger.create(new())
        stored = await finish(ledger, A, 2)
    postgres.execute(TO_VERSION_3, database)
    for _ in range(2):
        async with opened(backend) as ledger:
            assert await ledger.read(A, 0, 10) == stored
            assert (await ledger.usage(UsageQuery())).total == UsageCounts()
    async with opened(backend) as ledger:
        await ledger.create(new(B))
        await finish_counted(ledger, B, OF_B)
        assert (await ledger.usage(UsageQuery())).total.streams == 1


async def test_an_origin_of_version_2_that_still_runs_is_understood(
    postgres: PostgresServer, database: str
) -> None:
    """It was started before the tables were brought up to date, and writes as it did."""
    backend = PostgresBackend(database)
    async with opened(backend) as ledger:
        await ledger.create(new())
        assert await ledger.append(tokens(A, [0])) == []
        packed = pack_ids(ROWS[0][1])
        assert packed is not None
        postgres.execute(
            f"INSERT INTO tailrace.frame SELECT sid, 1, '\\x{packed.hex()}',"
            f" '\\x{encode(Token(' then', 1)).hex()}' FROM tailrace.head;"
            "UPDATE tailrace.head SET next_index = 2",
            database,
        )
    async with opened(backend) as ledger:
        _, found = await ledger.read(A, 0, 10)
        assert RecordExtra.of(found).steered == (IdSpan(1, 2),)
