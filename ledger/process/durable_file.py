"""Atomic writes of small files: a kill or a power cut leaves the old file or the new one.

The bytes are synced before the file gets its name; otherwise a power cut may leave an empty file.
The folder is synced before the function returns; otherwise a power cut may lose the new name.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE_MODE = 0o666
"""Default mode of new files, before the umask."""
OWNER_MODE = 0o600


def replace_file(
    path: Path,
    data: bytes,
    *,
    mode: int = FILE_MODE,
    sync: bool = True,
    keeps_owner: bool = False,
) -> None:
    """Replace the file at `path` atomically.

    `sync=False` does not wait for the disk: a power cut may lose the change. With `keeps_owner` the
    new file has the old one's owner, because root may change another user's file.
    """
    new = _written_beside(path, data, mode, sync=sync)
    try:
        if keeps_owner and path.exists():
            owner = path.stat()
            if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(new, owner.st_uid, owner.st_gid)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if sync:
        _sync_folder(path.parent)


def create_file(path: Path, data: bytes, *, mode: int = FILE_MODE) -> bool:
    """Create the file at `path` atomically; return False if it exists already."""
    new = _written_beside(path, data, mode, sync=True)
    try:
        os.link(new, path)
    except FileExistsError:
        return False
    finally:
        new.unlink(missing_ok=True)
        _sync_folder(path.parent)
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file at `path` against other processes and threads that use this function.

    The lock is held on another file, `path` with `.lock` appended, because `replace_file` replaces
    `path` itself. The lock is not reentrant.
    """
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, OWNER_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _written_beside(path: Path, data: bytes, mode: int, *, sync: bool) -> Path:
    new = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(descriptor)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return new


def _sync_folder(folder: Path) -> None:
    """Sync a folder if the file system supports that, so that its names survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
