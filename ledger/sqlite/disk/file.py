"""The SQLite file under a ledger: its connections and its statements.

- One connection writes, on the event loop or in a thread, but never in both at once. A log row is
  written on the event loop and then synced, without a thread if the system supports that.
- Two connections read (`Lookups`).
- One connection checkpoints the WAL in a thread of its own, concurrently with the writer. That is
  safe since SQLite 3.51.3. The wheels of apsw contain such a version; a system's SQLite may be
  older.

Locks keep other processes from opening the file, whatever path they use.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import apsw
import structlog

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.sqlite.disk.checkpointer import Checkpointer
from tailrace.ledger.sqlite.disk.connections import (
    Lookups,
    connect_reader,
    connect_writer,
    skip_checkpoint_on_close,
)
from tailrace.ledger.sqlite.disk.disk_sync import SyncOf, sync_of
from tailrace.ledger.sqlite.disk.file_locks import lock
from tailrace.ledger.sqlite.disk.maintenance import SqliteMaintenance
from tailrace.ledger.sqlite.disk.open_files import OpenFiles, is_full
from tailrace.ledger.sqlite.disk.queries import Queries
from tailrace.ledger.sqlite.disk.statements import INSERT_LOG, statements
from tailrace.ledger.sqlite.disk.wal import Wal
from tailrace.ledger.sqlite.disk.wal_mark import WalMark
from tailrace.ledger.sqlite.disk.work_thread import WorkThread
from tailrace.ledger.sqlite.storage import Commit

log = structlog.get_logger("ledger")


class SqliteFile(Queries):
    """Implements `tailrace.ledger.sqlite.storage.Storage` in one file; create it with `open`."""

    def __init__(
        self,
        path: Path,
        writer: apsw.Connection,
        vfs: str | None,
        locks: tuple[int, int],
        wal_sync: SyncOf,
        mark: WalMark,
    ) -> None:
        self._lookups = Lookups(path, vfs)
        super().__init__(path, self._lookups)
        self.name = str(path)
        self._writer = writer
        # Open as long as the connections: closing a descriptor drops their POSIX locks.
        self._synced, self._lock = locks
        self._full = False
        self._writing = WorkThread("ledger-writer")
        self._files = OpenFiles(path, Path(writer.filename_wal))
        reader = self._checkpoint_reader = connect_reader(path, vfs)
        self._checkpointer = Checkpointer(self._files, writer, reader, self._synced)
        self._mark = mark
        self._wal = Wal(writer, self._checkpointer, vfs, mark)
        self._wal_sync = wal_sync(self._wal.path, self._writing, self._files.failed)
        self.maintenance = SqliteMaintenance(
            path, self._lookups, self._wal, self._checkpointer, self._files, self._synced
        )

    @classmethod
    async def open(
        cls, path: Path, vfs: str | None = None, wal_sync: SyncOf = sync_of
    ) -> SqliteFile:
        """Open or create the file at `path`.

        A custom `vfs` needs a `wal_sync` that can sync its files.

        Raises:
            ConfigError: The file belongs to another program, is locked, or cannot be opened.
        """
        # Resolve links like SQLite, which puts the WAL next to the file that a link points to.
        link, path = path, Path(os.path.realpath(path))
        if link.is_symlink() and not path.parent.is_dir():
            raise ConfigError(
                f"{link} is a link to {path}, and there is no folder {path.parent}",
                field="ledger.path",
                hint="mount the disk of that folder, or create the folder",
            )
        locks: tuple[int, int] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            locks = lock(path)
            mark = WalMark(path, locks[1] if vfs is None else None)
            writer = connect_writer(path, vfs, mark.check)
            return cls(path, writer, vfs, locks, wal_sync, mark)
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
        await self._checkpointer.wait()
        await self._wal_sync.close()
        await self._writing.close()
        await self._lookups.close()
        await self._checkpointer.close()
        if self._files.failure is None:
            self._mark.clear()
        # The writer is closed last, because SQLite checkpoints and removes the WAL when the last
        # connection closes.
        for connection in (*self._lookups.connections, self._checkpoint_reader, self._writer):
            try:
                if self._files.failure is not None:
                    skip_checkpoint_on_close(connection)
                connection.close()
            except apsw.Error as error:
                self._files.failed(error)
        os.close(self._synced)
        os.close(self._lock)

    # ---- writing ----

    def commit(self, commit: Commit) -> None:
        self._apply(commit, full=False)
        self._checkpointer.begin_if_due()

    def commit_durably(self, commit: Commit, behind: Callable[[], Commit]) -> Awaitable[None]:
        if not commit.only_log or self._checkpointer.asks_writer or not self._wal.filled:
            return self._commit_in_thread(commit, behind())
        # The row of the log may be visible before it is durable, because no reader reads the log.
        self._apply(commit, full=False)
        durable = self._wal_sync.begin()
        self._store_behind(behind())
        return durable

    @property
    def waits(self) -> bool:
        return self._checkpointer.asks_writer  # finishing a checkpoint waits for two syncs

    async def _commit_in_thread(self, commit: Commit, behind: Commit) -> None:
        await self._writing.run(lambda: self._apply(commit, full=commit.power))
        self._store_behind(behind)

    def _store_behind(self, commit: Commit) -> None:
        if not commit.empty:
            self._apply(commit, full=False)
        self._checkpointer.begin_if_due()

    def _apply(self, commit: Commit, *, full: bool) -> None:
        self._files.check()
        writer = self._writer
        try:
            if full and not self._wal.filled:
                self._wal.fill()
            if full != self._full:
                writer.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
                self._full = full
            if self._checkpointer.asks_writer:
                self._wal.finish_checkpoint()
            if commit.only_log:
                if commit.log:
                    writer.execute(INSERT_LOG, (commit.seq, commit.log))
                return
            if steps := statements(commit):
                writer.execute("BEGIN IMMEDIATE")
                for sql, rows in steps:
                    writer.executemany(sql, rows)
                writer.execute("COMMIT")
            if commit.maintenance:
                self.maintenance.maintain(writer, commit)
        except apsw.Error as error:
            raise self._files.failed(error) from error
