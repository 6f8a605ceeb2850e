"""The mark of a ledger: a record of how many frames its WAL has, to detect lost commits.

SQLite reads a WAL as far as its checksums match and ignores the rest. So a damaged WAL looks like
one with the torn end that a crash leaves. At the next start the mark tells the two apart. The mark
is in the lock file, and is written after every commit, which takes two microseconds. Without a sync
it survives a kill of the process, like the WAL, but after a power failure it may be newer or older
than the WAL. So it also has the id of the boot in which it was written.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from tailrace.ledger.errors import Damaged
from tailrace.ledger.process.lifecycle import boot_id
from tailrace.ledger.sqlite.disk.file_locks import lock_file

WAL_HEADER_BYTES = 32
WAL_FRAME_HEADER_BYTES = 24
_SALTS = slice(16, 24)
"""Position of two salts in a WAL's header; the first grows by 1 whenever the WAL restarts."""
MAX_ANEW = 1 << 20
"""Maximum restarts of a WAL since the mark was written.

If the first salts differ by more, the file is a different WAL.
"""
_MARK = struct.Struct("<4sI8s36s")  # the magic bytes, then the fields of `Mark`
_MAGIC = b"TRLM"
_CRC = struct.Struct("<I")

log = structlog.get_logger("ledger")


class Mark(NamedTuple):
    """The content of a mark: a WAL with these `salts` must have at least `frames` frames.

    A frame of a WAL has one page. A mark of 0 frames says only that the file is a ledger.
    """

    frames: int
    salts: bytes
    boot: bytes


class Lost(NamedTuple):
    """A loss of acknowledged commits; `what` describes it.

    With `refused` the origin must not start: a power failure does not explain the loss, and new
    writes could overwrite data that a repair needs.
    """

    what: str
    refused: bool


class WalMark:
    """Checks the mark of a ledger at its start, and updates it after each commit.

    `lock` is the descriptor of the lock file, which has the mark. It is None for a ledger on a
    custom VFS, which has no mark, because its WAL may be elsewhere. The constructor and `check`
    raise `Damaged` if commits are lost.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self._path = path
        self._mark = None if lock is None else read_mark(path)
        _require_nothing_lost(path, lost_file(path, self._mark))
        self._lock = lock
        self._wal = _wal(path)
        self._boot = boot_id()
        self._frames, self._salts = 0, b""

    def check(self, frames: int) -> None:
        """Raise `Damaged` if the WAL has fewer frames than the mark says.

        `frames` is the number of whole frames that SQLite found in the WAL before any checkpoint.
        """
        _require_nothing_lost(self._path, lost_wal(self._path, self._mark, frames))
        self.clear()

    def advance(self, frames: int) -> None:
        """Write to the mark that the WAL has `frames` frames after a commit."""
        if self._lock is None:
            return
        if frames <= self._frames or not self._salts:  # the WAL has restarted
            self._salts = _head(self._wal)[_SALTS]
        self._frames = frames
        self._write()

    def clear(self) -> None:
        """Write a mark of 0 frames, because the WAL is about to be truncated."""
        self._frames, self._salts = 0, b""
        self._write()

    def _write(self) -> None:
        if self._lock is None:
            return
        mark = _MARK.pack(_MAGIC, self._frames, self._salts, self._boot)
        with suppress(OSError):  # commits must go on even if the mark cannot be written
            os.pwrite(self._lock, mark + _CRC.pack(zlib.crc32(mark)), 0)


def read_mark(path: Path) -> Mark | None:
    """Return the mark of the ledger at `path`; None if that ledger has no valid mark."""
    with suppress(OSError):
        data = lock_file(path).read_bytes()
        mark = data[: _MARK.size]
        if len(data) == _MARK.size + _CRC.size and _CRC.pack(zlib.crc32(mark)) == data[len(mark) :]:
            _, frames, salts, boot = _MARK.unpack(mark)
            return Mark(frames, salts, boot.rstrip(b"\0"))
    return None


def lost_file(path: Path, mark: Mark | None) -> Lost | None:
    """Return the loss if the ledger's file is empty although it had commits, otherwise None.

    Call this before SQLite opens the file, because SQLite removes the WAL of an empty file.
    """
    if mark is None or path.stat().st_size > 0:
        return None
    return Lost("it is empty, but had commits", refused=bool(_head(_wal(path))))


def lost_wal(path: Path, mark: Mark | None, frames: int) -> Lost | None:
    """Return the loss of commits in the WAL, or None.

    `frames` is the number of whole frames that SQLite has found in the WAL.
    """
    if mark is None or mark.frames == 0:
        return None
    salts = _head(_wal(path))[_SALTS]
    if not salts:
        return Lost(f"its WAL of {mark.frames} pages is gone", refused=False)
    anew = _number(salts) - _number(mark.salts) & 0xFFFFFFFF
    if 0 < anew < MAX_ANEW or (frames >= mark.frames and anew == 0):
        return None
    power_cut = not mark.boot or mark.boot != boot_id()
    if anew and frames:
        return Lost(f"its WAL was replaced; the previous one had {mark.frames} pages", False)
    what = f"its WAL ends after {frames if anew == 0 else 0} of {mark.frames} pages"
    return Lost(what, refused=not power_cut)


def _require_nothing_lost(path: Path, lost: Lost | None) -> None:
    """Log a loss of commits, or raise `Damaged` if an operator must decide how to continue."""
    if lost is None:
        return
    if lost.refused:
        raise Damaged(
            f"{path} lacks acknowledged commits: {lost.what}",
            hint="restore the file and those beside it (-wal, .lock) from the same backup, or run"
            " `tailrace ledger accept` to continue without the lost commits",
        )
    log.error("ledger.commits_lost", path=str(path), error=lost.what)


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _head(wal: Path) -> bytes:
    """Return the header of a WAL; empty bytes if there is no WAL."""
    with suppress(OSError), wal.open("rb") as file:
        head = file.read(WAL_HEADER_BYTES)
        return head if len(head) == WAL_HEADER_BYTES else b""
    return b""


def _number(salts: bytes) -> int:
    return int.from_bytes(salts[:4], "big")
