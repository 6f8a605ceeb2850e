"""SHA-256 digests of files, cached by each file's identity: device, inode, size and times.

Without the cache each start of a worker would hash the checkpoint, which takes 12 s for 16 GB. Any
write to a file changes its ctime, which no program can set. The digest of a file that changed
moments ago is not cached, because the next change might have the same ctime. The cache is replaced
as a whole; a cache that cannot be read, or is of another version, counts as empty.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tailrace.ledger.process.durable_file import locked, replace_file

VERSION = 1
SETTLED_S = 2.0
"""Seconds for which a file must be unchanged before its digest may be cached."""
MAX_KEPT = 4096
"""Maximum number of digests in the cache."""


class FileDigests:
    """Digests of files, cached in the file `path` if it is given.

    `clock_s` returns Unix time in seconds.
    """

    def __init__(self, path: Path | None = None, clock_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock_s = clock_s
        self._kept = _read(path) if path is not None else {}
        self._new: dict[str, tuple[Identity, str]] = {}
        self.hashed_bytes = 0
        """Total size in bytes of the files that had to be hashed."""

    def of(self, path: Path) -> bytes:
        """Return the SHA-256 of a file; raises OSError if it cannot be read."""
        with path.open("rb") as file:
            name, before = str(path.resolve()), _identity(os.fstat(file.fileno()))
            kept = self._kept.get(name)
            if kept is not None and kept[0] == before:
                return bytes.fromhex(kept[1])
            digest = hashlib.file_digest(file, "sha256")
            after = os.fstat(file.fileno())
        self.hashed_bytes += after.st_size
        if _identity(after) == before and self._clock_s() - after.st_ctime > SETTLED_S:
            self._kept[name] = self._new[name] = before, digest.hexdigest()
        return digest.digest()

    def keep(self) -> None:
        """Add new digests to the cache file; nothing happens if it cannot be written.

        Other workers may add digests at the same time, so the file is read again under a lock.
        """
        if self._path is None or not self._new:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._path):
                stored = _read(self._path)
                files = {**{n: d for n, d in stored.items() if n not in self._new}, **self._new}
                files = dict([*files.items()][-MAX_KEPT:])
                document = {"version": VERSION, "files": files}
                replace_file(self._path, json.dumps(document).encode())
            self._new = {}


Identity = list[int]


def identities(directory: Path) -> dict[str, Identity]:
    """Return the identity of each file in a folder, by name; raises OSError if it is unreadable.

    A file has not changed if its identity is the same as before.
    """
    return {path.name: _identity(path.stat()) for path in directory.iterdir()}


def _identity(stat: os.stat_result) -> Identity:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read(path: Path) -> dict[str, tuple[Identity, str]]:
    """Return the digests of a cache file; empty if it is missing, damaged or of another version."""
    try:
        stored = json.loads(path.read_text("utf-8"))
        files = stored["files"] if stored["version"] == VERSION else {}
        return {
            str(name): (list(map(int, seen)), _hex(digest))
            for name, (seen, digest) in files.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _hex(digest: str) -> str:
    if len(bytes.fromhex(digest)) != hashlib.sha256().digest_size:
        raise ValueError("not a SHA-256")
    return digest
