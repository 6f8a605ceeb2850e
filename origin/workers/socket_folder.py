"""Temporary folders with short paths for the sockets of workers.

The sockets are not in the data folder, because its path may be too long: the path of a Unix socket
has at most 107 bytes. Each temporary folder has a file that its origin locks; the kernel drops the
lock when the origin ends. So the folders of killed origins can be recognized and removed.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

PREFIX = "tailrace-"
OWNER = "owner.lock"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Create a folder that only this user can enter, and remove it after the `with` block."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    new = folder / "new.lock"
    with new.open("wb") as owner:
        flock(owner, LOCK_EX | LOCK_NB)
        new.rename(folder / OWNER)  # other processes see the file only after it is locked
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_left_folders(place: Path | None = None) -> int:
    """Remove this user's folders whose origin has ended, and return their number.

    Folders without a lock file and folders of other users stay.
    """
    removed = 0
    for folder in (place or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        with suppress(OSError):  # BlockingIOError: the origin lives and holds the lock
            seen = folder.lstat()
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
                continue
            held = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                flock(held, LOCK_EX | LOCK_NB)
                shutil.rmtree(folder)
                removed += 1
            finally:
                os.close(held)
    return removed
