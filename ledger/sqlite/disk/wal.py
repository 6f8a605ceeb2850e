"""The WAL of an open ledger: its room on the disk, its mark, its way into the database.

It is moved in the background, beside the writer, which is asked for the last few pages where
it does not begin anew by itself. After a failure nothing of it is moved any more, not even
when the ledger is closed, and the next start writes it over itself before it moves it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock

import apsw

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.sqlite.disk.opening import (
    BUSY_TIMEOUT_MS,
    WAL_HEADER_BYTES,
    HighWater,
    OpenFiles,
)
from tailrace.ledger.sqlite.disk.sync import WorkThread, fill, reserve

CHECKPOINT_PAGES = 4_096
"""WAL pages (4 KiB each) after which they are moved into the database in the background."""
CHECKPOINT_REST_PAGES = 64
"""What the writer may be asked to move itself, so that a WAL under load can begin anew."""
PATIENT_WAL_PAGES = 3 * CHECKPOINT_PAGES
"""During clean-up the writer is not asked for them before the WAL has so many pages."""
MAX_CHECKPOINT_PASSES = 5
"""Passes in the background, each of which has less to move than the one before."""
WAL_FRAME_HEADER_BYTES = 24
WAL_PAGE_BYTES = 4_096 + WAL_FRAME_HEADER_BYTES
WAL_BYTES = CHECKPOINT_PAGES * WAL_PAGE_BYTES
"""The usual size of the WAL."""
CUT_ABOVE_BYTES = 32 * 1024 * 1024
"""A WAL file up to it is written over again, which is cheaper than to let it grow anew."""
WAL_LIMIT_BYTES = 64 * 1024 * 1024
"""The WAL file is cut back to this size when it begins anew."""
WAL_DISK_SHARE = 1 / 4
"""Of what is free on the disk, what the WAL may be given before it is needed."""
STAT_BLOCK_BYTES = 512
"""What `st_blocks` counts, whatever the file system."""
RENEWED_BYTES = 1 << 16
"""Bytes of the WAL that are written anew at once; SQLite's files take less than 128 KiB."""


