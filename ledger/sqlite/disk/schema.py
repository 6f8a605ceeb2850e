"""The tables of a ledger file, what is done to it when it is opened, and its connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import apsw

from tailrace.ledger.errors import ConfigError, Damaged, LedgerAway, TailraceError
from tailrace.ledger.sqlite.disk.checksum import DAMAGED_HINT, add_functions
from tailrace.ledger.sqlite.disk.opening import (
    APPLICATION_ID,
    BUSY_TIMEOUT_MS,
    SCHEMA_VERSION,
    refuse_foreign,
)
from tailrace.ledger.sqlite.disk.sync import WorkThread
from tailrace.ledger.sqlite.disk.wal import WAL_LIMIT_BYTES, leave, renew

LEAST_SQLITE = (3, 51, 3)
_TRANSIENT = (
    apsw.BusyError,
    apsw.LockedError,
    apsw.IOError,
    apsw.NoMemError,
    apsw.CantOpenError,
    apsw.ProtocolError,
    apsw.InterruptError,
    apsw.FullError,
    MemoryError,
)
"""Errors of a read that do not say that the file is damaged: another try may succeed."""
_DAMAGED_IO = (apsw.SQLITE_IOERR_DATA, apsw.SQLITE_IOERR_CORRUPTFS)
"""I/O errors that do say it: a checksum below SQLite did not match."""

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
    coding  INTEGER NOT NULL,                 -- 0: plain, 1: cold
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


def connect_writer(
    path: Path, vfs: str | None, look: Callable[[int], None] = lambda _: None
) -> apsw.Connection:
    """The connection that writes: makes the schema in a new file, refuses a foreign one.

    Before anything of the WAL is moved or written over, `look` is told how many frames of it
    are whole.
    """
    _refuse_old_sqlite()
    writer = apsw.Connection(str(path), vfs=vfs)
    try:
        writer.set_busy_timeout(BUSY_TIMEOUT_MS)
        version, application = _pragma(writer, "user_version"), _pragma(writer, "application_id")
        has_tables = writer.execute("SELECT 1 FROM sqlite_schema LIMIT 1").get is not None
        refuse_foreign(path, version, application, has_tables=has_tables)
        add_functions(writer)
        if version == 0:
            _make_schema(writer)
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA synchronous = NORMAL")
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        frames, _ = writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        look(frames)
        # What a failed fsync has left in the page cache alone is written anew, before
        # anything is acknowledged that would lie behind it in the WAL.
        renew(writer, vfs, frames, _pragma(writer, "page_size"))
        writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except BaseException:
        leave(writer)
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


def _refuse_old_sqlite() -> None:
    """An apsw that a distribution has built is linked to the system's SQLite."""
    version = apsw.sqlite_lib_version()
    if tuple(map(int, version.split("."))) < LEAST_SQLITE:
        least = ".".join(map(str, LEAST_SQLITE))
        raise ConfigError(
            f"SQLite {version} may damage a file whose WAL is moved while it grows",
            hint=f"it takes {least} or newer, which apsw's own wheels bring",
        )


def _make_schema(writer: apsw.Connection) -> None:
    writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
    writer.execute(
        f"BEGIN;{_SCHEMA}PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
    )


def _pragma(connection: apsw.Connection, name: str) -> int:
    return int(str(connection.execute(f"PRAGMA {name}").get))


class Lookups:
    """Two connections that only read.

    A read raises `Damaged` where what is stored is not whole, and `LedgerAway` where it failed
    for a reason that may pass: a lock, an I/O error, a lack of memory.
    """

    def __init__(self, path: Path, vfs: str | None) -> None:
        self._path = path
        self._local = connect_reader(path, vfs)
        self._reader = connect_reader(path, vfs)
        self._reading = WorkThread("ledger-reader")

    @property
    def connections(self) -> tuple[apsw.Connection, apsw.Connection]:
        return self._local, self._reader

    def look(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """A few rows by index, at once: a hop to a thread would take longer than the lookup."""
        return self._rows(self._local, sql, values)

    async def read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return await self._reading.run(partial(self._rows, self._reader, sql, values))

    async def read_past_damage(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """Return the rows that come before the first damaged page."""
        return await self._reading.run(partial(self._rows_before_damage, sql, values))

    def number(self, sql: str, *values: object) -> int:
        """The one number that a query gives; 0 for none."""
        return int(self.look(sql, values)[0][0] or 0)

    async def close(self) -> None:
        """End the thread; the connections are closed with the others of the file."""
        await self._reading.close()

    def _rows(self, connection: apsw.Connection, sql: str, values: Sequence[Any]) -> list[Any]:
        try:
            return connection.execute(sql, values).fetchall()
        except (apsw.Error, MemoryError, UnicodeDecodeError) as error:
            raise self._explained(error) from error

    def _rows_before_damage(self, sql: str, values: Sequence[Any]) -> list[Any]:
        rows: list[Any] = []
        try:
            rows.extend(self._reader.execute(sql, values))
        except (apsw.Error, MemoryError, UnicodeDecodeError) as error:
            told = self._explained(error)
            if not isinstance(told, Damaged):
                raise told from error
        return rows

    def _explained(self, error: Exception) -> TailraceError:
        """Return the error of a read as one of ours."""
        passes = isinstance(error, _TRANSIENT)
        if getattr(error, "extendedresult", None) in _DAMAGED_IO:
            passes = False
        what = str(error) or type(error).__name__
        if passes:
            hint = "try again; if it goes on, check the disk and the memory"
            return LedgerAway(f"{self._path} cannot be read now: {what}", hint=hint)
        return Damaged(f"{self._path} cannot be read: {what}", hint=DAMAGED_HINT)
