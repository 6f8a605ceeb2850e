"""The mark of a ledger: how many frames of its WAL were written.

SQLite reads a WAL as far as its checksums match and ignores the rest, so damage looks like the
torn end that a crash leaves. The mark tells the two apart at the next start. It lies in the lock
file and is written with every commit, in some two microseconds and without a sync, so it survives
a kill as the WAL does. After a power failure either may be ahead of the other, so the mark also
says in which boot it was written.
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
"""Two big-endian salts in the header of a WAL; the first grows by 1 whenever the WAL restarts."""
MAX_ANEW = 1 << 20
"""Maximum restarts of a WAL since the mark. A larger difference of salts is another WAL's."""
_MARK = struct.Struct("<4sI8s36s")  # magic, frames, salts, boot
_MAGIC = b"TRLM"
_CRC = struct.Struct("<I")

log = structlog.get_logger("ledger")


class Mark(NamedTuple):
    """All commits are in the first `frames` frames (one page each) of the WAL with these `salts`.

    A mark of 0 frames says only that there is a ledger.
    """

    frames: int
    salts: bytes
    boot: bytes


class Lost(NamedTuple):
    """Commits that were acknowledged and are gone.

    `refused`: the origin must not start, because no power failure explains the loss, and writing
    would overwrite what may be needed to repair it.
    """

    what: str
    refused: bool


class WalMark:
    """The mark of a ledger that its owner opens and writes.

    `lock` is the descriptor of its lock file, or None for a ledger of another VFS, whose WAL may
    be anywhere. Raises `Damaged` if commits are lost.
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
        """Compare the mark with the whole `frames` that SQLite has found, before any is moved."""
        _require_nothing_lost(self._path, lost_wal(self._path, self._mark, frames))
        self.clear()

    def advance(self, frames: int) -> None:
        """Note that the WAL has this many frames after a commit."""
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
        with suppress(OSError):  # a mark that cannot be written must not stop commits
            os.pwrite(self._lock, mark + _CRC.pack(zlib.crc32(mark)), 0)


def read_mark(path: Path) -> Mark | None:
    """Return the mark of the ledger at `path`; None if it has none."""
    with suppress(OSError):
        data = lock_file(path).read_bytes()
        mark = data[: _MARK.size]
        if len(data) == _MARK.size + _CRC.size and _CRC.pack(zlib.crc32(mark)) == data[len(mark) :]:
            _, frames, salts, boot = _MARK.unpack(mark)
            return Mark(frames, salts, boot.rstrip(b"\0"))
    return None


def lost_file(path: Path, mark: Mark | None) -> Lost | None:
    """Return what is lost of a file before SQLite opens it and removes the WAL of an empty one."""
    if mark is None or path.stat().st_size > 0:
        return None
    return Lost("it is empty, but had commits", refused=bool(_head(_wal(path))))


def lost_wal(path: Path, mark: Mark | None, frames: int) -> Lost | None:
    """Return what is lost of a WAL in which SQLite has found this many whole frames."""
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
    """Log what is lost, or raise `Damaged` if an operator has to decide first."""
    if lost is None:
        return
    if lost.refused:
        raise Damaged(
            f"{path} lacks acknowledged commits: {lost.what}",
            hint="restore it and the files beside it (-wal, .lock) from one backup, or run"
            " `tailrace ledger accept` to continue without the lost commits",
        )
    log.error("ledger.behind", path=str(path), error=lost.what)


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _head(wal: Path) -> bytes:
    """Return the header of a WAL; empty if there is none."""
    with suppress(OSError), wal.open("rb") as file:
        head = file.read(WAL_HEADER_BYTES)
        return head if len(head) == WAL_HEADER_BYTES else b""
    return b""


def _number(salts: bytes) -> int:
    return int.from_bytes(salts[:4], "big")
