"""Reserve disk space for a file before it is written."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: allocate blocks, but keep the file's length
FILL_BYTES = 64 * 1024
"""Bytes of zeros per write in `fill`.

After one large write ext4 would cache the file in large folios, and each later small write would
write a whole folio to the disk.
"""


def fill(path: Path, size: int) -> None:
    """Extend a file to `size` bytes with zeros, and sync it.

    Later syncs then take about half as long: while a file grows, each sync also has to commit the
    file system's journal.
    """
    with path.open("r+b") as file:
        missing = size - file.seek(0, os.SEEK_END)
        while missing > 0:
            missing -= file.write(bytes(min(missing, FILL_BYTES)))
        file.flush()
        os.fdatasync(file.fileno())


def reserve(path: Path, size: int) -> None:
    """Reserve disk space for a file of `size` bytes without changing its length.

    Raises:
        OSError: The disk has no space, or the file system does not support it.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "no fallocate here")
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    descriptor = os.open(path, os.O_RDWR)
    try:
        if allocate(descriptor, _KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(size)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)
