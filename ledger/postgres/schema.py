"""The tables of a ledger on PostgreSQL, and the requirements for a server.

Everything is in the schema `tailrace`, so a database has one ledger. Text is stored as UTF-8 in
`bytea`, independent of the server's encoding and collation, and NUL is allowed.

A stream's short id `sid` has the number of its partition in its upper 32 bits: the hour in
which it was created, plus one. Partition 0 is for the streams of objects, which have no
retention and may live for years. When all streams of an hour are gone, so is its partition.
"""

from __future__ import annotations

from typing import NamedTuple

from psycopg import AsyncConnection

from tailrace.ledger.errors import ConfigError

SCHEMA_VERSION = 5
UPGRADED_VERSIONS = (2, 3, 4)
"""Older versions of the tables, which this release upgrades to SCHEMA_VERSION at its first start.
"""
MIN_SERVER_VERSION = 15_00_00
SETUP_LOCK = 0x54_52_4C_31  # "TRL1": advisory lock for creating and changing tables
SID_BITS = 32
"""Number of lower bits of a sid, which number the streams of a partition."""
DURABLE = ("on", "remote_apply")
"""Values of synchronous_commit with which a commit waits for its own disk and the standby's."""

_BRANCH_TABLES = """
CREATE TABLE part (                            -- records that a branch has of another stream
    sid    bigint NOT NULL,                    -- the branch's
    "end"  bigint NOT NULL,                    -- the index after the last of these records
    source bigint NOT NULL,                    -- sid of the stream that has them, perhaps expired
    PRIMARY KEY (sid, "end")
);
CREATE INDEX part_by_source ON part (source);
CREATE TABLE answer (                          -- streams by what their tokens depend on
    identity bytea  NOT NULL,
    sid      bigint NOT NULL,
    PRIMARY KEY (identity, sid)
);
CREATE INDEX answer_by_sid ON answer (sid);
"""
_USAGE_TABLE = """
CREATE TABLE usage (                           -- one row for each generation that has ended
    stream           bytea  PRIMARY KEY,       -- the public id; the stream itself may be gone
    ended_ms         bigint NOT NULL,          -- Unix time
    tenant           bytea  NOT NULL,
    key              bytea  NOT NULL,          -- id of the API key
    model            bytea  NOT NULL,
    priority         bytea  NOT NULL,          -- the class
    finish           bytea  NOT NULL,          -- finish reason
    prompt_tokens    bigint NOT NULL,
    cached_tokens    bigint NOT NULL,
    output_tokens    bigint NOT NULL,
    reasoning_tokens bigint NOT NULL,
    delivered_tokens bigint NOT NULL           -- may grow
);
CREATE INDEX usage_by_end ON usage (ended_ms);
CREATE INDEX usage_by_key ON usage (key, ended_ms);
"""
# Unlogged, because a lost number of readers is published again: no commit waits for a disk or a
# standby. After a crash of the server the table is empty.
_PRESENCE_TABLE = """
CREATE UNLOGGED TABLE presence (
    stream  bytea  NOT NULL,
    lease   bigint NOT NULL,                   -- of the origin that has these readers
    readers bigint NOT NULL,
    PRIMARY KEY (stream, lease)
) WITH (fillfactor = 50);
"""
_TABLES = """
CREATE TABLE version (version int NOT NULL);
CREATE TABLE owner (
    lease   bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    name    bytea  NOT NULL UNIQUE,
    expires timestamptz NOT NULL,              -- by the clock of this server
    commits bigint NOT NULL DEFAULT 0,         -- number of the last group commit
    link    bytea                              -- HOST:PORT at which other origins reach it
) WITH (fillfactor = 50);
CREATE SEQUENCE stream_number;
CREATE TABLE stream (                          -- what never changes of a stream
    sid             bigint   PRIMARY KEY,
    id              bytea    NOT NULL UNIQUE,  -- 16 random bytes, the public id
    kind            smallint NOT NULL,
    durability      smallint NOT NULL,
    recipe          bytea    NOT NULL,         -- what a continuation needs, JSON
    created_ms      bigint   NOT NULL,         -- Unix time
    idempotency_key bytea    UNIQUE,
    request_hash    bytea    NOT NULL
);
-- What changes with each commit: small rows with room beside them, so that an update stays on
-- its page and touches no index (PostgreSQL's README.HOT).
CREATE TABLE head (
    sid        bigint   PRIMARY KEY,
    epoch      bigint   NOT NULL,              -- fencing number of the current producer
    next_index bigint   NOT NULL,
    lease      bigint,                         -- the producer's
    ttl_ms     bigint   NOT NULL,
    expires_ms bigint   NOT NULL,              -- Unix time; slides with reads after the end
    kind       smallint NOT NULL,
    ended      boolean  NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX head_unfinished ON head (sid) WHERE NOT ended AND kind = 0;
CREATE INDEX head_by_expiry ON head (expires_ms) WHERE ended AND kind = 0;
CREATE TABLE frame (
    sid   bigint NOT NULL,
    index bigint NOT NULL,
    ids   bytea,                               -- token ids, LEB128
    frame bytea  NOT NULL,
    extra bytea,                               -- NULL: from version 2, whose ids hold marks
    PRIMARY KEY (sid, index)
) PARTITION BY RANGE (sid);
CREATE TABLE frame_0 PARTITION OF frame FOR VALUES FROM (0) TO (4294967296);
CREATE TABLE expired (sid bigint PRIMARY KEY); -- streams that are gone, frames that are not yet
CREATE SEQUENCE object_epoch;
CREATE TABLE object (
    oid           bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    kind          bytea  NOT NULL,
    name          bytea  NOT NULL,
    epoch         bigint NOT NULL,
    lease         bigint,                      -- the owner's
    used_ms       bigint NOT NULL,             -- Unix time of the last claim or write
    alarm_ms      bigint,                      -- Unix time
    alarm_retries bigint NOT NULL DEFAULT 0,
    UNIQUE (kind, name)
) WITH (fillfactor = 70);
CREATE INDEX object_by_alarm ON object (alarm_ms) WHERE alarm_ms IS NOT NULL;
CREATE TABLE value (
    oid   bigint NOT NULL,
    name  bytea  NOT NULL,
    value bytea  NOT NULL,
    PRIMARY KEY (oid, name)
);
"""

