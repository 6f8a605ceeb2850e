"""The tables of a ledger file, and the versions that are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import apsw

from tailrace.ledger.errors import ConfigError

SCHEMA_VERSION = 8
"""Version of the file's layout, stored as SQLite's `user_version`."""
UPGRADED_VERSIONS = (6, 7)
"""Older versions of the layout, which are upgraded in place when a file is opened for writing."""
APPLICATION_ID = 0x54_52_4C_31  # "TRL1", the application_id of a ledger file
BUSY_TIMEOUT_MS = 5_000
"""Milliseconds that a connection waits for a lock of another connection."""

BRANCH_SCHEMA = """
CREATE TABLE part (                           -- records that a branch has of another stream
    sid     INTEGER NOT NULL,                 -- the branch's
    "end"   INTEGER NOT NULL,                 -- the index after the last of these records
    source  INTEGER NOT NULL,                 -- sid of the stream that has them, perhaps removed
    crc     INTEGER NOT NULL,
    PRIMARY KEY (sid, "end")
) WITHOUT ROWID;
CREATE INDEX part_by_source ON part (source);
CREATE TABLE answer (                         -- streams by what their tokens depend on
    identity BLOB    NOT NULL,
    sid      INTEGER NOT NULL,
    PRIMARY KEY (identity, sid)
) WITHOUT ROWID;
CREATE INDEX answer_by_sid ON answer (sid);
"""
"""The tables of branches, which layout 8 has added."""
USAGE_SCHEMA = """
CREATE TABLE usage (                          -- one row for each generation that has ended
    stream           BLOB    NOT NULL PRIMARY KEY, -- the public id; the stream itself may be gone
    ended_ms         INTEGER NOT NULL,        -- Unix time
    tenant           TEXT    NOT NULL,
    key              TEXT    NOT NULL,        -- id of the API key
    model            TEXT    NOT NULL,
    priority         TEXT    NOT NULL,        -- the class
    finish           TEXT    NOT NULL,        -- finish reason
    prompt_tokens    INTEGER NOT NULL,
    cached_tokens    INTEGER NOT NULL,
    output_tokens    INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL,
    delivered_tokens INTEGER NOT NULL,        -- may grow; not in the checksum
    crc              INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX usage_by_end ON usage (ended_ms);
CREATE INDEX usage_by_key ON usage (key, ended_ms);
"""
"""The table of usage, which layout 8 has added."""

_SCHEMA = """
CREATE TABLE stream (
    sid             INTEGER PRIMARY KEY,      -- short local id, used by log and segment
    id              BLOB    NOT NULL UNIQUE,  -- 16 random bytes, the public id
    kind            INTEGER NOT NULL,         -- 0: an engine's, 1: an object's
    epoch           INTEGER NOT NULL,         -- fencing number of the current producer
    ended           INTEGER NOT NULL,         -- 1 once the StreamEnd is in a segment
    durability      INTEGER NOT NULL,
    recipe          TEXT    NOT NULL,         -- what a continuation needs, JSON
    created_ms      INTEGER NOT NULL,         -- Unix time
    ttl_ms          INTEGER NOT NULL,
    expires_ms      INTEGER NOT NULL,         -- Unix time; slides with reads and writes
    idempotency_key TEXT    UNIQUE,
    request_hash    BLOB    NOT NULL,
    cold            INTEGER NOT NULL DEFAULT 0, -- 1 once every segment of an ended stream is
    crc             INTEGER NOT NULL          -- of what is above but `cold` (checksum.py)
);
CREATE INDEX stream_by_expiry ON stream (kind, expires_ms) WHERE ended = 1;
CREATE INDEX stream_unfinished ON stream (kind, created_ms) WHERE ended = 0;
-- By the time of the last read, until it is cold.
CREATE INDEX stream_warm ON stream (expires_ms - ttl_ms) WHERE ended = 1 AND cold = 0;
CREATE TABLE removed (sid INTEGER PRIMARY KEY);  -- streams whose segments are yet to go
CREATE TABLE log (seq INTEGER PRIMARY KEY, batch BLOB NOT NULL);
CREATE TABLE segment (
    sid     INTEGER NOT NULL,
    first   INTEGER NOT NULL,                 -- index of its first record
    length  INTEGER NOT NULL,                 -- records in it
    coding  INTEGER NOT NULL,                 -- 2: plain, 3: cold; 0 and 1: those of layout 6
    records BLOB    NOT NULL,
    PRIMARY KEY (sid, first)                  -- an index beside it: what is large is only added
);
CREATE TABLE object (
    oid           INTEGER PRIMARY KEY,        -- short local id, used by object_value
    kind          TEXT    NOT NULL,
    name          TEXT    NOT NULL,
    epoch         INTEGER NOT NULL,
    alarm_ms      INTEGER,                    -- Unix time
    alarm_retries INTEGER NOT NULL,
    crc           INTEGER NOT NULL,
    UNIQUE (kind, name)
);
CREATE INDEX object_by_alarm ON object (alarm_ms) WHERE alarm_ms IS NOT NULL;
CREATE TABLE object_value (
    oid   INTEGER NOT NULL,
    name  TEXT    NOT NULL,
    value BLOB    NOT NULL,
    crc   INTEGER NOT NULL,
    PRIMARY KEY (oid, name)
) WITHOUT ROWID;
"""


def make_schema(writer: apsw.Connection) -> None:
    writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
    writer.execute(
        f"BEGIN;{_SCHEMA}{BRANCH_SCHEMA}{USAGE_SCHEMA}PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
    )


def refuse_foreign(
    path: Path, version: int, application: int, *, has_tables: bool, writes: bool = False
) -> None:
    """Raise `ConfigError` for a file that is not a ledger, or has an unsupported version.

    `version` and `application` are the file's user_version and application_id. With `writes`, a
    ledger of one of the UPGRADED_VERSIONS is accepted, too, because opening it upgrades the file.
    """
    if not has_tables and version == 0:
        return
    if application != APPLICATION_ID:
        raise ConfigError(
            f"{path} is not a ledger",
            field="ledger.path",
            hint="it is another program's file; choose another path for the ledger",
        )
    if version == SCHEMA_VERSION or (writes and version in UPGRADED_VERSIONS):
        return
    if version > SCHEMA_VERSION:
        hint = "a newer release of Tailrace has written it: use that release"
    elif version in UPGRADED_VERSIONS:
        hint = "start its origin, or run `tailrace ledger gc`: both upgrade it"
    else:
        hint = (
            "an old release of Tailrace has written it: use that release, or move the file away"
            " with those beside it (-wal, .lock), so that a new ledger is created"
        )
    raise ConfigError(
        f"{path} is a ledger of version {version}, not {SCHEMA_VERSION}",
        field="ledger.path",
        hint=hint,
    )
