"""The SQLite file under a ledger: its connections, its statements, its WAL.

One connection writes, on the event loop or in a thread, never both at once: a log row is
written on the loop and then synced, without a thread where the system can do that. One reads
single rows on the event loop, one reads segments in a thread. One moves the WAL into the
database in a thread of its own, beside the writer; that is safe since SQLite 3.51.3, which is
why this is apsw, which brings a current SQLite with it, and not the system's. A lock file
keeps a second process away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import apsw

from ledger.errors import ConfigError, Damaged, LedgerFailed
from ledger.interface import ObjectKey
from ledger.sqlite.disk_sync import SyncOf, fill, sync_of
from ledger.sqlite.schema import (
    BUSY_TIMEOUT_MS,
    connect_reader,
    connect_writer,
    leave_wal,
    lock,
)
from ledger.sqlite.storage import Commit, ObjectRow, SegmentRow, StreamRow
from ledger.sqlite.thread import WorkThread
from ledger.sqlite.upkeep import SqliteUpkeep

CHECKPOINT_PAGES = 4_096
"""WAL pages (4 KiB each) after which they are moved into the database in the background."""
CHECKPOINT_REST_PAGES = 64
"""What the writer may be asked to move itself, so that a WAL under load can begin anew."""
WAL_FRAME_BYTES = 4_096 + 24
"""A page in the WAL, with its header."""
MAX_CHECKPOINT_PASSES = 5
"""Passes in the background, each of which has less to move than the one before."""

PATIENT_WAL_PAGES = 3 * CHECKPOINT_PAGES
"""During clean-up the writer is not asked for them before the WAL has so many pages."""

DAMAGED_HINT = "see to the disk; restore the file from a copy"

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]

_STREAM = ", ".join(StreamRow._fields)
_OBJECT = ", ".join(ObjectRow._fields)


def _insert(table: str, columns: int, *, replace: bool = False) -> str:
    verb = "REPLACE" if replace else "INSERT"
    return f"{verb} INTO {table} VALUES ({', '.join('?' * columns)})"


_INSERT_LOG = _insert("log", 2)
_INSERT_STREAM = _insert(f"stream ({_STREAM})", len(StreamRow._fields))
_INSERT_SEGMENT = _insert("segment", len(SegmentRow._fields), replace=True)
_UPSERT_OBJECT = (
    _insert("object", len(ObjectRow._fields)) + " ON CONFLICT (oid) DO UPDATE SET"
    " epoch = excluded.epoch, alarm_ms = excluded.alarm_ms, alarm_retries = excluded.alarm_retries"
)
_PUT_VALUE = _insert("object_value", 3, replace=True)


class SqliteFile:
    """`ledger.sqlite.storage.Storage` on one file. Make it with `open`."""

    def __init__(
        self,
        path: Path,
        writer: apsw.Connection,
        vfs: str | None,
        lock: int,
        wal_sync: SyncOf,
    ) -> None:
        self.path = path
        self._writer = writer
        self._local = connect_reader(path, vfs)
        self._reader = connect_reader(path, vfs)
        # A connection that has never read does not know of the WAL, and moves nothing.
        self._checkpointer = connect_reader(path, vfs)
        self._checkpointer.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        self._lock = lock
        # Open as long as the connections are: closing it would drop their locks (POSIX).
        self._synced = os.open(path, os.O_RDONLY)
        self._full = False
        self._failure: LedgerFailed | None = None
        self._writing = WorkThread("ledger-writer")
        self._reading = WorkThread("ledger-reader")
        self._moving = WorkThread("ledger-checkpoint")
        self._wal = path.with_name(path.name + "-wal")  # there as long as a connection is
        self._wal_sync = wal_sync(self._wal, self._writing, self._failed)
        self._checkpoint: asyncio.Task[None] | None = None
        self._checkpointing = Lock()  # until it is known whether the move has failed
        self._wal_pages = 0
        self._vfs = vfs
        self._filled_wal = False
        self._checkpoint_at = CHECKPOINT_PAGES
        self._finish_checkpoint = False
        self._cutting_wal = False
        self._patient = False
        self.upkeep = SqliteUpkeep(
            path, self._look, self._read, self._settle, self._calm, self._synced
        )
        writer.set_wal_hook(self._after_commit)

    @classmethod
    async def open(
        cls, path: Path, vfs: str | None = None, wal_sync: SyncOf = sync_of
    ) -> SqliteFile:
        """Open or make the file at `path`; `ConfigError` if it is another's or locked.

        With another `vfs` than SQLite's own goes a `wal_sync` that syncs its files.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock(path)
        try:
            writer = connect_writer(path, vfs)
            return cls(path, writer, vfs, descriptor, wal_sync)
        except (apsw.Error, OSError) as error:
            os.close(descriptor)
            raise ConfigError(f"{path}: {error}", field="ledger.path") from error
        except BaseException:
            os.close(descriptor)
            raise

    async def close(self) -> None:
        if self._checkpoint is not None:
            await self._checkpoint
        await self._wal_sync.close()
        for thread in (self._writing, self._reading, self._moving):
            await thread.close()
        # The writer last: who closes last moves the WAL into the database and removes it.
        for connection in (self._local, self._reader, self._checkpointer, self._writer):
            try:
                if self._failure is not None:
                    leave_wal(connection)
                connection.close()
            except apsw.Error as error:
                self._failed(error)
        os.close(self._synced)
        os.close(self._lock)

    # ---- writing ----

    def commit(self, commit: Commit) -> None:
        self._apply(commit, full=False)
        self._maybe_checkpoint()

    def commit_durably(self, commit: Commit, behind: Callable[[], Commit]) -> Awaitable[None]:
        if not commit.only_log or self._finish_checkpoint or not self._filled_wal:
            return self._commit_in_thread(commit, behind())
        # No reader looks at the log, so that it may be written before it is durable.
        self._apply(commit, full=False)
        durable = self._wal_sync.begin()
        self._store_behind(behind())
        return durable

    async def _commit_in_thread(self, commit: Commit, behind: Commit) -> None:
        await self._writing.run(lambda: self._apply(commit, full=True))
        self._store_behind(behind)

    def _store_behind(self, commit: Commit) -> None:
        if not commit.empty:
            self._apply(commit, full=False)
        self._maybe_checkpoint()

    def _apply(self, commit: Commit, *, full: bool) -> None:
        if self._failure is not None:
            # After a failed write the state on disk is unknown: no further one is tried.
            raise self._failure
        writer = self._writer
        try:
            if full and not self._filled_wal:
                self._fill_wal()
            if full != self._full:
                writer.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
                self._full = full
            if self._finish_checkpoint:
                self._end_checkpoint()
            if commit.only_log:
                if commit.log:
                    writer.execute(_INSERT_LOG, (commit.seq, commit.log))
                return
            if steps := _statements(commit):
                writer.execute("BEGIN IMMEDIATE")
                for sql, rows in steps:
                    writer.executemany(sql, rows)
                writer.execute("COMMIT")
            if commit.upkeep:
                self.upkeep.keep_up(writer, commit)
        except apsw.Error as error:
            raise self._failed(error) from error

    # ---- the WAL ----

    def _fill_wal(self) -> None:
        """Give the WAL its usual size before the first commit that waits for the disk.

        SQLite takes zeros behind the end of its WAL for what they are, nothing.
        """
        self._filled_wal = True
        if self._vfs is not None:
            return  # another VFS may keep its files elsewhere
        with suppress(OSError):  # a disk without the room for it is no reason not to commit
            fill(self._wal, CHECKPOINT_PAGES * WAL_FRAME_BYTES)

    def _after_commit(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        if pages < self._wal_pages:  # it has begun anew
            self._checkpoint_at = CHECKPOINT_PAGES
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def _maybe_checkpoint(self) -> None:
        if self._wal_pages >= self._checkpoint_at and self._checkpoint is None:
            self._checkpoint = asyncio.create_task(self._move_wal())

    async def _settle(self, cut: bool) -> None:
        """Move the WAL; the next commit ends that, and cuts the WAL file off if it shall."""
        self._cutting_wal = cut
        if self._checkpoint is None:
            self._checkpoint = asyncio.create_task(self._move_wal())
        await asyncio.shield(self._checkpoint)
        self._patient = False

    async def _calm(self) -> None:
        """Wait for a checkpoint under way; until `_settle` has ended the writer ends none.

        It would wait for the disk twice, on the event loop, and clean-up makes many checkpoints.
        """
        self._patient = True
        if self._checkpoint is not None:
            await asyncio.shield(self._checkpoint)

    @property
    def _is_patient(self) -> bool:
        return self._patient and not self._cutting_wal and self._wal_pages < PATIENT_WAL_PAGES

    def _end_checkpoint(self) -> None:
        """Move the last few pages; a WAL that is to be cut off is, if no reader needs it."""
        self._finish_checkpoint = False
        if not self._checkpointing.acquire(blocking=False):
            return  # the next checkpoint has begun: that one will do
        mode = apsw.SQLITE_CHECKPOINT_PASSIVE
        if self._cutting_wal:
            mode, self._cutting_wal = apsw.SQLITE_CHECKPOINT_TRUNCATE, False
        writer = self._writer
        try:
            writer.set_busy_timeout(0)
            self._move(writer, mode)
        except apsw.BusyError:
            pass  # a reader needs the WAL
        finally:
            self._checkpointing.release()
            writer.set_busy_timeout(BUSY_TIMEOUT_MS)

    async def _move_wal(self) -> None:
        """Move the WAL while the writer goes on adding to it.

        It begins anew only when all of it is moved at some moment. Under load that never
        happens by itself: the writer is asked for the last few pages then. SQLite syncs the
        database only when all is moved, which would be for the writer to wait for, on the
        event loop: what has been moved so far is synced here, in the background.
        """
        self._checkpoint_at = self._wal_pages + CHECKPOINT_PAGES
        try:
            for _ in range(MAX_CHECKPOINT_PASSES):
                moved = await self._moving.run(self._move_and_sync)
                rest = self._wal_pages - moved
                if self._is_patient:
                    if rest > 0:
                        continue  # between two commits the next pass may well get it all
                    break
                if rest <= CHECKPOINT_REST_PAGES:
                    self._finish_checkpoint = True
                    break
        except apsw.BusyError:
            pass  # a reader holds on to an old page
        except LedgerFailed:
            pass  # the next commit raises it
        finally:
            self._checkpoint = None

    def _move_and_sync(self) -> int:
        with self._checkpointing:
            moved = self._move(self._checkpointer, apsw.SQLITE_CHECKPOINT_PASSIVE)
            try:
                os.fdatasync(self._synced)
            except OSError as error:
                raise self._failed(error) from error
            return moved

    def _move(self, connection: apsw.Connection, mode: int) -> int:
        """One checkpoint; never again after one that failed. `_checkpointing` is held.

        A sync that failed has dropped pages that the next one, which succeeds, knows nothing of.
        It would let the WAL begin anew, and nothing would be left to write those pages from.
        """
        if self._failure is not None:
            raise self._failure
        try:
            _, moved = connection.wal_checkpoint(mode=mode)
        except apsw.BusyError:
            raise
        except apsw.Error as error:
            raise self._failed(error) from error
        return moved

    # ---- reading ----

    async def streams_by_sid(self, sids: Sequence[int]) -> list[StreamRow]:
        sql = f"SELECT {_STREAM} FROM stream WHERE sid = ?"
        return [StreamRow(*row) for sid in sids for row in self._look(sql, (sid,))]

    async def stream_by_id(self, stream: bytes) -> StreamRow | None:
        return self._stream("id = ?", stream)

    async def stream_by_key(self, idempotency_key: str) -> StreamRow | None:
        return self._stream("idempotency_key = ?", idempotency_key)

    async def unfinished(self, kind: int) -> list[StreamRow]:
        rows = await self._read(
            f"SELECT {_STREAM} FROM stream WHERE ended = 0 AND kind = ? ORDER BY created_ms, sid",
            (kind,),
        )
        return [StreamRow(*row) for row in rows]

    async def covered(self, sid: int) -> int:
        rows = self._look(
            "SELECT first + length FROM segment WHERE sid = ? ORDER BY first DESC LIMIT 1", (sid,)
        )
        if rows and rows[0][0] is None:  # no column may be NULL: the page has rotted
            raise Damaged(f"{self.path}: a segment of stream {sid} is NULL", hint=DAMAGED_HINT)
        return rows[0][0] if rows else 0

    async def segments(self, sid: int, start: int, limit: int) -> list[SegmentRow]:
        rows = await self._read(
            "SELECT sid, first, length, coding, records FROM segment WHERE sid = ?1"
            " AND first >= coalesce("
            "(SELECT max(first) FROM segment WHERE sid = ?1 AND first <= ?2), ?2)"
            " ORDER BY first LIMIT ?3",
            (sid, start, limit),
        )
        return [SegmentRow(*row) for row in rows]

    async def log(self) -> list[tuple[int, bytes]]:
        return await self._read("SELECT seq, batch FROM log ORDER BY seq", ())

    async def last_numbers(self) -> tuple[int, int]:
        rows = self._look(
            "SELECT max((SELECT coalesce(max(sid), 0) FROM stream),"
            " (SELECT coalesce(max(sid), 0) FROM segment),"
            " (SELECT coalesce(max(sid), 0) FROM removed)),"
            " (SELECT coalesce(max(oid), 0) FROM object)",
            (),
        )
        return int(rows[0][0]), int(rows[0][1])

    async def expired(self, kind: int, now_ms: int, limit: int) -> list[int]:
        rows = self._look(
            "SELECT sid FROM stream WHERE ended = 1 AND kind = ? AND expires_ms <= ?"
            " ORDER BY expires_ms LIMIT ?",
            (kind, now_ms, limit),
        )
        return [row[0] for row in rows]

    async def object_row(self, key: ObjectKey) -> ObjectRow | None:
        rows = self._look(f"SELECT {_OBJECT} FROM object WHERE kind = ? AND name = ?", key)
        return ObjectRow(*rows[0]) if rows else None

    async def values(self, oid: int, names: Sequence[str]) -> list[tuple[str, bytes]]:
        sql = "SELECT name, value FROM object_value WHERE oid = ? AND name = ?"
        return [row for name in names for row in self._look(sql, (oid, name))]

    async def value_range(
        self, oid: int, start: str, end: str | None, limit: int, *, reverse: bool
    ) -> list[tuple[str, bytes]]:
        below = "" if end is None else " AND name < ?3"
        order = "DESC" if reverse else "ASC"
        return await self._read(
            "SELECT name, value FROM object_value WHERE oid = ?1 AND name >= ?2"
            f"{below} ORDER BY name {order} LIMIT ?4",
            (oid, start, end, limit),
        )

    async def alarms(self, now_ms: int, limit: int) -> list[ObjectRow]:
        rows = self._look(
            f"SELECT {_OBJECT} FROM object WHERE alarm_ms <= ? ORDER BY alarm_ms, oid LIMIT ?",
            (now_ms, limit),
        )
        return [ObjectRow(*row) for row in rows]

    async def next_alarm_ms(self) -> int | None:
        rows = self._look("SELECT min(alarm_ms) FROM object WHERE alarm_ms IS NOT NULL", ())
        return None if rows[0][0] is None else int(rows[0][0])

    async def object_names(self, kind: str, after: str, limit: int) -> list[str]:
        rows = await self._read(
            "SELECT name FROM object WHERE kind = ? AND name > ? AND (alarm_ms IS NOT NULL"
            " OR EXISTS (SELECT 1 FROM object_value WHERE object_value.oid = object.oid))"
            " ORDER BY name LIMIT ?",
            (kind, after, limit),
        )
        return [row[0] for row in rows]

    def _stream(self, where: str, value: object) -> StreamRow | None:
        rows = self._look(f"SELECT {_STREAM} FROM stream WHERE {where}", (value,))
        return StreamRow(*rows[0]) if rows else None

    def _look(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """A few rows by index, at once: a hop to a thread would take longer than the lookup."""
        return self._guard(lambda: self._local.execute(sql, values).fetchall())

    async def _read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return await self._reading.run(
            lambda: self._guard(lambda: self._reader.execute(sql, values).fetchall())
        )

    def _guard(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except apsw.Error as error:
            raise Damaged(f"{self.path} cannot be read: {error}", hint=DAMAGED_HINT) from error

    @property
    def name(self) -> str:
        return str(self.path)

    def _failed(self, error: apsw.Error | OSError) -> LedgerFailed:
        """What nothing is written after; `_failure` from now on."""
        self._failure = LedgerFailed(
            f"{self.path}: {error}", hint="see to the disk, then start the origin again"
        )
        return self._failure


def _statements(commit: Commit) -> list[tuple[str, Rows]]:
    """The statements of a commit, each with its rows, in their order."""
    steps: list[tuple[str, Rows]] = [
        # Removed first: the id of a stream may be given to another one in the same commit.
        ("INSERT OR IGNORE INTO removed VALUES (?)", [(sid,) for sid in commit.removed]),
        ("DELETE FROM stream WHERE sid = ?", [(sid,) for sid in commit.removed]),
        (_INSERT_STREAM, commit.streams),
        ("UPDATE stream SET epoch = ? WHERE sid = ?", commit.epochs),
        (_INSERT_LOG, [(commit.seq, commit.log)] if commit.log else ()),
        ("INSERT INTO dictionary VALUES (?, ?)", commit.dictionaries),
        ("DELETE FROM segment WHERE sid = ? AND first >= ? AND first < ?", commit.replaced),
        (_INSERT_SEGMENT, commit.segments),
        ("UPDATE stream SET ended = 1, expires_ms = ? WHERE sid = ?", commit.ended),
        ("UPDATE stream SET expires_ms = max(expires_ms, ?) WHERE sid = ?", commit.touched),
        ("UPDATE stream SET cold = 1 WHERE sid = ?", [(sid,) for sid in commit.cold]),
        ("DELETE FROM dictionary WHERE id = ?", [(number,) for number in commit.unused]),
        (_UPSERT_OBJECT, commit.objects),
    ]
    for oid, name, value in commit.values:
        if name is None:
            steps.append(("DELETE FROM object_value WHERE oid = ?", [(oid,)]))
        elif value is None:
            steps.append(("DELETE FROM object_value WHERE oid = ? AND name = ?", [(oid, name)]))
        else:
            steps.append((_PUT_VALUE, [(oid, name, value)]))
    if commit.keep_from is not None:
        steps.append(("DELETE FROM log WHERE seq < ?", [(commit.keep_from,)]))
    return [step for step in steps if step[1]]
