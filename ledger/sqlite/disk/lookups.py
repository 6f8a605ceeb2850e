"""What is read of a ledger's file: single rows on the event loop, more in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import apsw

from ledger.errors import Damaged
from ledger.sqlite.disk.checksum import DAMAGED_HINT
from ledger.sqlite.disk.schema import connect_reader
from ledger.sqlite.disk.thread import WorkThread


class Lookups:
    """Two connections that only read; `Damaged` where the file does not let them."""

    def __init__(self, path: Path, vfs: str | None) -> None:
        self._path = path
        self._local = connect_reader(path, vfs)
        self._reader = connect_reader(path, vfs)
        self._reading = WorkThread("ledger-reader")

    @property
    def connections(self) -> tuple[apsw.Connection, apsw.Connection]:
        return self._local, self._reader

    def look(self, sql: str, values: Sequence[Any]) -> list[Any]:
        """A few rows by index, at once: a hop to a thread would take longer than the lookup."""
        return self._rows(self._local, sql, values)

    async def read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return await self._reading.run(partial(self._rows, self._reader, sql, values))

    def number(self, sql: str, *values: object) -> int:
        """The one number that a query gives; 0 for none."""
        return int(self.look(sql, values)[0][0] or 0)

    async def close(self) -> None:
        """End the thread; the connections are closed with the others of the file."""
        await self._reading.close()

    def _rows(self, connection: apsw.Connection, sql: str, values: Sequence[Any]) -> list[Any]:
        try:
            return connection.execute(sql, values).fetchall()
        except (apsw.Error, UnicodeDecodeError) as error:
            raise Damaged(f"{self._path} cannot be read: {error}", hint=DAMAGED_HINT) from error
