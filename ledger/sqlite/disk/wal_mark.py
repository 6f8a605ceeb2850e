"""How far the WAL was written: a mark beside it, by which damage is told from a torn end.

SQLite reads a WAL as far as its checksums hold, and takes what lies behind for nothing: damage
looks like the torn end that a crash leaves. So how far the WAL was written is kept in the lock
file beside it, a mark that is held against the WAL at a start. It is written with every commit, in
some two microseconds and without a sync, so that it outlives a process as surely as the WAL does.
When the power fails either may be ahead of the other; that the system has booted since says so.
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
"""In the header of a WAL, big-endian; the first grows by one whenever it begins anew."""
MAX_ANEW = 1 << 20
"""Times that a WAL may have begun anew since the mark; salts of another one are random."""
_MARK = struct.Struct("<4sI8s36s")  # magic, frames, salts, boot
_MAGIC = b"TRLM"
_CRC = struct.Struct("<I")

log = structlog.get_logger("ledger")


class Mark(NamedTuple):
    """Every commit so far is in the first `frames` frames (one page each) of the WAL `salts`.

    With 0 frames nothing is said of the WAL; there is a ledger, in any case.
    """

    frames: int
    salts: bytes
    boot: bytes


class Lost(NamedTuple):
    """Something that was acknowledged is not there. `refused`: nobody should write over the rest.

    That is so where what is left may be needed to save it, and no power cut explains it.
    """

    what: str
    refused: bool


class HighWater:
    """The mark of a ledger that is opened, and written; `lock` is the descriptor of its lock file.

    None for a ledger that another VFS keeps: its WAL may be anywhere. Raises `Damaged` where
    something is lost.
    """

    def __init__(self, path: Path, lock: int | None) -> None:
        self._path = path
        self._mark = None if lock is None else read_mark(path)
        _require_nothing_lost(path, lost_file(path, self._mark))
        self._lock = lock
        self._wal = _wal(path)
        self._boot = boot_id()
        self._frames, self._salts = 0, b""

    def look(self, frames: int) -> None:
        """SQLite has found so many frames of the WAL to be whole; they may be moved after this."""
        _require_nothing_lost(self._path, lost_wal(self._path, self._mark, frames))
        self.say_nothing()

    def reached(self, frames: int) -> None:
        """A commit has been written; the WAL has so many frames now."""
        if self._lock is None:
            return
        if frames <= self._frames or not self._salts:  # it has begun anew
            self._salts = _head(self._wal)[_SALTS]
        self._frames = frames
        self._write()

    def say_nothing(self) -> None:
        """Before the WAL is moved and cut off, which may come through or not."""
        self._frames, self._salts = 0, b""
        self._write()

    def _write(self) -> None:
        if self._lock is None:
            return
        mark = _MARK.pack(_MAGIC, self._frames, self._salts, self._boot)
        with suppress(OSError):  # it is there to tell of damage, not to do any
            os.pwrite(self._lock, mark + _CRC.pack(zlib.crc32(mark)), 0)


def read_mark(path: Path) -> Mark | None:
    """The mark of the ledger at `path`, if it has one."""
    with suppress(OSError):
        data = lock_file(path).read_bytes()
        mark = data[: _MARK.size]
        if len(data) == _MARK.size + _CRC.size and _CRC.pack(zlib.crc32(mark)) == data[len(mark) :]:
            _, frames, salts, boot = _MARK.unpack(mark)
            return Mark(frames, salts, boot.rstrip(b"\0"))
    return None


def lost_file(path: Path, mark: Mark | None) -> Lost | None:
    """What is lost of a file that SQLite has not opened yet: it removes the WAL of an empty one."""
    if mark is None or path.stat().st_size > 0:
        return None
    return Lost("it is empty, and it was not", refused=bool(_head(_wal(path))))


def lost_wal(path: Path, mark: Mark | None, frames: int) -> Lost | None:
    """What is lost of a WAL of which SQLite has found so many frames to be whole."""
    if mark is None or mark.frames == 0:
        return None
    salts = _head(_wal(path))[_SALTS]
    if not salts:
        return Lost(f"its WAL is gone, which held {mark.frames} pages", refused=False)
    anew = _number(salts) - _number(mark.salts) & 0xFFFFFFFF
    if 0 < anew < MAX_ANEW or (frames >= mark.frames and anew == 0):
        return None
    power_cut = not mark.boot or mark.boot != boot_id()
    if anew and frames:
        return Lost(f"its WAL is another one than that which held {mark.frames} pages", False)
    what = f"its WAL ends after {frames if anew == 0 else 0} of {mark.frames} pages"
    return Lost(what, refused=not power_cut)


def _require_nothing_lost(path: Path, lost: Lost | None) -> None:
    """Say what is lost; `Damaged` where nobody should go on before somebody has seen to it."""
    if lost is None:
        return
    if lost.refused:
        raise Damaged(
            f"{path} is behind what it had acknowledged: {lost.what}",
            hint="restore it from a copy with all that lies beside it, or go on with what is left"
            " after `tailrace ledger accept`",
        )
    log.error("ledger.behind", path=str(path), error=lost.what)


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _head(wal: Path) -> bytes:
    """The header of a WAL; empty where there is none."""
    with suppress(OSError), wal.open("rb") as file:
        head = file.read(WAL_HEADER_BYTES)
        return head if len(head) == WAL_HEADER_BYTES else b""
    return b""


def _number(salts: bytes) -> int:
    return int.from_bytes(salts[:4], "big")