# Setting synchronous_commit to its current value keeps it for this session when the server reloads
# its settings. The timeline comes from the name of the current WAL file, because right after a
# promotion no checkpoint has recorded it yet.
_LOOK = """
SELECT set_config('synchronous_commit', current_setting('synchronous_commit'), false),
    current_setting('fsync'), current_setting('synchronous_standby_names'),
    (SELECT system_identifier FROM pg_control_system()),
    ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int
"""


class Identity(NamedTuple):
    """Identity of a server: its system identifier and its timeline, which counts promotions."""

    system: int
    timeline: int


async def check_server(connection: AsyncConnection) -> tuple[Identity, bool]:
    """Return the server's identity, and True if its commits wait for a standby.

    Later reloads of the server's settings cannot weaken the durability of this session.

    Raises:
        ConfigError: The server could lose acknowledged data.
    """
    if connection.info.server_version < MIN_SERVER_VERSION:
        raise ConfigError(
            f"PostgreSQL {connection.info.server_version // 10_000} is too old",
            field="ledger.url",
            hint=f"use version {MIN_SERVER_VERSION // 10_000} or newer",
        )
    cursor = await connection.execute(_LOOK)
    row = await cursor.fetchone()
    assert row is not None  # a SELECT without FROM has one row
    commit, fsync, standbys, system, timeline = row
    if commit not in DURABLE:
        raise ConfigError(
            f"synchronous_commit is {commit!r}: acknowledged tokens could be lost",
            field="ledger.url",
            hint="set synchronous_commit = on for this server, database and role",
        )
    check_fsync(fsync)
    return Identity(system, timeline), standbys != ""


def check_fsync(value: str) -> None:
    """Check fsync, the only durability setting that a session cannot fix."""
    if value != "on":
        raise ConfigError(
            "fsync is off: acknowledged tokens could be lost",
            field="ledger.url",
            hint="set fsync = on and restart the server",
        )


async def prepare(connection: AsyncConnection) -> None:
    """Create missing tables, and upgrade those of older versions. A lock makes other origins wait.

    Raises:
        ConfigError: A newer version of Tailrace, or one too old to upgrade, created the tables.
    """
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", (SETUP_LOCK,))
        found = await version_in(connection, "tailrace")
        if found is None:
            await _make(connection)
            return
        if found in UPGRADED_VERSIONS:
            if found == 2:
                # Existing rows stay as they are. They have NULL as `extra`, by which readers
                # recognise the records of version 2.
                await connection.execute("ALTER TABLE frame ADD COLUMN extra bytea")
            if found <= 3:
                await _create(connection, _BRANCH_TABLES + _USAGE_TABLE)
            await _create(connection, _PRESENCE_TABLE)
            await connection.execute("UPDATE version SET version = $1", (SCHEMA_VERSION,))
            return
    if found != SCHEMA_VERSION:
        raise ConfigError(
            f"the ledger in this database is of version {found}, not {SCHEMA_VERSION}",
            field="ledger.url",
            hint="another release of Tailrace created it; use that release or another database",
        )


async def version_in(connection: AsyncConnection, schema: str) -> int | None:
    """Return the version of the tables, or None if there are none."""
    found = await connection.execute(f"SELECT to_regclass('{schema}.version')::text".encode())
    if await found.fetchone() == (None,):
        return None
    found = await connection.execute(f"SELECT version FROM {schema}.version".encode())
    row = await found.fetchone()
    return 0 if row is None else int(row[0])


async def _make(connection: AsyncConnection) -> None:
    await connection.execute("CREATE SCHEMA IF NOT EXISTS tailrace")
    await _create(connection, _TABLES + _BRANCH_TABLES + _USAGE_TABLE + _PRESENCE_TABLE)
    await connection.execute("INSERT INTO version VALUES ($1)", (SCHEMA_VERSION,))


async def _create(connection: AsyncConnection, tables: str) -> None:
    for statement in tables.split(";\n"):
        if statement.strip():
            await connection.execute(statement.encode())
