"""The files of an open ledger: whether they may still be written. The first failure is the last."""

from __future__ import annotations

from pathlib import Path

import apsw

from ledger.errors import LedgerFailed
from ledger.sqlite.disk.opening import number_of


class OpenFiles:
    """A database and its WAL, each under its name. No other file has the number of an open one.

    After a failed write the state on disk is unknown, and no further one is tried.
    """

    def __init__(self, path: Path, wal: Path) -> None:
        self._path = path
        self._numbers = {name: number_of(name.stat()) for name in (path, wal)}
        self.failure: LedgerFailed | None = None

    def check(self) -> None:
        """Raise what has failed, if anything has."""
        if self.failure is not None:
            raise self.failure

    def failed(self, error: apsw.Error | OSError) -> LedgerFailed:
        """What nothing is written after."""
        self.failure = LedgerFailed(
            f"{self._path}: {error}", hint="see to the disk, then start the origin again"
        )
        return self.failure

    def check_names(self) -> None:
        """Fail where the files have been moved or deleted: nobody would find what is written."""
        if (lost := self._lost()) is not None:
            files = f"the files of {self._path}"
            self.failure = LedgerFailed(
                f"{lost} was moved or deleted while it was written",
                hint=f"put {files} back as they were, then start the origin again",
            )
            raise self.failure

    def _lost(self) -> Path | None:
        """The first of the names that stands for no file now, or for another one."""
        for path, number in self._numbers.items():
            try:
                if number_of(path.stat()) == number:
                    continue
            except OSError:
                pass  # whatever the reason, nobody finds it by that name
            return path
        return None