class Wal:
    """The rules of one WAL. The writer tells it of commits and ends checkpoints for it.

    `synced` is a descriptor of the database. Another `vfs` than SQLite's own may keep its files
    elsewhere: such a WAL is given no room that nothing needs yet.
    """

    def __init__(
        self,
        files: OpenFiles,
        writer: apsw.Connection,
        checkpointer: apsw.Connection,
        vfs: str | None,
        synced: int,
        mark: HighWater,
    ) -> None:
        self.path = Path(writer.filename_wal)  # there as long as a connection is
        self.pages = 0
        self.written_bytes = 0
        """Bytes that commits have written to it since it was opened."""
        self._moved = 0  # pages of it that are in the database
        self.filled = False
        """Whether it has its usual size, so that to sync it takes no longer than it must."""
        self.asks_writer = False
        """Whether the next commit ends a checkpoint, which waits for the disk twice."""
        self._files = files
        self._writer = writer
        self._checkpointer = checkpointer
        # A connection that has never read does not know of the WAL, and moves nothing.
        checkpointer.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        self._has_disk = vfs is None
        self._synced = synced
        self._mark = mark
        self._moving = WorkThread("ledger-checkpoint")
        self._checkpoint: asyncio.Task[None] | None = None
        self._checkpointing = Lock()  # until it is known whether the move has failed
        self._checkpoint_at = CHECKPOINT_PAGES
        self._cutting = False
        self._patient = False
        writer.set_wal_hook(self._after_commit)
        self._reserve()

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def room_bytes(self) -> int:
        """Bytes that it can take within the blocks that it has on the disk.

        A WAL that has been moved as a whole begins anew with the next commit.
        """
        with suppress(OSError):
            blocks = self.path.stat().st_blocks * STAT_BLOCK_BYTES
            used = 0 if self._moved >= self.pages else self.pages * WAL_PAGE_BYTES
            return max(0, blocks - WAL_HEADER_BYTES - used)
        return 0

    async def rest(self) -> None:
        """Wait for a checkpoint under way; cancelling who waits does not end it."""
        if self._checkpoint is not None:
            await asyncio.shield(self._checkpoint)

    async def close(self) -> None:
        """Move nothing more. The last connection that closes moves what is left, if it may."""
        await self._moving.close()
        if self._files.failure is None:
            self._mark.say_nothing()

    # ---- its room on the disk ----

    def fill(self) -> None:
        """Give it its usual size before the first commit that waits for the disk.

        SQLite takes zeros behind the end of its WAL for what they are, nothing.
        """
        self.filled = True
        if self._may_grow():
            with suppress(OSError):  # a disk without the room for it is no reason not to commit
                fill(self.path, WAL_BYTES)

    def _reserve(self) -> None:
        """Keep room for its usual size, for the day on which something fills the disk.

        Then running streams still have somewhere to end.
        """
        if self._may_grow():
            with suppress(OSError):
                reserve(self.path, WAL_BYTES)

    def _may_grow(self) -> bool:
        """Whether it may be given room that nothing needs yet."""
        if not self._has_disk:
            return False
        wal, disk = self.path.stat(), os.statvfs(self.path)
        missing = WAL_BYTES - wal.st_blocks * STAT_BLOCK_BYTES
        return missing <= disk.f_bavail * disk.f_frsize * WAL_DISK_SHARE

    # ---- with the writer ----

    def _after_commit(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        new = pages - self.pages
        if new < 0:  # it has begun anew
            self._checkpoint_at = CHECKPOINT_PAGES
            self._moved, new = 0, pages
        self.pages = pages
        self.written_bytes += new * WAL_PAGE_BYTES
        self._mark.reached(pages)
        return apsw.SQLITE_OK

    def move_if_due(self) -> None:
        """Begin a checkpoint where enough has come since the last one."""
        if self.pages >= self._checkpoint_at and self._checkpoint is None:
            self._checkpoint = asyncio.create_task(self._move_all())

    def end_checkpoint(self) -> None:
        """Move the last few pages; a WAL that is to be cut off is, if no reader needs it."""
        self.asks_writer = False
        if not self._checkpointing.acquire(blocking=False):
            return  # the next checkpoint has begun: that one will do
        mode = apsw.SQLITE_CHECKPOINT_PASSIVE
        if self._cutting:
            mode, self._cutting = apsw.SQLITE_CHECKPOINT_TRUNCATE, False
            self._mark.say_nothing()
        writer = self._writer
        try:
            writer.set_busy_timeout(0)
            self._move(writer, mode)
        except (apsw.BusyError, apsw.FullError):
            pass  # a reader needs the WAL, or the disk is full
        else:
            if mode == apsw.SQLITE_CHECKPOINT_TRUNCATE:
                self._reserve()
        finally:
            self._checkpointing.release()
            writer.set_busy_timeout(BUSY_TIMEOUT_MS)

    # ---- for clean-up ----

    async def settle(self, *, cut: bool) -> None:
        """Move it; the next commit ends that, and cuts a long WAL file off if it shall."""
        self._cutting = cut and self.size_bytes > CUT_ABOVE_BYTES
        if self._checkpoint is None:
            self._checkpoint = asyncio.create_task(self._move_all())
        await self.rest()
        self._patient = False

    async def calm(self) -> None:
        """Wait for a checkpoint under way; until `settle` has ended the writer ends none.

        It would wait for the disk twice, on the event loop, and clean-up makes many checkpoints.
        """
        self._patient = True
        await self.rest()

    # ---- into the database ----

    async def _move_all(self) -> None:
        """Move it while the writer goes on adding to it.

        It begins anew only when all of it is moved at some moment. Under load that never
        happens by itself: the writer is asked for the last few pages then. SQLite syncs the
        database only when all is moved, which would be for the writer to wait for, on the
        event loop: what has been moved so far is synced here, in the background.
        """
        self._checkpoint_at = self.pages + CHECKPOINT_PAGES
        try:
            for _ in range(MAX_CHECKPOINT_PASSES):
                moved = await self._moving.run(self._move_and_sync)
                rest = self.pages - moved
                if self._patient and not self._cutting and self.pages < PATIENT_WAL_PAGES:
                    if rest > 0:
                        continue  # between two commits the next pass may well get it all
                    break
                if rest <= CHECKPOINT_REST_PAGES:
                    self.asks_writer = True
                    break
        except apsw.BusyError:
            pass  # a reader holds on to an old page
        except apsw.FullError:
            pass  # all of it is still in the WAL, and is moved when the disk has room again
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
                raise self._files.failed(error) from error
            return moved

    def _move(self, connection: apsw.Connection, mode: int) -> int:
        """One checkpoint; never again after one that failed. `_checkpointing` is held.

        A sync that failed has dropped pages that the next one, which succeeds, knows nothing of.
        It would let the WAL begin anew, and nothing would be left to write those pages from.
        """
        self._files.check()
        try:
            _, moved = connection.wal_checkpoint(mode=mode)
        except (apsw.BusyError, apsw.FullError):
            raise
        except apsw.Error as error:
            raise self._files.failed(error) from error
        self._moved = moved
        return moved


def renew(writer: apsw.Connection, vfs: str | None, frames: int, page_bytes: int) -> None:
    """Write a WAL of so many whole frames over itself, and sync it, before any of it is moved.

    Linux holds what it has failed to sync for clean, and a further sync does nothing about it.
    If the power failed while such a WAL is moved, a database with pages of its end would meet
    a WAL that breaks off before them.
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


def leave(connection: apsw.Connection) -> None:
    """Let it not move the WAL when it closes as the last one: some of that may not be durable."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
