"""The tables of a ledger file, and what is done to a file when it is opened."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import apsw

from ledger.errors import ConfigError

SCHEMA_VERSION = 3
APPLICATION_ID = 0x54_52_4C_31  # "TRL1"
BUSY_TIMEOUT_MS = 5_000
WAL_LIMIT_BYTES = 64 * 1024 * 1024
"""The WAL file is cut back to this size when it begins anew."""

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
    cold            INTEGER NOT NULL DEFAULT 0  -- 1 once every segment of an ended stream is
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
    coding  INTEGER NOT NULL,                 -- 0: plain, else the dictionary it is packed with
    records BLOB    NOT NULL,
    PRIMARY KEY (sid, first)
) WITHOUT ROWID;
CREATE INDEX segment_cold ON segment (coding) WHERE coding > 0;
CREATE TABLE dictionary (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
CREATE TABLE object (
    oid           INTEGER PRIMARY KEY,        -- short local id, used by object_value
    kind          TEXT    NOT NULL,
    name          TEXT    NOT NULL,
    epoch         INTEGER NOT NULL,
    alarm_ms      INTEGER,                    -- Unix time
    alarm_retries INTEGER NOT NULL,
    UNIQUE (kind, name)
);
CREATE INDEX object_by_alarm ON object (alarm_ms) WHERE alarm_ms IS NOT NULL;
CREATE TABLE object_value (
    oid   INTEGER NOT NULL,
    name  TEXT    NOT NULL,
    value BLOB    NOT NULL,
    PRIMARY KEY (oid, name)
) WITHOUT ROWID;
"""


def lock(path: Path) -> int:
    """Take the lock file beside `path` for this process; it falls with the process."""
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"{path} is in use by another process",
            field="ledger.path",
            hint="one origin per ledger file; stop the other one or give this one its own path",
        ) from error
    return descriptor


def connect_writer(path: Path, vfs: str | None) -> apsw.Connection:
    """The connection that writes: makes the schema in a new file, refuses a foreign one."""
    writer = apsw.Connection(str(path), vfs=vfs)
    try:
        writer.set_busy_timeout(BUSY_TIMEOUT_MS)
        refuse_foreign(writer, path)
        if _pragma(writer, "user_version") == 0:
            _make_schema(writer)
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA synchronous = NORMAL")
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        # What a failed fsync has left in the page cache alone is written anew, before
        # anything is acknowledged that would lie behind it in the WAL.
        writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except BaseException:
        writer.close()
        raise
    with suppress(OSError):
        path.chmod(0o600)
    return writer


def connect_reader(path: Path, vfs: str | None) -> apsw.Connection:
    """A connection that only reads."""
    reader = apsw.Connection(str(path), vfs=vfs)
    reader.set_busy_timeout(BUSY_TIMEOUT_MS)
    reader.execute("PRAGMA wal_autocheckpoint = 0")
    reader.execute("PRAGMA query_only = 1")
    return reader


def refuse_foreign(writer: apsw.Connection, path: Path) -> None:
    version, application = _pragma(writer, "user_version"), _pragma(writer, "application_id")
    has_tables = writer.execute("SELECT 1 FROM sqlite_schema LIMIT 1").get is not None
    if not has_tables and version == 0:
        return
    if application != APPLICATION_ID:
        raise ConfigError(
            f"{path} is not a ledger",
            field="ledger.path",
            hint="it is another program's file; give the ledger a path of its own",
        )
    if version != SCHEMA_VERSION:
        newer = version > SCHEMA_VERSION
        raise ConfigError(
            f"{path} is a ledger of version {version}, not {SCHEMA_VERSION}",
            field="ledger.path",
            hint="a newer Tailrace wrote it: run that one"
            if newer
            else "a development version wrote it: move it away, a new one is made",
        )


def _make_schema(writer: apsw.Connection) -> None:
    writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
    writer.execute(
        f"BEGIN;{_SCHEMA}PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
    )


def _pragma(connection: apsw.Connection, name: str) -> int:
    return int(str(connection.execute(f"PRAGMA {name}").get))
