"""The connections to a ledger file: one that writes, and those that only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import apsw
import structlog

from tailrace.ledger.errors import ConfigError, Damaged, LedgerAway, TailraceError
from tailrace.ledger.sqlite.disk.checksum import DAMAGED_HINT, add_functions
from tailrace.ledger.sqlite.disk.schema import (
    BRANCH_SCHEMA,
    BUSY_TIMEOUT_MS,
    SCHEMA_VERSION,
    UPGRADED_VERSIONS,
    USAGE_SCHEMA,
    make_schema,
    refuse_foreign,
)
from tailrace.ledger.sqlite.disk.wal_mark import WAL_FRAME_HEADER_BYTES, WAL_HEADER_BYTES
from tailrace.ledger.sqlite.disk.work_thread import WorkThread
from tailrace.ledger.sqlite.encoding import upgraded_batch

LEAST_SQLITE = (3, 51, 3)
WAL_LIMIT_BYTES = 64 * 1024 * 1024
"""Size in bytes to which the WAL file is truncated when the WAL restarts."""
RENEWED_BYTES = 1 << 16
"""Number of bytes that `rewrite_wal` reads and writes at a time."""
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
"""Errors of a read that do not mean damage: a retry may succeed."""
_DAMAGED_IO = (apsw.SQLITE_IOERR_DATA, apsw.SQLITE_IOERR_CORRUPTFS)
"""I/O errors that mean damage: a checksum of the VFS or the file system did not match."""

log = structlog.get_logger("ledger")


def connect_writer(
    path: Path, vfs: str | None, look: Callable[[int], None] = lambda _: None
) -> apsw.Connection:
    """Open the connection that writes; refuse a file of another program.

    A new file gets the schema. `look` is called with the number of whole frames in the WAL, before
    the WAL is changed.
    """
    _refuse_old_sqlite()
    writer = apsw.Connection(str(path), vfs=vfs)
    try:
        writer.set_busy_timeout(BUSY_TIMEOUT_MS)
        version, application = _pragma(writer, "user_version"), _pragma(writer, "application_id")
        has_tables = writer.execute("SELECT 1 FROM sqlite_schema LIMIT 1").get is not None
        refuse_foreign(path, version, application, has_tables=has_tables, writes=True)
        add_functions(writer)
        if version == 0:
            make_schema(writer)
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA synchronous = NORMAL")
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        frames, _ = writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        look(frames)
        # After a failed fsync of an earlier process, pages of the WAL may exist only in the page
        # cache. Write them again before any new commit is acknowledged.
        rewrite_wal(writer, vfs, frames, _pragma(writer, "page_size"))
        writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        if version in UPGRADED_VERSIONS:
            _upgrade(writer, path, version)
    except BaseException:
        skip_checkpoint_on_close(writer)
        writer.close()
        raise
    with suppress(OSError):
        path.chmod(0o600)
    return writer


def connect_reader(path: Path, vfs: str | None) -> apsw.Connection:
    """Open a connection that only reads."""
    reader = apsw.Connection(str(path), vfs=vfs)
    reader.set_busy_timeout(BUSY_TIMEOUT_MS)
    reader.execute("PRAGMA wal_autocheckpoint = 0")
    reader.execute("PRAGMA query_only = 1")
    return reader


def _refuse_old_sqlite() -> None:
    """Refuse an SQLite that is too old: a Linux distribution may link its apsw to one."""
    version = apsw.sqlite_lib_version()
    if tuple(map(int, version.split("."))) < LEAST_SQLITE:
        least = ".".join(map(str, LEAST_SQLITE))
        raise ConfigError(
            f"SQLite {version} may damage a file whose WAL is checkpointed while it grows",
            hint=f"use SQLite {least} or newer, which the wheels of apsw contain",
        )


def _upgrade(writer: apsw.Connection, path: Path, version: int) -> None:
    """Bring a file of layout `version` up to date in one transaction.

    The log rows of layout 6 are rewritten. The segments of layout 6 stay as they are, because their
    `coding` says which layout they have. Layout 7 lacks only the tables of branches and of usage.
    """
    rows: list[Any] = []
    if version == 6:
        rows = [row[0] for row in writer.execute("SELECT seq FROM log").fetchall()]
    writer.execute(f"BEGIN IMMEDIATE;{BRANCH_SCHEMA}{USAGE_SCHEMA}")
    for seq in rows:
        batch: Any = writer.execute("SELECT batch FROM log WHERE seq = ?", (seq,)).get
        upgraded = upgraded_batch(batch)
        if upgraded != batch:  # a damaged row stays as it is
            writer.execute("UPDATE log SET batch = ? WHERE seq = ?", (upgraded, seq))
    writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    writer.execute("COMMIT")
    writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    log.info("ledger.upgraded", path=str(path), version=SCHEMA_VERSION, log_rows=len(rows))


def _pragma(connection: apsw.Connection, name: str) -> int:
    return int(str(connection.execute(f"PRAGMA {name}").get))


def rewrite_wal(writer: apsw.Connection, vfs: str | None, frames: int, page_bytes: int) -> None:
    """Rewrite and sync the first `frames` frames of the WAL in place, before the first checkpoint.

    Linux marks pages of a file as clean even if their sync failed, and another sync does not write
    them. If the power failed during a checkpoint of such a WAL, the database could hold pages from
    the end of the WAL, while the WAL on the disk breaks off before these pages.
    """
    if frames <= 0:
        return
    size = WAL_HEADER_BYTES + frames * (WAL_FRAME_HEADER_BYTES + page_bytes)
    flags = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE
    wal = apsw.VFSFile(vfs or "", writer.filename_wal, [flags, 0])
    try:
        for at in range(0, size, RENEWED_BYTES):
            wal.xWrite(wal.xRead(min(RENEWED_BYTES, size - at), at), at)
        wal.xSync(apsw.SQLITE_SYNC_NORMAL)
    finally:
        wal.xClose()


def skip_checkpoint_on_close(connection: apsw.Connection) -> None:
    """Skip the checkpoint when the last connection closes: pages of the WAL may not be durable."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)


