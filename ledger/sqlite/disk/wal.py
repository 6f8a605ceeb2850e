"""The WAL of an open ledger: its size, its reserved disk space and its mark."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import apsw

from tailrace.ledger.sqlite.disk.checkpointer import CHECKPOINT_PAGES, Checkpointer
from tailrace.ledger.sqlite.disk.preallocation import fill, reserve
from tailrace.ledger.sqlite.disk.wal_mark import (
    WAL_FRAME_HEADER_BYTES,
    WAL_HEADER_BYTES,
    WalMark,
)

WAL_PAGE_BYTES = 4_096 + WAL_FRAME_HEADER_BYTES
WAL_BYTES = CHECKPOINT_PAGES * WAL_PAGE_BYTES
"""Size of the WAL in bytes at which a checkpoint begins; disk space of this size is reserved."""
CUT_ABOVE_BYTES = 32 * 1024 * 1024
"""Size in bytes above which a checkpoint may truncate the WAL file.

A smaller file is overwritten from its start, which is cheaper than growing a new one.
"""
WAL_DISK_SHARE = 1 / 4
"""Maximum share of the disk's free space that is reserved for the WAL in advance."""
STAT_BLOCK_BYTES = 512
"""Unit of `st_blocks` in bytes, on every file system."""


class Wal:
    """The WAL file of one writer; SQLite's WAL hook reports each commit to it.

    No disk space is reserved for the WAL of a custom `vfs`, which may keep its files elsewhere.
    """

    def __init__(
        self,
        writer: apsw.Connection,
        checkpointer: Checkpointer,
        vfs: str | None,
        mark: WalMark,
    ) -> None:
        self.path = Path(writer.filename_wal)  # the file exists as long as a connection is open
        self.written_bytes = 0
        """Bytes that commits have written to the WAL since it was opened."""
        self.filled = False
        """True once `fill` was called, so that syncs of the WAL need not sync its length, too."""
        self._checkpointer = checkpointer
        self._has_disk = vfs is None
        self._mark = mark
        writer.set_wal_hook(self._after_commit)
        self._reserve()

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def room_bytes(self) -> int:
        """Bytes that can be added to the WAL in the disk blocks that it already has.

        If every page has been checkpointed, all of these blocks count, because the next commit
        restarts the WAL.
        """
        with suppress(OSError):
            blocks = self.path.stat().st_blocks * STAT_BLOCK_BYTES
            pages = self._checkpointer.pages
            used = 0 if self._checkpointer.moved >= pages else pages * WAL_PAGE_BYTES
            return max(0, blocks - WAL_HEADER_BYTES - used)
        return 0

    async def checkpoint(self, *, cut: bool) -> None:
        """Checkpoint the WAL. With `cut` the next commit truncates it if above CUT_ABOVE_BYTES."""
        await self._checkpointer.checkpoint(cut=cut and self.size_bytes > CUT_ABOVE_BYTES)

    def finish_checkpoint(self) -> None:
        """Finish a checkpoint on the writing connection: move the last pages, truncate the file."""
        if self._checkpointer.is_cutting:
            self._mark.clear()
        if self._checkpointer.finish():
            self._reserve()

    def fill(self) -> None:
        """Extend the WAL to its usual size before the first commit that waits for the disk.

        SQLite ignores zeros behind the end of its WAL.
        """
        self.filled = True
        if self._may_grow():
            with suppress(OSError):  # on a full disk commits work without these zeros, more slowly
                fill(self.path, WAL_BYTES)

    def _after_commit(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        before = self._checkpointer.pages
        # If the WAL has fewer pages than before, it has restarted, and all of its pages are new.
        new = pages if pages < before else pages - before
        self.written_bytes += new * WAL_PAGE_BYTES
        self._checkpointer.committed(pages)
        self._mark.advance(pages)
        return apsw.SQLITE_OK

    def _reserve(self) -> None:
        """Reserve disk space for the WAL's usual size.

        If the disk becomes full, the ends of running streams can still be stored in this space.
        """
        if self._may_grow():
            with suppress(OSError):
                reserve(self.path, WAL_BYTES)

    def _may_grow(self) -> bool:
        """Return True if the WAL may reserve space that it does not need yet."""
        if not self._has_disk:
            return False
        wal, disk = self.path.stat(), os.statvfs(self.path)
        missing = WAL_BYTES - wal.st_blocks * STAT_BLOCK_BYTES
        return missing <= disk.f_bavail * disk.f_frsize * WAL_DISK_SHARE
