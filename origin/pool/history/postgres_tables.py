"""The history in the PostgreSQL that origins share: one for all origins, in its own schema."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from psycopg import AsyncConnection, DataError

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.postgres.schema import version_in
from tailrace.ledger.postgres.server import LastingConnection, Server, first_line
from tailrace.origin.pool.history import schema
from tailrace.origin.pool.history.schema import HistoryEntry

SCHEMA = "tailrace_history"
LOCK = 0x54_52_48_31  # "TRH1": advisory lock for creating tables and for roll-ups
WRITE_TIMEOUT_S = 10.0
"""Seconds that a write waits for a server that cannot be reached; then it fails and is retried."""
# The ledger's connections disable sequential scans, which may be the best plan for these tables.
# Commits of statistics need not wait for a standby.
_SETTINGS = b"""SELECT set_config('search_path', 'tailrace_history', true),
    set_config('enable_seqscan', 'on', true), set_config('enable_bitmapscan', 'on', true),
    set_config('synchronous_commit', 'local', true)"""


class PostgresHistory:
    """A history in PostgreSQL; create it with `open`. It connects at its first use."""

    def __init__(self, url: str) -> None:
        self._connection = LastingConnection(Server(url, "tailrace history"))
        self.name = f"{SCHEMA} in the shared PostgreSQL"

    @classmethod
    async def open(cls, url: str, *, make: bool = True) -> Self:
        """Open a history.

        With `make`, missing tables are created. Raises ConfigError if the tables are missing and
        `make` is False, or if a newer Tailrace has created them.
        """
        history = cls(url)
        try:
            await history._connection.run(partial(_prepare, make=make), WRITE_TIMEOUT_S)
        except BaseException:
            await history.close()
            raise
        return history

    async def write(self, entries: Sequence[HistoryEntry], *, alone: bool = False) -> None:
        async def work(connection: AsyncConnection) -> None:
            async with connection.transaction(), connection.cursor() as cursor:
                await connection.execute(_SETTINGS)
                if alone:  # two concurrent roll-ups would count requests twice
                    await connection.execute("SELECT pg_advisory_xact_lock($1)", (LOCK,))
                for statement, rows in schema.in_groups(entries):
                    try:
                        await cursor.executemany(statement.encode(), rows)
                    except DataError as error:
                        raise ValueError(first_line(error)) from error

        await self._connection.run(work, WRITE_TIMEOUT_S)

    async def rows(self, query: str, *values: str | int) -> Sequence[tuple[Any, ...]]:
        async def work(connection: AsyncConnection) -> Sequence[tuple[Any, ...]]:
            async with connection.transaction():
                await connection.execute(_SETTINGS)
                return await (await connection.execute(query.encode(), values)).fetchall()

        return await self._connection.run(work, WRITE_TIMEOUT_S)

    async def close(self) -> None:
        await self._connection.close()


async def _prepare(connection: AsyncConnection, *, make: bool) -> None:
    """Create the tables if they are missing and may be created."""
    async with connection.transaction():
        if make:
            await connection.execute("SELECT pg_advisory_xact_lock($1)", (LOCK,))
        found = await version_in(connection, SCHEMA)
        if found is None and not make:
            raise ConfigError(
                "there is no history in this database",
                hint="start an origin that uses this database: it creates the history",
            )
        if found not in (None, schema.VERSION):
            raise ConfigError(
                f"the history in this database is of version {found}, not {schema.VERSION}",
                hint="a newer release of Tailrace has created it: use that release",
            )
        if found is not None:
            return
        await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}".encode())
        await connection.execute(_SETTINGS)
        for statement in (*schema.TABLES.split(";"), "CREATE TABLE version (version int NOT NULL)"):
            if statement.strip():
                await connection.execute(statement.encode())
        await connection.execute("INSERT INTO version VALUES ($1)", (schema.VERSION,))
