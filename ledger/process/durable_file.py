"""Small files that are written as a whole or not at all, whatever ends the process or the power.

A file gets its name only when its bytes are on the disk, and the name is on the disk when the
function returns: without the first sync a power cut may leave an empty file under the name,
without the second no file at all.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE_MODE = 0o666
"""As for any file that a program creates; the umask takes from it."""
OWNER_MODE = 0o600


def replace_file(
    path: Path,
    data: bytes,
    *,
    mode: int = FILE_MODE,
    sync: bool = True,
    keeps_owner: bool = False,
) -> None:
    """Write `data` to the file at `path`, which is the old or the new one at every moment.

    `sync=False` is for what a power cut may take, where the caller cannot wait for the disk. With
    `keeps_owner` the new file has the owner of the old one: root may change another user's file.
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
    """Write `data` to a new file at `path`; return False, and change nothing, if there is one."""
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
    """Keep other processes and threads out that change the file at `path` in the same way.

    The lock is a file beside it, because `path` itself is replaced. It is not reentrant.
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
    """Make the names in a folder survive a power cut, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