class Lookups:
    """Two connections that only read: one on the calling thread, one on a thread of its own.

    A read raises `Damaged` if the stored data is damaged, and `LedgerAway` if it failed for a
    reason that may pass: a lock, an I/O error, a lack of memory.
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
        """Return the few rows of an indexed lookup, which takes less time than using a thread."""
        return self._rows(self._local, sql, values)

    async def read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return await self._reading.run(partial(self._rows, self._reader, sql, values))

    async def read_past_damage(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """Return the rows that come before the first damaged page."""
        return await self._reading.run(partial(self._rows_before_damage, sql, values))

    def number(self, sql: str, *values: object) -> int:
        """Return the number that a query returns; 0 for NULL."""
        return int(self.look(sql, values)[0][0] or 0)

    async def close(self) -> None:
        """End the thread. The connections stay open: the caller closes all those of the file."""
        await self._reading.close()

    def _rows(self, connection: apsw.Connection, sql: str, values: Sequence[Any]) -> list[Any]:
        try:
            return connection.execute(sql, values).fetchall()
        except READ_ERRORS as error:
            raise read_error(self._path, error) from error

    def _rows_before_damage(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return rows_before_damage(self._path, self._reader, sql, values)


class Snapshot:
    """A connection that reads a snapshot until it is released.

    It never writes and never checkpoints the WAL, not even if it is the last connection to close.
    Its reads raise the same errors as those of `Lookups`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        # Never immutable=1, which would ignore the WAL.
        self.connection = apsw.Connection(f"file:{quote(str(path))}?mode=ro", flags=flags)
        self.connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        skip_checkpoint_on_close(self.connection)

    def look(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return list(self.each(sql, values))

    def each(self, sql: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the rows of a query with a large result."""
        try:
            self._begin()
            yield from self.connection.execute(sql, values)
        except READ_ERRORS as error:
            raise read_error(self._path, error) from error

    async def read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return self.look(sql, values)

    async def read_past_damage(self, sql: str, values: Sequence[Any]) -> list[Any]:
        self._begin()
        return rows_before_damage(self._path, self.connection, sql, values)

    def number(self, sql: str, *values: object) -> int:
        """Return the number that a query returns; 0 for no row and for NULL."""
        rows = self.look(sql, values)
        return int(rows[0][0] or 0) if rows else 0

    def wal_frames(self) -> int:
        """Return how many whole frames SQLite finds in the WAL. No snapshot may be open."""
        # Read anything: before its first read a connection does not know the WAL.
        self.connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        frames, _ = self.connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        return max(0, frames)

    def release(self) -> None:
        """Release the snapshot; later reads use a new one."""
        if self.connection.in_transaction:
            # Not COMMIT, which may fail if a page is damaged.
            self.connection.execute("ROLLBACK")

    def close(self) -> None:
        self.connection.close()

    def _begin(self) -> None:
        if not self.connection.in_transaction:
            self.connection.execute("BEGIN")


class Reads(Protocol):
    """The interface that `Queries` needs; `Lookups` and `Snapshot` implement it."""

    def look(self, sql: str, values: Sequence[Any]) -> list[Any]: ...

    async def read(self, sql: str, values: Sequence[Any]) -> list[Any]: ...

    async def read_past_damage(self, sql: str, values: Sequence[Any]) -> list[Any]: ...


READ_ERRORS = (apsw.Error, MemoryError, UnicodeDecodeError)


def read_error(path: Path, error: Exception) -> TailraceError:
    """Convert the error of a read to `LedgerAway` if a retry may succeed, otherwise `Damaged`."""
    passes = isinstance(error, _TRANSIENT)
    if getattr(error, "extendedresult", None) in _DAMAGED_IO:
        passes = False
    what = str(error) or type(error).__name__
    if passes:
        hint = "try again; if it goes on, check the disk and the memory"
        return LedgerAway(f"{path} cannot be read now: {what}", hint=hint)
    return Damaged(f"{path} cannot be read: {what}", hint=DAMAGED_HINT)


def rows_before_damage(
    path: Path, connection: apsw.Connection, sql: str, values: Sequence[Any]
) -> list[Any]:
    """Return the rows of a query that come before the first damaged page."""
    rows: list[Any] = []
    try:
        rows.extend(connection.execute(sql, values))
    except READ_ERRORS as error:
        told = read_error(path, error)
        if not isinstance(told, Damaged):
            raise told from error
    return rows
