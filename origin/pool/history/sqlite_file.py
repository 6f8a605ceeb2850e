"""A history in a SQLite file of its own, through aiosqlite, which works in another thread.

The file has a rollback journal and no WAL: any tool for SQLite can read it, and a copy is complete.
The origin is its only writer; other processes only read.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiosqlite
import structlog

from tailrace.ledger.errors import ConfigError, Damaged, Unavailable
from tailrace.origin.pool.history import schema
from tailrace.origin.pool.history.schema import HistoryEntry

APPLICATION_ID = 0x54_52_48_31  # "TRH1", the application_id of a history file
BUSY_S = 5.0
"""Timeout in seconds for which writers and readers wait for each other."""
MAGIC = b"SQLite format 3\0"
WRITING = ("journal_mode = TRUNCATE", "synchronous = NORMAL")
READING = ("query_only = ON",)
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB")

log = structlog.get_logger("history")


class SqliteHistory:
    """An open history file; create it with `open` or `read`."""

    def __init__(self, path: Path, connection: aiosqlite.Connection) -> None:
        self.name = str(path)
        self._connection = connection

    @classmethod
    async def open(cls, path: Path, now_ms: int) -> Self:
        """Open a history for writing; create it if there is none, and set a damaged one aside.

        Raises ConfigError for a file of a newer version, or one that is no history; such a file is
        not touched.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return await cls._opened(path, writes=True)
        except Damaged as error:
            aside = path.with_name(f"{path.name}.damaged-{now_ms}")
            path.replace(aside)
            with suppress(FileNotFoundError):
                journal = path.with_name(path.name + "-journal")
                journal.replace(aside.with_name(aside.name + "-journal"))
            log.error("history.damaged", error=error.message, set_aside=str(aside))
            return await cls._opened(path, writes=True)

    @classmethod
    async def read(cls, path: Path) -> Self:
        """Open a history for reading, whether or not an origin writes to it meanwhile."""
        if not path.is_file():
            raise ConfigError(
                f"there is no history at {path}",
                hint="use an origin's history: DATA/history.db, or the path in ledger.history",
            )
        return await cls._opened(path, writes=False)

    @classmethod
    async def _opened(cls, path: Path, *, writes: bool) -> Self:
        # Readers need mode=rw, too, to roll back a transaction of an origin that was killed.
        uri = f"file:{quote(str(path.absolute()))}?mode={'rwc' if writes else 'rw'}"
        connecting = aiosqlite.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)
        try:
            history = cls(path, await connecting)
        except sqlite3.Error as error:
            raise Unavailable(f"{path}: {error}") from error
        try:
            async with history._doing():
                version = await history._check(path, new=writes)
                for pragma in WRITING if writes else READING:
                    await history._connection.execute(f"PRAGMA {pragma}")
                if version == 0:
                    await history._connection.executescript(
                        f"BEGIN; {schema.TABLES} PRAGMA application_id = {APPLICATION_ID};"
                        f"PRAGMA user_version = {schema.VERSION}; COMMIT;"
                    )
        except BaseException:
            await history.close()
            raise
        return history

    async def _check(self, path: Path, *, new: bool) -> int:
        """Return the version, 0 for a new file; raises if the file cannot be used."""
        version, application, tables = await self._one(
            "SELECT user_version, application_id, (SELECT count(*) FROM sqlite_schema)"
            " FROM pragma_user_version, pragma_application_id"
        )
        if new and (version, application, tables) == (0, 0, 0):
            return 0
        if application != APPLICATION_ID:
            raise ConfigError(f"{path} is not a history of Tailrace", hint="choose another path")
        if version != schema.VERSION:
            raise ConfigError(
                f"{path} is a history of version {version}, not {schema.VERSION}",
                hint="a newer release of Tailrace has written it: use that release, or move the"
                " file away",
            )
        found = (await self._one("PRAGMA quick_check(1)"))[0]
        if found != "ok":
            raise Damaged(f"{path}: {found}")
        return int(version)

    async def _one(self, query: str) -> Any:
        async with self._connection.execute(query) as cursor:
            return await cursor.fetchone()

    async def write(self, entries: Sequence[HistoryEntry], *, alone: bool = False) -> None:
        """Write entries. A file has only one writer, so `alone` needs no lock."""
        async with self._doing():
            await self._connection.execute("BEGIN IMMEDIATE")
            try:
                for statement, rows in schema.in_groups(entries):
                    await self._connection.executemany(_own(statement), map(_named, rows))
                await self._connection.commit()
            except BaseException:
                with suppress(sqlite3.Error):
                    await self._connection.rollback()
                raise

    async def rows(self, query: str, *values: str | int) -> Sequence[tuple[Any, ...]]:
        async with self._doing(), self._connection.execute(_own(query), _named(values)) as cursor:
            return [tuple(row) for row in await cursor.fetchall()]

    async def close(self) -> None:
        with suppress(sqlite3.Error, ValueError):  # aiosqlite raises ValueError if closed
            await self._connection.close()

    @asynccontextmanager
    async def _doing(self) -> AsyncIterator[None]:
        """Convert errors of SQLite to those of Tailrace, and errors of values to ValueError."""
        try:
            yield
        except sqlite3.DataError as error:
            raise ValueError(str(error)) from error
        except sqlite3.Error as error:
            told = f"{self.name}: {error}"
            if getattr(error, "sqlite_errorname", "").startswith(_DAMAGE):
                raise Damaged(told) from error
            raise Unavailable(told) from error


def is_sqlite(path: Path) -> bool:
    """Return True if a file begins like a SQLite file."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def _own(statement: str) -> str:
    """Return a statement with named parameters instead of $1, $2, ….

    From Python 3.12 on `sqlite3` deprecates numbered parameters with a sequence of values.
    """
    return re.sub(r"\$(\d+)", r":p\1", statement)


def _named(values: Sequence[Any]) -> dict[str, Any]:
    """Return the values of $1, $2, … by the names that `_own` gives these parameters."""
    return {f"p{number}": value for number, value in enumerate(values, 1)}
