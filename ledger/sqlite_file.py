"""The SQLite file under a ledger: its schema, its two connections, its statements.

One connection writes and checkpoints, the other only reads: SQLite before 3.51.3 can
corrupt a WAL that two connections reset at once. A lock file keeps a second process away.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import aiosqlite

from ledger.errors import ConfigError, LedgerFailed
from ledger.frame import Durability
from ledger.interface import NewStream
from ledger.record import Entry, pack_batch, unpack_batch

SCHEMA_VERSION = 1
APPLICATION_ID = 0x54_52_4C_31  # "TRL1"
BUSY_TIMEOUT_MS = 5_000
WAL_LIMIT_BYTES = 64 * 1024 * 1024
"""The WAL file is cut back to this size after a checkpoint."""
VACUUM_PAGES = 256
"""Free pages given back to the file system per sweep."""

_SCHEMA = """
CREATE TABLE stream (
    sid             INTEGER PRIMARY KEY,      -- short local id, used by log and segment
    id              BLOB    NOT NULL UNIQUE,  -- 16 random bytes, the public id
    epoch           INTEGER NOT NULL,         -- fencing number of the current producer
    ended           INTEGER NOT NULL,         -- 1 once the StreamEnd is in a segment
    durability      INTEGER NOT NULL,
    recipe          TEXT    NOT NULL,         -- what a continuation needs, JSON
    created_ms      INTEGER NOT NULL,         -- Unix time
    ttl_ms          INTEGER NOT NULL,
    expires_ms      INTEGER NOT NULL,         -- Unix time; slides with reads and writes
    idempotency_key TEXT    UNIQUE,
    request_hash    BLOB    NOT NULL
);
CREATE INDEX stream_by_expiry ON stream (expires_ms) WHERE ended = 1;
CREATE INDEX stream_unfinished ON stream (created_ms) WHERE ended = 0;
CREATE TABLE log (seq INTEGER PRIMARY KEY, batch BLOB NOT NULL);
CREATE TABLE segment (
    sid     INTEGER NOT NULL,
    first   INTEGER NOT NULL,                 -- index of its first record
    length  INTEGER NOT NULL,                 -- records in it
    records BLOB    NOT NULL,
    PRIMARY KEY (sid, first)
) WITHOUT ROWID;
"""


class StreamRow(NamedTuple):
    """One row of the table `stream`."""

    sid: int
    id: bytes
    epoch: int
    ended: int
    durability: int
    recipe: str
    created_ms: int
    ttl_ms: int
    expires_ms: int
    idempotency_key: str | None
    request_hash: bytes


class SegmentRow(NamedTuple):
    """One row of the table `segment`."""

    sid: int
    first: int
    length: int
    records: bytes


_STREAM_COLUMNS = ", ".join(StreamRow._fields)


class SqliteFile:
    """The open file. Every method is one transaction; errors come as `LedgerFailed`."""

    def __init__(
        self, path: Path, writer: aiosqlite.Connection, reader: aiosqlite.Connection, lock: int
    ) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._lock = lock
        self._writing = asyncio.Lock()
        self._synchronous_full = False
        self._failure: LedgerFailed | None = None

    @classmethod
    async def open(cls, path: Path) -> SqliteFile:
        """Open or make the file at `path`; `ConfigError` if it is another's or locked."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        try:
            writer = await aiosqlite.connect(path, isolation_level=None)
            try:
                await _prepare(writer, path)
                reader = await aiosqlite.connect(path, isolation_level=None)
                await reader.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
                await reader.execute("PRAGMA wal_autocheckpoint = 0")
                await reader.execute("PRAGMA query_only = 1")
            except BaseException:
                await writer.close()
                raise
        except sqlite3.DatabaseError as error:
            os.close(lock)
            raise ConfigError(f"{path}: {error}", field="ledger.path") from error
        except BaseException:
            os.close(lock)
            raise
        return cls(path, writer, reader, lock)

    async def close(self) -> None:
        async with self._writing:
            await self._reader.close()
            await self._writer.close()
            os.close(self._lock)

    # ---- writing ----

    async def insert_log(self, seq: int, entries: Sequence[Entry], *, power: bool) -> None:
        """Store one group commit; with `power` it is fsynced before this returns."""
        blob = pack_batch(entries)
        async with self._writing:
            await self._set_synchronous(full=power)
            await self._write("INSERT INTO log VALUES (?, ?)", (seq, blob))

    async def insert_stream(self, new: NewStream, created_ms: int) -> StreamRow:
        """Store a new stream at epoch 1; `sqlite3.IntegrityError` if its key is taken."""
        ttl_ms = int(new.ttl_s * 1000)
        values = (
            new.stream,
            1,
            0,
            int(new.durability),
            new.recipe,
            created_ms,
            ttl_ms,
            created_ms + ttl_ms,
            new.idempotency_key,
            new.request_hash,
        )
        async with self._writing:
            await self._set_synchronous(full=new.durability is Durability.POWER)
            cursor = await self._write(
                f"INSERT INTO stream VALUES (NULL{', ?' * len(values)})", values
            )
        assert cursor.lastrowid is not None  # an INSERT always sets it
        return StreamRow(cursor.lastrowid, *values)

    async def set_epoch(self, sid: int, epoch: int) -> None:
        async with self._writing:
            await self._set_synchronous(full=True)
            await self._write("UPDATE stream SET epoch = ? WHERE sid = ?", (epoch, sid))

    async def compact(
        self, segments: Sequence[SegmentRow], ended: Sequence[tuple[int, int]], keep_from: int
    ) -> None:
        """Store segments, mark `(expires_ms, sid)` as ended, prune the log before `keep_from`."""
        await self._transaction(
            ("INSERT INTO segment VALUES (?, ?, ?, ?)", segments),
            ("UPDATE stream SET ended = 1, expires_ms = ? WHERE sid = ?", ended),
            ("DELETE FROM log WHERE seq < ?", [(keep_from,)]),
        )

    async def touch(self, expiries: Sequence[tuple[int, int]]) -> None:
        """Slide `(expires_ms, sid)`."""
        await self._transaction(("UPDATE stream SET expires_ms = ? WHERE sid = ?", expiries))

    async def remove_expired(self, now_ms: int, limit: int) -> list[int]:
        """Remove at most `limit` ended streams past their expiry; returns their sids."""
        rows = await self._read(
            "SELECT sid FROM stream WHERE ended = 1 AND expires_ms <= ?"
            " ORDER BY expires_ms LIMIT ?",
            (now_ms, limit),
        )
        sids = [int(row[0]) for row in rows]
        if sids:
            keys = [(sid,) for sid in sids]
            await self._transaction(
                ("DELETE FROM segment WHERE sid = ?", keys),
                ("DELETE FROM stream WHERE sid = ?", keys),
            )
            async with self._writing:
                await self._write(f"PRAGMA incremental_vacuum({VACUUM_PAGES})", ())
        return sids

    # ---- reading ----

    async def stream_by_id(self, stream: bytes) -> StreamRow | None:
        return await self._stream("id = ?", stream)

    async def stream_by_key(self, idempotency_key: str) -> StreamRow | None:
        return await self._stream("idempotency_key = ?", idempotency_key)

    async def unfinished(self) -> list[StreamRow]:
        """Streams not marked as ended, oldest first (their end may still be in the log)."""
        rows = await self._read(
            f"SELECT {_STREAM_COLUMNS} FROM stream WHERE ended = 0 ORDER BY created_ms, sid", ()
        )
        return [StreamRow(*row) for row in rows]

    async def covered(self, sid: int) -> int:
        """The index after the stream's last segment."""
        rows = await self._read(
            "SELECT first + length FROM segment WHERE sid = ? ORDER BY first DESC LIMIT 1", (sid,)
        )
        return int(rows[0][0]) if rows else 0

    async def segments(self, sid: int, start: int, limit: int) -> list[SegmentRow]:
        """Segments from the one that holds index `start` on, at most `limit`."""
        rows = await self._read(
            "SELECT sid, first, length, records FROM segment WHERE sid = ?1 AND first >= coalesce("
            "(SELECT max(first) FROM segment WHERE sid = ?1 AND first <= ?2), ?2)"
            " ORDER BY first LIMIT ?3",
            (sid, start, limit),
        )
        return [SegmentRow(*row) for row in rows]

    async def log(self) -> list[tuple[int, list[Entry]]]:
        """The whole remaining log in order, for recovery."""
        rows = await self._read("SELECT seq, batch FROM log ORDER BY seq", ())
        return [
            (int(seq), list(unpack_batch(batch, where=f"{self.path}: log row {seq}")))
            for seq, batch in rows
        ]

    async def _stream(self, where: str, value: object) -> StreamRow | None:
        rows = await self._read(f"SELECT {_STREAM_COLUMNS} FROM stream WHERE {where}", (value,))
        return StreamRow(*rows[0]) if rows else None

    # ---- statements ----

    async def _set_synchronous(self, *, full: bool) -> None:
        if full != self._synchronous_full:
            await self._write(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}", ())
            self._synchronous_full = full

    async def _transaction(self, *steps: tuple[str, Sequence[Sequence[object]]]) -> None:
        """Run each statement over its rows, all in one transaction."""

        async def run() -> None:
            async with self._writing:
                await self._write("BEGIN IMMEDIATE", ())
                for sql, rows in steps:
                    await self._write_many(sql, rows)
                await self._write("COMMIT", ())

        # Shielded: a caller that is cancelled must not leave a transaction open, or the
        # commits after it would join it and never be durable.
        await asyncio.shield(asyncio.create_task(run()))

    async def _write(self, sql: str, values: Sequence[object]) -> aiosqlite.Cursor:
        self._check()
        try:
            return await self._writer.execute(sql, values)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise self._broken(error) from error

    async def _write_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        self._check()
        try:
            await self._writer.executemany(sql, rows)
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def _check(self) -> None:
        """After a failed write the state on disk is unknown: no further write is tried."""
        if self._failure is not None:
            raise self._failure

    def _broken(self, error: sqlite3.Error) -> LedgerFailed:
        self._failure = self._failed(error)
        return self._failure

    async def _read(self, sql: str, values: Sequence[object]) -> list[sqlite3.Row]:
        try:
            return list(await self._reader.execute_fetchall(sql, values))
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> LedgerFailed:
        return LedgerFailed(
            f"{self.path}: {error}", hint="see to the disk, then start the origin again"
        )


def _lock(path: Path) -> int:
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


async def _prepare(writer: aiosqlite.Connection, path: Path) -> None:
    """Set the pragmas, make the schema in a new file, refuse a foreign or newer one."""
    await writer.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    version = await _pragma(writer, "user_version")
    application = await _pragma(writer, "application_id")
    tables = list(await writer.execute_fetchall("SELECT 1 FROM sqlite_schema LIMIT 1"))
    if (tables and application != APPLICATION_ID) or version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} is not a ledger of version {SCHEMA_VERSION} (it says {version})",
            field="ledger.path",
            hint="a newer Tailrace wrote it, or it is another program's file",
        )
    if not tables:
        await writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        await writer.executescript(
            f"BEGIN;{_SCHEMA}PRAGMA application_id = {APPLICATION_ID};"
            f"PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
        )
    await writer.execute("PRAGMA journal_mode = WAL")
    await writer.execute("PRAGMA synchronous = NORMAL")
    await writer.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    with suppress(OSError):
        path.chmod(0o600)


async def _pragma(connection: aiosqlite.Connection, name: str) -> int:
    rows = list(await connection.execute_fetchall(f"PRAGMA {name}"))
    return int(rows[0][0])
