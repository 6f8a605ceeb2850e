"""The SQLite file under a ledger: its connections and its statements.

One connection writes, on the event loop or in a thread, never both at once: a log row is
written on the loop and then synced, without a thread where the system can do that. Two read
(`Lookups`). One moves the WAL (`wal`) into the database in a thread of its own, beside the
writer; that is safe since SQLite 3.51.3, which is why this is apsw, which brings a current
SQLite with it, and not the system's. Locks keep a second process away, by whatever name it comes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import structlog

from tailrace.ledger.errors import ConfigError, Damaged, LedgerAway
from tailrace.ledger.interface import ObjectKey, StreamKind, ValueRange
from tailrace.ledger.sqlite.capacity import ROW_BYTES
from tailrace.ledger.sqlite.disk.checksum import (
    DAMAGED_HINT,
    OBJECT_COLUMNS,
    STREAM_COLUMNS,
    VALUE_COLUMNS,
    checked_object,
    checked_stream,
    checked_value,
    crc_of,
    restated,
    stream_crc,
)
from tailrace.ledger.sqlite.disk.opening import HighWater, OpenFiles, is_full, lock
from tailrace.ledger.sqlite.disk.schema import Lookups, connect_reader, connect_writer
from tailrace.ledger.sqlite.disk.sync import SyncOf, WorkThread, sync_of
from tailrace.ledger.sqlite.disk.wal import Wal, leave
from tailrace.ledger.sqlite.storage import Commit, ObjectRow, SegmentRow, Sizes, StreamRow

RECLAIM_BYTES = 128 * 1024
"""Bytes of segments that are taken away in one slice; one segment alone may have more."""

COUNTED_STREAMS = 256
"""Streams whose segments are counted at once, so that readers need not wait for long,"""
COUNTED_OBJECTS = 1_024
"""or objects whose values are."""

Rows = Sequence[Sequence[Any]]

log = structlog.get_logger("ledger")


def _insert(table: str, columns: int, *, replace: bool = False) -> str:
    verb = "REPLACE" if replace else "INSERT"
    return f"{verb} INTO {table} VALUES ({', '.join('?' * columns)})"


_INSERT_LOG = _insert("log", 2)
_INSERT_STREAM = _insert(
    f"stream ({', '.join(StreamRow._fields)}, crc)", len(StreamRow._fields) + 1
)
_SET_EPOCH = f"UPDATE stream SET epoch = ?1, crc = {restated(epoch='?1')} WHERE sid = ?2"
_SET_ENDED = (
    "UPDATE stream SET ended = 1, expires_ms = ?1,"
    f" crc = {restated(ended='1', expires_ms='?1')} WHERE sid = ?2"
)
_SET_EXPIRY = (
    f"UPDATE stream SET expires_ms = ?1, crc = {restated(expires_ms='?1')}"
    " WHERE sid = ?2 AND expires_ms < ?1"
)
_INSERT_SEGMENT = _insert("segment", len(SegmentRow._fields), replace=True)
_UPSERT_OBJECT = (
    _insert("object", len(ObjectRow._fields) + 1) + " ON CONFLICT (oid) DO UPDATE SET"
    " epoch = excluded.epoch, alarm_ms = excluded.alarm_ms,"
    " alarm_retries = excluded.alarm_retries, crc = excluded.crc"
)
_PUT_VALUE = _insert("object_value", 4, replace=True)
_SIDS = (
    "SELECT sid FROM stream WHERE ended = 0 AND kind = ?"
    " UNION ALL SELECT sid FROM stream WHERE ended = 1 AND kind = ?"
)
# Some bytes of a large segment lie on a page with others, the rest on pages of its own.
_SEGMENTS_TAKE = (
    "SELECT coalesce(sum(700 + (length(records) + 3602) / 4092 * 4096), 0) FROM segment"
    " WHERE sid IN (SELECT value FROM json_each(?))"
)
_VALUES_TAKE = (
    f"SELECT coalesce(sum(length(name) + length(value) + {ROW_BYTES}), 0) FROM object_value"
    " WHERE oid > ? AND oid <= ?"
)

_HAS_GARBAGE = "SELECT EXISTS (SELECT 1 FROM removed)"
# A blob's last byte lies on the last of its pages, and the way there leads over all of them.
_TOUCH_GARBAGE = (
    "SELECT substr(records, -1) FROM removed JOIN segment USING (sid)"
    " ORDER BY removed.sid, first LIMIT ?"
)


class SqliteFile:
    """`tailrace.ledger.sqlite.storage.Storage` on one file. Make it with `open`."""

    def __init__(
        self,
        path: Path,
        writer: apsw.Connection,
        vfs: str | None,
        locks: tuple[int, int],
        wal_sync: SyncOf,
        high_water: HighWater,
    ) -> None:
        self.path, self.name = path, str(path)
        self._writer = writer
        self._lookups = Lookups(path, vfs)
        self._checkpointer = connect_reader(path, vfs)
        # Open as long as the connections are: closing it would drop their locks (POSIX).
        self._synced, self._lock = locks
        self._full = False
        self._told_damage = ""  # the last error of reading the unfinished streams
        self._writing = WorkThread("ledger-writer")
        self._files = OpenFiles(path, Path(writer.filename_wal))
        self._wal = Wal(self._files, writer, self._checkpointer, vfs, self._synced, high_water)
        self._wal_sync = wal_sync(self._wal.path, self._writing, self._files.failed)
        self.upkeep = SqliteUpkeep(path, self._lookups, self._wal, self._files, self._synced)

    @classmethod
    async def open(
        cls, path: Path, vfs: str | None = None, wal_sync: SyncOf = sync_of
    ) -> SqliteFile:
        """Open or make the file at `path`; `ConfigError` if it is another's or locked.

        With another `vfs` than SQLite's own goes a `wal_sync` that syncs its files.
        """
        link, path = path, Path(os.path.realpath(path))
        # From here on as SQLite does, which puts its WAL beside what a link points to.
        if link.is_symlink() and not path.parent.is_dir():
            raise ConfigError(
                f"{link} is a link to {path}, and there is no folder {path.parent}",
                field="ledger.path",
                hint="is its disk mounted? mount it, or make the folder",
            )
        locks: tuple[int, int] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            locks = lock(path)
            high_water = HighWater(path, locks[1] if vfs is None else None)
            writer = connect_writer(path, vfs, high_water.look)
            return cls(path, writer, vfs, locks, wal_sync, high_water)
        except BaseException as error:
            for descriptor in locks or ():
                os.close(descriptor)
            if not isinstance(error, apsw.Error | OSError):
                raise
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            hint = "give the ledger a folder that can be written"
            if is_full(error):
                hint = f"free some space on the disk of {path.parent}"
            raise ConfigError(f"{path}: {why}", field="ledger.path", hint=hint) from error

    async def close(self) -> None:
        await self._wal.rest()
        await self._wal_sync.close()
        await self._writing.close()
        await self._lookups.close()
        await self._wal.close()
        # The writer last: who closes last moves the WAL into the database and removes it.
        for connection in (*self._lookups.connections, self._checkpointer, self._writer):
            try:
                if self._files.failure is not None:
                    leave(connection)
                connection.close()
            except apsw.Error as error:
                self._files.failed(error)
        os.close(self._synced)
        os.close(self._lock)

    # ---- writing ----

    def commit(self, commit: Commit) -> None:
        self._apply(commit, full=False)
        self._wal.move_if_due()

    def commit_durably(self, commit: Commit, behind: Callable[[], Commit]) -> Awaitable[None]:
        if not commit.only_log or self._wal.asks_writer or not self._wal.filled:
            return self._commit_in_thread(commit, behind())
        # No reader looks at the log, so that it may be written before it is durable.
        self._apply(commit, full=False)
        durable = self._wal_sync.begin()
        self._store_behind(behind())
        return durable

    @property
    def waits(self) -> bool:
        return self._wal.asks_writer  # which syncs twice

    async def _commit_in_thread(self, commit: Commit, behind: Commit) -> None:
        await self._writing.run(lambda: self._apply(commit, full=commit.power))
        self._store_behind(behind)

    def _store_behind(self, commit: Commit) -> None:
        if not commit.empty:
            self._apply(commit, full=False)
        self._wal.move_if_due()

    def _apply(self, commit: Commit, *, full: bool) -> None:
        self._files.check()
        writer = self._writer
        try:
            if full and not self._wal.filled:
                self._wal.fill()
            if full != self._full:
                writer.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
                self._full = full
            if self._wal.asks_writer:
                self._wal.end_checkpoint()
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
            raise self._files.failed(error) from error

    # ---- reading ----

    async def stream_by_sid(self, sid: int) -> StreamRow | None:
        return self._stream("sid = ?", sid)

    async def stream_by_id(self, stream: bytes) -> StreamRow | None:
        return self._stream("id = ?", stream)

    async def stream_by_key(self, idempotency_key: str) -> StreamRow | None:
        return self._stream("idempotency_key = ?", idempotency_key)

    async def unfinished(self, kind: int) -> list[tuple[int, bytes]]:
        sql = "SELECT sid, id FROM stream WHERE ended = 0 AND kind = ? ORDER BY created_ms, sid"
        try:
            rows = await self._lookups.read(sql, (kind,))
        except Damaged as error:
            rows = await self._unfinished_past_damage(kind, error)
        return [(sid, id_) for sid, id_ in rows if isinstance(id_, bytes)]

    async def _unfinished_past_damage(self, kind: int, error: Damaged) -> list[Any]:
        """Return the unfinished streams that a damaged page does not hide.

        The table is read without its index, once from each end as far as the damage.
        """
        sql = "SELECT sid, id FROM stream NOT INDEXED WHERE ended = 0 AND kind = ? ORDER BY sid"
        read = self._lookups.read_past_damage
        found = {*await read(sql, (kind,)), *await read(f"{sql} DESC", (kind,))}
        if str(error) != self._told_damage:  # it is asked twice a second
            self._told_damage = str(error)
            log.error("ledger.damaged", error=error.message, unfinished_found=len(found))
        return sorted(found)

    async def covered(self, sid: int) -> int:
        rows = self._lookups.look(
            "SELECT first + length FROM segment WHERE sid = ? ORDER BY first DESC LIMIT 1", (sid,)
        )
        if rows and rows[0][0] is None:  # no column may be NULL: the page has rotted
            raise Damaged(f"{self.path}: a segment of stream {sid} is NULL", hint=DAMAGED_HINT)
        return rows[0][0] if rows else 0

    async def segments(self, sid: int, start: int, limit: int) -> list[SegmentRow]:
        rows = await self._lookups.read(
            "SELECT sid, first, length, coding, records FROM segment WHERE sid = ?1"
            " AND first >= coalesce("
            "(SELECT max(first) FROM segment WHERE sid = ?1 AND first <= ?2), ?2)"
            " ORDER BY first LIMIT ?3",
            (sid, start, limit),
        )
        return [SegmentRow(*row) for row in rows]

    async def log_rows(self) -> list[int]:
        return [row[0] for row in await self._lookups.read("SELECT seq FROM log ORDER BY seq", ())]

    async def log(self, rows: Sequence[int]) -> list[bytes]:
        numbers = ", ".join(map(str, rows))
        found = await self._lookups.read(
            f"SELECT batch FROM log WHERE seq IN ({numbers}) ORDER BY seq", ()
        )
        return [row[0] for row in found]

    async def last_numbers(self) -> tuple[int, int]:
        rows = self._lookups.look(
            "SELECT max((SELECT coalesce(max(sid), 0) FROM stream),"
            " (SELECT coalesce(max(sid), 0) FROM segment),"
            " (SELECT coalesce(max(sid), 0) FROM removed)),"
            " (SELECT coalesce(max(oid), 0) FROM object)",
            (),
        )
        return int(rows[0][0]), int(rows[0][1])

    async def expired(self, kind: int, now_ms: int, limit: int) -> list[int]:
        rows = self._lookups.look(
            "SELECT sid FROM stream WHERE ended = 1 AND kind = ? AND expires_ms <= ?"
            " ORDER BY expires_ms LIMIT ?",
            (kind, now_ms, limit),
        )
        return [row[0] for row in rows]

    async def object_row(self, key: ObjectKey) -> ObjectRow | None:
        rows = self._lookups.look(
            f"SELECT {OBJECT_COLUMNS} FROM object WHERE kind = ? AND name = ?", key
        )
        return checked_object(rows[0]) if rows else None

    async def values(self, oid: int, names: Sequence[str]) -> list[tuple[str, bytes]]:
        sql = f"SELECT {VALUE_COLUMNS} FROM object_value WHERE oid = ? AND name = ?"
        rows = [row for name in names for row in self._lookups.look(sql, (oid, name))]
        return [checked_value(oid, row) for row in rows]

    async def value_range(self, oid: int, wanted: ValueRange) -> list[tuple[str, bytes]]:
        below = "" if wanted.beyond is None else " AND name < ?3"
        order = "DESC" if wanted.reverse else "ASC"
        rows = await self._lookups.read(
            f"SELECT {VALUE_COLUMNS} FROM object_value WHERE oid = ?1 AND name >= ?2"
            f"{below} ORDER BY name {order} LIMIT ?4",
            (oid, wanted.first, wanted.beyond, wanted.limit),
        )
        return [checked_value(oid, row) for row in rows]

    async def alarms(self, now_ms: int, limit: int) -> list[ObjectRow]:
        rows = self._lookups.look(
            f"SELECT {', '.join(ObjectRow._fields)} FROM object WHERE alarm_ms <= ?"
            " ORDER BY alarm_ms, oid LIMIT ?",
            (now_ms, limit),
        )
        return [ObjectRow(*row) for row in rows]

    async def object_names(self, kind: str, after: str, limit: int) -> list[str]:
        rows = await self._lookups.read(
            "SELECT name FROM object WHERE kind = ? AND name > ? AND (alarm_ms IS NOT NULL"
            " OR EXISTS (SELECT 1 FROM object_value WHERE object_value.oid = object.oid))"
            " ORDER BY name LIMIT ?",
            (kind, after, limit),
        )
        return [row[0] for row in rows]

    def _stream(self, where: str, value: object) -> StreamRow | None:
        rows = self._lookups.look(f"SELECT {STREAM_COLUMNS} FROM stream WHERE {where}", (value,))
        return checked_stream(rows[0]) if rows else None


def _statements(commit: Commit) -> list[tuple[str, Rows]]:
    """The statements of a commit, each with its rows, in their order."""
    steps: list[tuple[str, Rows]] = [
        # Removed first: the id of a stream may be given to another one in the same commit.
        ("INSERT OR IGNORE INTO removed VALUES (?)", [(sid,) for sid in commit.removed]),
        ("DELETE FROM stream WHERE sid = ?", [(sid,) for sid in commit.removed]),
        (_INSERT_STREAM, [(*row, stream_crc(row)) for row in commit.streams]),
        (_SET_EPOCH, commit.epochs),
        (_INSERT_LOG, [(commit.seq, commit.log)] if commit.log else ()),
        ("DELETE FROM segment WHERE sid = ? AND first >= ? AND first < ?", commit.replaced),
        (_INSERT_SEGMENT, commit.segments),
        (_SET_ENDED, commit.ended),
        (_SET_EXPIRY, commit.touched),
        ("UPDATE stream SET cold = 1 WHERE sid = ?", [(sid,) for sid in commit.cold]),
        (_UPSERT_OBJECT, [(*row, crc_of(row)) for row in commit.objects]),
    ]
    for oid, name, value in commit.values:
        if name is None:
            steps.append(("DELETE FROM object_value WHERE oid = ?", [(oid,)]))
        elif value is None:
            steps.append(("DELETE FROM object_value WHERE oid = ? AND name = ?", [(oid, name)]))
        else:
            steps.append((_PUT_VALUE, [(oid, name, value, crc_of((oid, name, value)))]))
    if commit.keep_from is not None:
        steps.append(("DELETE FROM log WHERE seq < ?", [(commit.keep_from,)]))
    return [step for step in steps if step[1]]


# ---- how the file is kept small ----


class SqliteUpkeep:
    """`ledger.sqlite.storage.Upkeep` on the connections of a `SqliteFile`.

    A removed stream's row goes at once and leaves its sid in the table `removed`; its segments
    go a few with each commit that says so, also after a restart. Then free pages at the end of
    the file are given back, a few at a time (`auto_vacuum = INCREMENTAL`). `descriptor` is of
    the file, to tell the system what will be read.
    """

    def __init__(
        self, path: Path, lookups: Lookups, wal: Wal, files: OpenFiles, descriptor: int
    ) -> None:
        self._path = path
        self._lookups = lookups
        self._wal = wal
        self.check, self.settle, self.calm = files.check_names, wal.settle, wal.calm
        self._descriptor = descriptor
        self._page_bytes = lookups.number("PRAGMA page_size")
        self._damage: str | None = None

    # ---- for the writer ----

    def keep_up(self, writer: apsw.Connection, commit: Commit) -> None:
        """The slices of clean-up that a commit asks for, in a transaction of their own.

        A damaged page ends all clean-up until the next start, and nothing else: what the
        commit holds besides is stored by then.
        """
        if self._damage is not None:
            return
        try:
            writer.execute("BEGIN IMMEDIATE")
            if commit.reclaim:
                _reclaim(writer, commit.reclaim)
            if commit.vacuum:
                writer.execute(f"PRAGMA incremental_vacuum({commit.vacuum})").fetchall()
            writer.execute("COMMIT")
        except apsw.CorruptError as error:
            if writer.in_transaction:
                writer.execute("ROLLBACK")
            self._damage = str(error)
            log.error("ledger.cannot_clean_up", path=str(self._path), error=self._damage)

    # ---- what there is ----

    def sizes(self) -> Sizes:
        try:
            disk = os.statvfs(self._path.parent)
        except OSError as error:
            self.check()  # says which of the files is gone, if one is
            raise LedgerAway(f"{self._path.parent}: {error.strerror or error}") from error
        file_bytes = self._lookups.number("PRAGMA page_count") * self._page_bytes
        return Sizes(
            file_bytes=file_bytes,
            free_bytes=self._lookups.number("PRAGMA freelist_count") * self._page_bytes,
            wal_bytes=self._wal.size_bytes,
            unmoved_bytes=max(0, file_bytes - os.fstat(self._descriptor).st_size),
            disk_bytes=disk.f_blocks * disk.f_frsize,
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            garbage=self._damage is None and self._lookups.number(_HAS_GARBAGE) > 0,
            wal_room_bytes=self._wal.room_bytes,
        )

    @property
    def written_bytes(self) -> int:
        return self._wal.written_bytes

    async def object_bytes(self) -> int:
        kind = int(StreamKind.OBJECT)
        sids = [row[0] for row in await self._lookups.read(_SIDS, (kind, kind))]
        total = len(sids) * ROW_BYTES
        for at in range(0, len(sids), COUNTED_STREAMS):
            few = json.dumps(sids[at : at + COUNTED_STREAMS])
            total += (await self._lookups.read(_SEGMENTS_TAKE, (few,)))[0][0]
        last_oid = self._lookups.number("SELECT max(oid) FROM object_value")
        for oid in range(0, last_oid, COUNTED_OBJECTS):
            total += (await self._lookups.read(_VALUES_TAKE, (oid, oid + COUNTED_OBJECTS)))[0][0]
        return total

    async def stored_bytes(self, sid: int) -> int:
        return self._lookups.number("SELECT sum(length(records)) FROM segment WHERE sid = ?", sid)

    async def to_pack(self, before_ms: int, limit: int) -> list[int]:
        rows = self._lookups.look(
            "SELECT sid FROM stream WHERE ended = 1 AND cold = 0 AND expires_ms - ttl_ms <= ?"
            " ORDER BY expires_ms - ttl_ms LIMIT ?",
            (before_ms, limit),
        )
        return [row[0] for row in rows]

    async def fetch(self, *, reclaim: int, vacuum: int) -> None:
        with suppress(Damaged, LedgerAway):  # the slice itself reads the same pages
            if reclaim:
                await self._lookups.read(_TOUCH_GARBAGE, (reclaim,))
        if vacuum and hasattr(os, "posix_fadvise"):
            size = vacuum * self._page_bytes
            begin = max(0, self._lookups.number("PRAGMA page_count") * self._page_bytes - size)
            os.posix_fadvise(self._descriptor, begin, size, os.POSIX_FADV_WILLNEED)


def _reclaim(writer: apsw.Connection, limit: int) -> None:
    gone: list[tuple[int, int]] = []
    done: list[tuple[int]] = []
    size = 0
    rows: list[Any] = writer.execute(
        "SELECT removed.sid, first, length(records) FROM removed LEFT JOIN segment USING (sid)"
        " ORDER BY removed.sid, first LIMIT ?",
        (limit,),
    ).fetchall()
    for sid, first, length in rows:
        if first is None:
            done.append((sid,))
            continue
        gone.append((sid, first))
        size += length
        if size >= RECLAIM_BYTES:
            break
    writer.executemany("DELETE FROM segment WHERE sid = ? AND first = ?", gone)
    writer.executemany("DELETE FROM removed WHERE sid = ?", done)
