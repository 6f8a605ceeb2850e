"""What must hold of a ledger's files: before they are opened, to write or to read, and while.

SQLite reads a WAL as far as its checksums hold, and takes what lies behind for nothing: damage
looks like the torn end that a crash leaves. So how far the WAL was written is kept in the lock
file beside it, a mark that is held against the WAL at a start. It is written with every commit, in
some two microseconds and without a sync, so that it outlives a process as surely as the WAL does.
When the power fails either may be ahead of the other; that the system has booted since says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from tailrace.ledger.errors import ConfigError, Damaged, LedgerFailed
from tailrace.ledger.process.lifecycle import boot_id

SCHEMA_VERSION = 6
APPLICATION_ID = 0x54_52_4C_31  # "TRL1"
BUSY_TIMEOUT_MS = 5_000
"""For how long a connection waits for the locks of others."""
DESCRIPTORS = Path("/dev/fd")
"""The descriptors of the process that looks, on Linux and macOS."""
SQLITE_FULL = 13
WAL_HEADER_BYTES = 32
_SALTS = slice(16, 24)
"""In the header of a WAL, big-endian; the first grows by one whenever it begins anew."""
MAX_ANEW = 1 << 20
"""Times that a WAL may have begun anew since the mark; salts of another one are random."""
_MARK = struct.Struct("<4sI8s36s")  # magic, frames, salts, boot
_MAGIC = b"TRLM"
_CRC = struct.Struct("<I")

log = structlog.get_logger("ledger")


def existing(path: Path) -> Path:
    """The ledger file that somebody named; `ConfigError` if there is none."""
    if not path.is_file():
        raise ConfigError(
            f"there is no ledger at {path}",
            field="ledger.path",
            hint="name the file with --path, or the folder of the origin with --data",
        )
    return path


def is_full(error: Exception) -> bool:
    """Return True if a write failed because the disk, or a quota, has no room for it."""
    no_room = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return no_room or getattr(error, "result", None) == SQLITE_FULL


def require_closed_here(path: Path) -> None:
    """`ConfigError` where this process has the file at `path` open.

    Two copies of SQLite are in use: the owner's comes with apsw, that of the tools is the
    system's. POSIX locks belong to a process, and closing any descriptor of a file drops all
    that the process has on it. So the two must not meet on one file in one process: neither
    would see the other's locks, and each would drop them (sqlite.org/howtocorrupt.html, 2.2.1).
    """
    with suppress(FileNotFoundError):  # nobody has opened what is not there
        number = number_of(path.stat())
        for name in os.listdir(DESCRIPTORS):
            with suppress(OSError):  # that of the listing itself
                if number_of(os.fstat(int(name))) == number:
                    raise ConfigError(
                        f"{path} is open in this process already",
                        field="ledger.path",
                        hint="read it from a process of its own, as `tailrace ledger` does",
                    )


def lock(path: Path) -> tuple[int, int]:
    """Lock the file at `path` for this process, and the lock file beside it; gives both open.

    The file itself, because it may have another name too: a hard link, another mount. The lock
    file, because another file may be put in its place. Both locks fall with the process.
    `ConfigError` where another process has them, or where this one has the file open.
    """
    beside = _lock(path, _lock_file(path))
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
            hint="one origin per ledger file; stop the other one or give this one its own path",
        ) from error
    return descriptor


def refuse_foreign(path: Path, version: int, application: int, *, has_tables: bool) -> None:
    """`ConfigError` for what is no ledger, or one of another version than ours.

    `version` and `application` are the numbers in its header, user_version and application_id.
    """
    if not has_tables and version == 0:
        return
    if application != APPLICATION_ID:
        raise ConfigError(
            f"{path} is not a ledger",
            field="ledger.path",
            hint="it is another program's file; give the ledger a path of its own",
        )
    if version != SCHEMA_VERSION:
        newer = "a newer Tailrace wrote it: run that one"
        older = "an older one wrote it: move it away, with what lies beside it; a new one is made"
        raise ConfigError(
            f"{path} is a ledger of version {version}, not {SCHEMA_VERSION}",
            field="ledger.path",
            hint=newer if version > SCHEMA_VERSION else older,
        )


def number_of(found: os.stat_result) -> tuple[int, int]:
    """Of the file, by whatever name it was found."""
    return found.st_dev, found.st_ino


# ---- how far the WAL was written ----


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
        data = _lock_file(path).read_bytes()
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


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


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


# ---- while they are open ----


class OpenFiles:
    """A database and its WAL, each under its name. No other file has the number of an open one.

    After a failed write the state on disk is unknown, and no further one is tried.
    """

    def __init__(self, path: Path, wal: Path) -> None:
        self._path = path
        self._numbers = {name: number_of(name.stat()) for name in (path, wal)}
        self.failure: LedgerFailed | None = None

    def check(self) -> None:
        """Raise what has failed, if anything has."""
        if self.failure is not None:
            raise self.failure

    def failed(self, error: Exception) -> LedgerFailed:
        """What nothing is written after."""
        cure = f"free space on the disk of {self._path.parent}"
        self.failure = LedgerFailed(
            f"{self._path}: {error}",
            hint=f"{cure if is_full(error) else 'see to the disk'}, then start the origin again",
        )
        return self.failure

    def check_names(self) -> None:
        """Fail where the files have been moved or deleted: nobody would find what is written."""
        for path, number in self._numbers.items():
            found = None
            with suppress(OSError):  # whatever the reason, nobody finds it by that name
                found = number_of(path.stat())
            if found != number:
                self.failure = LedgerFailed(
                    f"{path} was moved or deleted while it was written",
                    hint=f"put the files of {self._path} back as they were,"
                    " then start the origin again",
                )
                raise self.failure
