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
    """The names and inodes of a database and its WAL, and the failure of a write, if any.

    After a failed write the state on the disk is unknown, so nothing is written any more.
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
        """Record a failed write; return the error that this write and all later ones raise."""
        cure = f"free space on the disk of {self._path.parent}"
        self.failure = LedgerFailed(
            f"{self._path}: {error}",
            hint=f"{cure if is_full(error) else 'check the disk'}, then start the origin again",
        )
        return self.failure

    def check_names(self) -> None:
        """Check that neither file was moved or deleted.

        Raises:
            LedgerFailed: A file was moved or deleted, so the next start of an origin would not find
                new data.
        """
        for path, number in self._numbers.items():
            found = None
            with suppress(OSError):  # a file that cannot be examined counts as deleted
                found = number_of(path.stat())
            if found != number:
                self.failure = LedgerFailed(
                    f"{path} was moved or deleted while it was written",
                    hint=f"put the files of {self._path} back as they were,"
                    " then start the origin again",
                )
                raise self.failure
