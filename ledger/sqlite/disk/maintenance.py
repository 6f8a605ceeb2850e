"""Clean-up that keeps a ledger file small: commits do it in small slices."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import structlog

from tailrace.ledger.errors import Damaged, LedgerAway
from tailrace.ledger.interface import StreamKind
from tailrace.ledger.sqlite.capacity import ROW_BYTES
from tailrace.ledger.sqlite.disk.checkpointer import Checkpointer
from tailrace.ledger.sqlite.disk.connections import Lookups
from tailrace.ledger.sqlite.disk.open_files import OpenFiles
from tailrace.ledger.sqlite.disk.wal import Wal
from tailrace.ledger.sqlite.storage import Commit, Sizes

RECLAIM_BYTES = 128 * 1024
"""Maximum bytes of segments deleted in a slice; a larger single segment is deleted alone."""

COUNTED_STREAMS = 256
"""Streams per query that sums the sizes of segments; other reads wait while such a query runs."""
COUNTED_OBJECTS = 1_024
"""Objects per query that sums the sizes of values."""

log = structlog.get_logger("ledger")

_SIDS = (
    "SELECT sid FROM stream WHERE ended = 0 AND kind = ?"
    " UNION ALL SELECT sid FROM stream WHERE ended = 1 AND kind = ?"
)
# Estimates the bytes of segments in the file: SQLite stores the beginning of a large blob in a
# shared page, and the rest in overflow pages of 4096 bytes.
_SEGMENTS_TAKE = (
    "SELECT coalesce(sum(700 + (length(records) + 3602) / 4092 * 4096), 0) FROM segment"
    " WHERE sid IN (SELECT value FROM json_each(?))"
)
_VALUES_TAKE = (
    f"SELECT coalesce(sum(length(name) + length(value) + {ROW_BYTES}), 0) FROM object_value"
    " WHERE oid > ? AND oid <= ?"
)

# The segments of a removed stream stay while a branch refers to them.
_UNUSED = " NOT EXISTS (SELECT 1 FROM part WHERE source = removed.sid)"
_HAS_GARBAGE = f"SELECT EXISTS (SELECT 1 FROM removed WHERE{_UNUSED})"
# Reading the last byte of a blob makes SQLite read all of its overflow pages, which are a chain.
_TOUCH_GARBAGE = (
    f"SELECT substr(records, -1) FROM removed JOIN segment USING (sid) WHERE{_UNUSED}"
    " ORDER BY removed.sid, first LIMIT ?"
)


class SqliteMaintenance:
    """Implements `ledger.sqlite.storage.Maintenance` for a `SqliteFile`.

    When a stream is removed, its row is deleted at once, and its sid goes to the table `removed`.
    Its segments are deleted later, a few with each commit that has `reclaim`, also after a restart.
    Segments that a branch refers to stay until the branch is removed, too. Commits with `vacuum`
    return free pages at the end of the file to the file system, a few at a time (`auto_vacuum =
    INCREMENTAL`). `descriptor` is an open descriptor of the file, for readahead.
    """

    def __init__(
        self,
        path: Path,
        lookups: Lookups,
        wal: Wal,
        checkpointer: Checkpointer,
        files: OpenFiles,
        descriptor: int,
    ) -> None:
        self._path = path
        self._lookups = lookups
        self._wal = wal
        self.check = files.check_names
        self.checkpoint = wal.checkpoint
        self.wait_for_checkpoint = checkpointer.wait_for_checkpoint
        self._descriptor = descriptor
        self._page_bytes = lookups.number("PRAGMA page_size")
        self._damage: str | None = None

    # ---- for the writer ----

    def maintain(self, writer: apsw.Connection, commit: Commit) -> None:
        """Do the slices of clean-up that a commit requests, in a transaction of their own.

        A damaged page stops clean-up until the next start. The other changes of the commit are
        not affected, because they have been stored already, in another transaction.
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
            self.check()  # if a file is missing, this raises an error that names it
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
        # The slice of clean-up that follows reads the same pages, and reports an error in them.
        with suppress(Damaged, LedgerAway):
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
        f" WHERE{_UNUSED} ORDER BY removed.sid, first LIMIT ?",
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
