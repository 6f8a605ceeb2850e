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
RENEWED_BYTES = 1 << 16
"""Bytes of the WAL that are written anew at once; SQLite's files take less than 128 KiB."""
WAL_HEADER_BYTES = 32
WAL_FRAME_HEADER_BYTES = 24

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
        _renew_wal(writer, vfs)
        writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except BaseException:
        leave_wal(writer)
        writer.close()
        raise
    with suppress(OSError):
        path.chmod(0o600)
    return writer


def leave_wal(connection: apsw.Connection) -> None:
    """Let it not move the WAL when it closes as the last one: some of that may not be durable."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)


def _renew_wal(writer: apsw.Connection, vfs: str | None) -> None:
    """Write the WAL over itself, and sync it, before any of it is moved.

    Linux holds what it has failed to sync for clean, and a further sync does nothing about it.
    If the power failed while such a WAL is moved, a database with pages of its end would meet
    a WAL that breaks off before them.
    """
    frames, _ = writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
    if frames <= 0:
        return
    size = WAL_HEADER_BYTES + frames * (WAL_FRAME_HEADER_BYTES + _pragma(writer, "page_size"))
    flags = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE
    wal = apsw.VFSFile(vfs or "", writer.filename_wal, [flags, 0])
    try:
        for at in range(0, size, RENEWED_BYTES):
            wal.xWrite(wal.xRead(min(RENEWED_BYTES, size - at), at), at)
        wal.xSync(apsw.SQLITE_SYNC_NORMAL)
    finally:
        wal.xClose()


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
