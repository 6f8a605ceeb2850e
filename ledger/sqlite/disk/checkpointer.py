"""Checkpoints of the WAL of an open ledger, concurrently with the writer.

A checkpoint moves pages from the WAL into the database, in the background. Under load it would
never catch up with the writer, so the WAL could never restart. Therefore the writer moves the last
few pages itself. After a failed checkpoint no page of the WAL is moved any more, not even when the
ledger is closed. The next start rewrites the WAL in place before its first checkpoint.
"""

from __future__ import annotations

import asyncio
import os
from enum import Enum, auto
from threading import Lock

import apsw

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.sqlite.disk.open_files import OpenFiles
from tailrace.ledger.sqlite.disk.schema import BUSY_TIMEOUT_MS
from tailrace.ledger.sqlite.disk.work_thread import WorkThread

CHECKPOINT_PAGES = 4_096
"""Number of new WAL pages (4 KiB each) after which a checkpoint begins."""
CHECKPOINT_REST_PAGES = 64
"""Maximum number of pages that a checkpoint leaves for the writer to move at its end."""
PATIENT_WAL_PAGES = 3 * CHECKPOINT_PAGES
"""Number of pages in the WAL from which on the writer finishes checkpoints with `Finish.LATE`."""
MAX_CHECKPOINT_PASSES = 5
"""Maximum background passes of a checkpoint; each has fewer pages to move than the one before."""


class Phase(Enum):
    """The state of the checkpoint."""

    IDLE = auto()
    MOVING = auto()
    """Passes run in the background."""
    FINISHING = auto()
    """The writer moves the last pages with its next commit."""


class Event(Enum):
    """An event that changes the phase."""

    BEGUN = auto()
    NEARLY_MOVED = auto()
    STOPPED = auto()
    """The background passes are over: all pages are moved, or some pages stay in the WAL.

    Pages stay if a read transaction needs them, the disk is full, or a checkpoint has failed.
    """
    FINISHED = auto()


NEXT = {
    (Phase.IDLE, Event.BEGUN): Phase.MOVING,
    (Phase.FINISHING, Event.BEGUN): Phase.MOVING,  # the new checkpoint moves the rest, too
    (Phase.MOVING, Event.NEARLY_MOVED): Phase.FINISHING,
    (Phase.MOVING, Event.STOPPED): Phase.IDLE,
    (Phase.FINISHING, Event.FINISHED): Phase.IDLE,
}
"""Maps a phase and an event to the next phase. Any other event leaves the phase as it is."""


class Finish(Enum):
    """The way in which a checkpoint ends."""

    SOON = auto()
    """The writer moves the last pages, as soon as these are few."""
    LATE = auto()
    """Like `SOON`, but only if the WAL has at least `PATIENT_WAL_PAGES` pages.

    Finishing a checkpoint in the writer makes the event loop wait for the disk twice, and
    clean-up causes many checkpoints.
    """
    CUT = auto()
    """The writer moves the last pages and truncates the WAL file, if no reader needs the WAL."""


