"""Locks that keep other processes from a ledger's file, whatever path they use."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from tailrace.ledger.errors import ConfigError

DESCRIPTORS = Path("/dev/fd")
"""Folder of the calling process's open descriptors, on Linux and macOS."""


def existing(path: Path) -> Path:
    """Return `path` if it is a file, otherwise raise `ConfigError`."""
    if not path.is_file():
        raise ConfigError(
            f"there is no ledger at {path}",
            field="ledger.path",
            hint="name the file with --path; an origin keeps it as ledger.db in its data folder",
        )
    return path


def require_closed_here(path: Path) -> None:
    """Raise `ConfigError` if this process has the file at `path` open.

    POSIX locks belong to a process, and closing any descriptor of a file drops all locks that the
    process has on that file (sqlite.org/howtocorrupt.html, 2.2). A ledger has a descriptor of its
    file besides SQLite's. If the file were open twice in a process, closing one of the two ledgers
    would drop the locks of the other.
    """
    with suppress(FileNotFoundError):  # a missing file is not open
        number = number_of(path.stat())
        for name in os.listdir(DESCRIPTORS):
            # The list has the descriptor that listdir itself used, which is closed by now.
            with suppress(OSError):
                if number_of(os.fstat(int(name))) == number:
                    raise ConfigError(
                        f"{path} is open in this process already",
                        field="ledger.path",
                        hint="read it from a process of its own, as `tailrace ledger` does",
                    )


def lock(path: Path) -> tuple[int, int]:
    """Lock the file at `path` for this process, and the lock file beside it.

    Return the descriptors of both.

    The file itself is locked because it may have a second name (a hard link, another mount). The
    lock file is locked because another file may take the place of the ledger's file. The kernel
    releases both locks when the process ends.

    Raises:
        ConfigError: Another process has a lock, or this process has the file open.
    """
    beside = _lock(path, lock_file(path))
    try:
        require_closed_here(path)
        return _lock(path, path), beside
    except BaseException:
        os.close(beside)
        raise


def _lock(path: Path, locked: Path) -> int:
    descriptor = os.open(locked, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"{path} is in use by another process",
            field="ledger.path",
            hint="stop the other process, or use another ledger file",
        ) from error
    return descriptor


def number_of(found: os.stat_result) -> tuple[int, int]:
    """Return the device and inode of a file, which identify the file whatever its name."""
    return found.st_dev, found.st_ino


def lock_file(path: Path) -> Path:
    """Return the path of the lock file of the ledger at `path`."""
    return path.with_name(path.name + ".lock")
