"""The layout that was not chosen: a row per frame, clustered by stream, one commit per step.

Beside "Tailrace storage" it says what a log row per commit is worth.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import apsw

from tests.bench.bench_ledger_work import Batch, Contender, Disk, Mode, Sample, folder_bytes, frame

TOKEN_ID = b"\x67\x12"


class RowPerFrame(Contender):
    """SQLite in WAL mode on this thread; the same bytes are kept of each frame."""

    def __init__(self, mode: Mode) -> None:
        self.name = "SQLite, a row per frame"
        self.mode = mode
        self._connection: apsw.Connection | None = None

    def start(self, folder: Path) -> None:
        self._folder = folder
        connection = self._connection = apsw.Connection(str(folder / "rows.sqlite"))
        full = self.mode is Mode.POWER
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
        connection.execute(
            "CREATE TABLE frame (sid INTEGER, idx INTEGER, ids BLOB, frame BLOB,"
            " PRIMARY KEY (sid, idx)) WITHOUT ROWID"
        )

    def append(self, batch: Batch) -> Sample:
        assert self._connection is not None
        execute, many = self._connection.execute, self._connection.executemany
        waits = []
        began = last = perf_counter()
        for index in range(batch.steps):
            raw = frame(index)
            execute("BEGIN IMMEDIATE")
            many(
                "INSERT INTO frame VALUES (?, ?, ?, ?)",
                [(number, index, TOKEN_ID, raw) for number in batch.numbers],
            )
            execute("COMMIT")
            now = perf_counter()
            waits.append(now - last)
            last = now
        return Sample(batch.streams * batch.steps, last - began, waits)

    def settle(self) -> Disk | None:
        assert self._connection is not None
        appended = folder_bytes(self._folder)
        self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        return Disk(appended, folder_bytes(self._folder))

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