class Checkpointer:
    """Runs the checkpoints of one ledger. The writer reports commits and moves the last pages.

    `synced` is the descriptor through which the database file is synced.
    """

    def __init__(
        self,
        files: OpenFiles,
        writer: apsw.Connection,
        connection: apsw.Connection,
        synced: int,
    ) -> None:
        self.pages = 0
        """Number of pages in the WAL."""
        self.moved = 0
        """Number of pages in the WAL that have been moved into the database."""
        self._phase = Phase.IDLE
        self._one_step = Lock()
        self._finish = Finish.SOON
        self._due_at = CHECKPOINT_PAGES
        self._files = files
        self._writer = writer
        self._connection = connection
        # Read anything: before its first read a connection does not know the WAL, and a checkpoint
        # by it would move nothing.
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        self._synced = synced
        self._thread = WorkThread("ledger-checkpoint")
        self._moving: asyncio.Task[None] | None = None
        # Held while pages are moved and synced: the next move must know if the previous one failed.
        self._one_move = Lock()

    # ---- with the writer ----

    def committed(self, pages: int) -> None:
        """Record that the WAL has `pages` pages after a commit."""
        if pages < self.pages:  # the WAL has restarted
            self._due_at, self.moved = CHECKPOINT_PAGES, 0
        self.pages = pages

    def begin_if_due(self) -> None:
        """Begin a checkpoint if CHECKPOINT_PAGES have been added since the last one began."""
        if self.pages >= self._due_at and self._phase is not Phase.MOVING:
            self._begin()

    @property
    def asks_writer(self) -> bool:
        """True if the next commit finishes a checkpoint, which waits for the disk twice."""
        return self._phase is Phase.FINISHING

    @property
    def is_cutting(self) -> bool:
        """True if the WAL file is truncated when the checkpoint is finished."""
        return self._finish is Finish.CUT

    def finish(self) -> bool:
        """Move the last pages by the writer's connection; return True if the WAL was truncated."""
        # This may run in the writer's thread, while the event loop begins the next checkpoint.
        if not self._step(Event.FINISHED) or not self._one_move.acquire(blocking=False):
            return False
        is_cut, mode = self.is_cutting, apsw.SQLITE_CHECKPOINT_PASSIVE
        if is_cut:
            mode, self._finish = apsw.SQLITE_CHECKPOINT_TRUNCATE, Finish.SOON
        try:
            self._writer.set_busy_timeout(0)
            self._move(self._writer, mode)
        except (apsw.BusyError, apsw.FullError):
            return False  # a read transaction needs pages of the WAL, or the disk is full
        finally:
            self._one_move.release()
            self._writer.set_busy_timeout(BUSY_TIMEOUT_MS)
        return is_cut

    # ---- for clean-up ----

    async def checkpoint(self, *, cut: bool) -> None:
        """Move the WAL into the database, except for the last pages, which the next commit moves.

        With `cut` the next commit also truncates the WAL file.
        """
        if cut:
            self._finish = Finish.CUT
        elif self._finish is Finish.CUT:
            self._finish = Finish.SOON
        if self._phase is not Phase.MOVING:
            self._begin()
        await self.wait()
        if self._finish is Finish.LATE:
            self._finish = Finish.SOON

    async def wait_for_checkpoint(self) -> None:
        """Wait for a checkpoint in progress, and make this and later checkpoints finish late.

        Until the next call of `checkpoint`, they end as `Finish.LATE` describes. If `Finish.CUT`
        was requested, they end with it nevertheless.
        """
        if self._finish is Finish.SOON:
            self._finish = Finish.LATE
        await self.wait()

    async def wait(self) -> None:
        """Wait for a checkpoint in progress; cancelling the waiter does not stop the checkpoint."""
        if self._moving is not None:
            await asyncio.shield(self._moving)

    async def close(self) -> None:
        """End the thread.

        SQLite moves the remaining pages when the last connection closes. After a failed checkpoint
        these pages stay in the WAL.
        """
        await self._thread.close()

    # ---- into the database ----

    def _begin(self) -> None:
        self._step(Event.BEGUN)
        self._moving = asyncio.create_task(self._move_all())

    def _step(self, event: Event) -> bool:
        """Apply an event; return True if it has changed the phase."""
        with self._one_step:
            following = NEXT.get((self._phase, event))
            if following is not None:
                self._phase = following
            return following is not None

    async def _move_all(self) -> None:
        """Move the WAL while the writer goes on adding to it.

        SQLite syncs the database only in the checkpoint that moves the last page. The writer runs
        that checkpoint, on the event loop. To make it short, this method syncs the pages moved so
        far in the background.
        """
        self._due_at = self.pages + CHECKPOINT_PAGES
        event = Event.STOPPED
        try:
            for _ in range(MAX_CHECKPOINT_PASSES):
                await self._thread.run(self._move_and_sync)
                rest = self.pages - self.moved
                if self._finish is Finish.LATE and self.pages < PATIENT_WAL_PAGES:
                    if rest > 0:
                        continue  # the next pass may move all pages, if no commit comes meanwhile
                    break
                if rest <= CHECKPOINT_REST_PAGES:
                    event = Event.NEARLY_MOVED
                    break
        except apsw.BusyError:
            pass  # a read transaction still uses an old page of the database
        except apsw.FullError:
            pass  # the pages stay in the WAL until the disk has space again
        except LedgerFailed:
            pass  # the next commit raises this error
        finally:
            self._moving = None
            self._step(event)

    def _move_and_sync(self) -> None:
        with self._one_move:
            self._move(self._connection, apsw.SQLITE_CHECKPOINT_PASSIVE)
            try:
                os.fdatasync(self._synced)
            except OSError as error:
                raise self._files.failed(error) from error

    def _move(self, connection: apsw.Connection, mode: int) -> None:
        """Run one checkpoint, unless an earlier one has failed. The caller holds `_one_move`.

        After a failed sync the kernel may have dropped pages, yet the next sync succeeds. SQLite
        would then restart the WAL and so overwrite the only copy of these pages.
        """
        self._files.check()
        try:
            _, self.moved = connection.wal_checkpoint(mode=mode)
        except (apsw.BusyError, apsw.FullError):
            raise
        except apsw.Error as error:
            raise self._files.failed(error) from error
