"""SHA-256 of files, kept by what tells that a file is still the one that was read.

A checkpoint of 16 GB takes 12 s to hash, at every start of a worker. A file whose device, inode,
size and times are those of a digest that was kept is not read again: whatever writes to a file
moves its ctime, which no program can set. One that was changed within the last moments is not
kept, because its next change might have the same time. What was kept is written as a whole or
not at all; what cannot be read, or is of another version, is computed again.
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
"""A file that was changed less than so long ago may change again at the same time."""
MAX_KEPT = 4096


class FileDigests:
    """`path` is where they are kept; None for nowhere. `clock_s` is Unix time."""

    def __init__(self, path: Path | None = None, clock_s: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock_s = clock_s
        self._kept = _read(path) if path is not None else {}
        self._new: dict[str, tuple[Identity, str]] = {}
        self.hashed_bytes = 0
        """Of the files that were read."""

    def of(self, path: Path) -> bytes:
        """Raises OSError where it cannot be read."""
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
        """Add what is new to the file; a folder that cannot be written to is left alone.

        Other workers may do so at the same time: the file is read again under a lock.
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
    """Of the files in a folder, by name; they are the same ones as long as these are. OSError."""
    return {path.name: _identity(path.stat()) for path in directory.iterdir()}


def _identity(stat: os.stat_result) -> Identity:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read(path: Path) -> dict[str, tuple[Identity, str]]:
    """Nothing, where it is damaged or not ours."""
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
