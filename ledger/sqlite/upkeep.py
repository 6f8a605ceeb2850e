"""How a SQLite file is kept small: slices of clean-up in its commits, and what it looks up.

A removed stream's row goes at once and leaves its sid in the table `removed`; its segments
go a few with each commit that says so, also after a restart. Then free pages at the end of
the file are given back, a few at a time (`auto_vacuum = INCREMENTAL`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import structlog

from ledger.errors import Damaged
from ledger.sqlite.storage import Commit, Sizes

RECLAIM_BYTES = 128 * 1024
"""Bytes of segments that are taken away in one slice; one segment alone may have more."""

LONG_WAL_BYTES = 32 * 1024 * 1024
"""A WAL file up to it is written over again, which is cheaper than to let it grow anew."""

# A blob's last byte lies on the last of its pages, and the way there leads over all of them.
_TOUCH_GARBAGE = (
    "SELECT substr(records, -1) FROM removed JOIN segment USING (sid)"
    " ORDER BY removed.sid, first LIMIT ?"
)

log = structlog.get_logger("ledger")

Look = Callable[[str, Sequence[Any]], list[Any]]
Read = Callable[[str, Sequence[Any]], Awaitable[list[Any]]]


class SqliteUpkeep:
    """`ledger.sqlite.storage.Upkeep` on the connections of a `SqliteFile`."""

    def __init__(
        self,
        path: Path,
        look: Look,
        read: Read,
        settle: Callable[[bool], Awaitable[None]],
        calm: Callable[[], Awaitable[None]],
        descriptor: int,
    ) -> None:
        self._path = path
        self._wal = path.with_name(path.name + "-wal")
        self._look = look
        self._read = read
        self._settle = settle
        self._calm = calm
        self._descriptor = descriptor  # of the file, to tell the system what will be read
        self._page_bytes = self._number("PRAGMA page_size")
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

    async def sizes(self) -> Sizes:
        disk = os.statvfs(self._path.parent)
        return Sizes(
            file_bytes=self._number("PRAGMA page_count") * self._page_bytes,
            free_bytes=self._number("PRAGMA freelist_count") * self._page_bytes,
            wal_bytes=self._wal_bytes(),
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            garbage=self._damage is None and self._has_garbage(),
        )

    def used_bytes(self) -> int:
        pages = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return pages * self._page_bytes

    async def stored_bytes(self, sid: int) -> int:
        return self._number("SELECT sum(length(records)) FROM segment WHERE sid = ?", sid)

    async def to_pack(self, before_ms: int, limit: int) -> list[int]:
        rows = self._look(
            "SELECT sid FROM stream WHERE ended = 1 AND cold = 0 AND expires_ms - ttl_ms <= ?"
            " ORDER BY expires_ms - ttl_ms LIMIT ?",
            (before_ms, limit),
        )
        return [row[0] for row in rows]

    async def newest_ended(self, limit: int) -> list[int]:
        rows = await self._read(
            "SELECT sid FROM stream WHERE ended = 1 ORDER BY sid DESC LIMIT ?", (limit,)
        )
        return [row[0] for row in rows]

    async def dictionary(self, coding: int) -> bytes:
        rows = self._look("SELECT bytes FROM dictionary WHERE id = ?", (coding,))
        return rows[0][0] if rows else b""

    async def dictionaries(self) -> list[tuple[int, bool]]:
        rows = self._look(
            "SELECT id, EXISTS (SELECT 1 FROM segment WHERE coding = id AND coding > 0)"
            " FROM dictionary ORDER BY id",
            (),
        )
        return [(row[0], bool(row[1])) for row in rows]

    async def settle(self, *, cut: bool) -> None:
        await self._settle(cut and self._wal_bytes() > LONG_WAL_BYTES)

    async def fetch(self, *, reclaim: int, vacuum: int) -> None:
        with suppress(Damaged):  # which the slice itself will meet
            if reclaim:
                await self._read(_TOUCH_GARBAGE, (reclaim,))
        if vacuum and hasattr(os, "posix_fadvise"):
            size = vacuum * self._page_bytes
            begin = max(0, self._number("PRAGMA page_count") * self._page_bytes - size)
            os.posix_fadvise(self._descriptor, begin, size, os.POSIX_FADV_WILLNEED)

    async def calm(self) -> None:
        await self._calm()

    def _has_garbage(self) -> bool:
        return self._number("SELECT EXISTS (SELECT 1 FROM removed)") > 0

    def _wal_bytes(self) -> int:
        return self._wal.stat().st_size if self._wal.exists() else 0

    def _number(self, sql: str, *values: object) -> int:
        rows = self._look(sql, values)
        return int(rows[0][0] or 0)


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
