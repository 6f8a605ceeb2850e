"""The files of a ledger while they are open, and what happens after a failed write."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.sqlite.disk.file_locks import number_of

SQLITE_FULL = 13


def is_full(error: Exception) -> bool:
    """Return True if a write failed because the disk, or a quota, has no room for it."""
    no_room = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return no_room or getattr(error, "result", None) == SQLITE_FULL


class OpenFiles:
    """A database and its WAL, each with its name and its inode.

    After a failed write the state on disk is unknown, and no further one is tried.
    """

    def __init__(self, path: Path, wal: Path) -> None:
        self._path = path
        self._numbers = {name: number_of(name.stat()) for name in (path, wal)}
        self.failure: LedgerFailed | None = None

    def check(self) -> None:
        """Raise the failure of an earlier write, if there was one."""
        if self.failure is not None:
            raise self.failure

    def failed(self, error: Exception) -> LedgerFailed:
        """Note a failed write, after which nothing is written, and return its error."""
        cure = f"free space on the disk of {self._path.parent}"
        self.failure = LedgerFailed(
            f"{self._path}: {error}",
            hint=f"{cure if is_full(error) else 'check the disk'}, then start the origin again",
        )
        return self.failure

    def check_names(self) -> None:
        """Fail if a file was moved or deleted, because later openers would not find new data."""
        for path, number in self._numbers.items():
            found = None
            with suppress(OSError):  # any error means that the name leads nowhere
                found = number_of(path.stat())
            if found != number:
                self.failure = LedgerFailed(
                    f"{path} was moved or deleted while it was written",
                    hint=f"put the files of {self._path} back as they were,"
                    " then start the origin again",
                )
                raise self.failure
