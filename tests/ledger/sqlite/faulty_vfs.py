"""A disk under the real SQLite that fills up, fails to sync, and loses its power.

    disk = Disk(Random(seed))
    vfs = FaultyVfs("faulty", disk)            # keep it while connections are open
    connection = apsw.Connection(path, vfs="faulty")
    disk.room = 10_000                          # then it is full
    disk.fail_sync(3)                           # the third sync from now on fails
    disk.misread = apsw.SQLITE_IOERR_READ       # every read of a database fails so
    disk.cut_power(folder)                      # what a machine would find after it

Files are real, so that SQLite's locks and its shared memory work as ever. Beside them the
disk keeps what would be on the medium: a file's bytes as of its last sync, and the writes
since. A power cut keeps any of those, in any order, each sector of `SECTOR_BYTES` on its
own, and may tear one in the middle. Nothing is really synced, which makes it quick.

After a failed sync Linux marks the pages clean and never writes them again ("Can
Applications Recover from fsync Failures?", USENIX ATC 2020). So does this disk: readers go
on seeing such a write, no later sync makes it durable, and a power cut may lose it. Linux also
reports the failure once to every descriptor that was open when it happened (since 4.13; fsync(2)
and Documentation/filesystems/vfs.rst), by the next sync of that descriptor. So does this disk.

Syncs by a descriptor, past SQLite, are not seen: of the database file less is durable here
than would be after `SqliteFile._move_and_sync`.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import RLock
from types import TracebackType
from typing import NamedTuple

import apsw

from tailrace.ledger.sqlite.disk.disk_sync import Failed
from tailrace.ledger.sqlite.disk.work_thread import WorkThread

SECTOR_BYTES = 512
"""Size of a sector, which a disk writes whole or not at all; 512 is the smallest in use."""
SYNC_TURNS = 3
"""Turns of the event loop that a sync takes which it waits for."""
TORN = 0.1
"""Share of the sectors lost in a power cut that are half written."""


class Write(NamedTuple):
    """Bytes at an offset, or (without bytes) a new end of the file."""

    offset: int
    data: bytes | None

    def apply(self, image: bytearray) -> None:
        if self.data is None:
            del image[self.offset :]
            return
        missing = self.offset - len(image)
        if missing > 0:
            image += bytes(missing)
        image[self.offset : self.offset + len(self.data)] = self.data

    def sectors(self) -> Iterator[Write]:
        if self.data is None:
            yield self
            return
        at, end = self.offset, self.offset + len(self.data)
        while at < end:
            stop = min(end, (at // SECTOR_BYTES + 1) * SECTOR_BYTES)
            yield Write(at, self.data[at - self.offset : stop - self.offset])
            at = stop


@dataclass(slots=True)
class Medium:
    """One file: its `durable` bytes, and what was written `since` the last sync.

    `linked` says that its name is durable. `failures` counts the syncs of it that failed.
    """

    size: int = 0
    durable: bytearray = field(default_factory=bytearray)
    since: list[Write] = field(default_factory=list)
    linked: bool = False
    failures: int = 0

    def synced(self) -> None:
        for write in self.since:
            write.apply(self.durable)
        self.since.clear()

    def sync_failed(self, random: Random) -> None:
        """Fail the sync: some of the writes have reached the medium, and the rest never will."""
        self.durable[:] = self.after_power_cut(random)
        self.since.clear()
        self.failures += 1

    def after_power_cut(self, random: Random) -> bytes:
        """Return the durable bytes and whatever else has reached the medium."""
        image = bytearray(self.durable)
        kept = random.choice((0.0, 0.5, 0.9, 1.0))
        for write in self.since:
            for sector in write.sectors():
                if random.random() < kept:
                    sector.apply(image)
                elif sector.data is not None and random.random() < TORN:
                    torn = sector.data[: random.randrange(len(sector.data))]
                    Write(sector.offset, torn).apply(image)
        return bytes(image)


class Disk:
    """The files of one `FaultyVfs`, all in one folder, and what is wrong with the disk they are on.

    `room`: bytes by which files may still grow (None: no end). `misread`: the SQLite error that
    reads of database files and their WAL end with (None: they succeed). `syncs` and `writes`
    count.
    """

    def __init__(self, random: Random) -> None:
        self.room: int | None = None
        self.misread: int | None = None
        self.syncs = 0
        self.writes = 0
        self._random = random
        self._failing: int | None = None
        self._at_write: tuple[int, Callable[[], None]] | None = None
        self.lock = RLock()  # a write is in the file and in the books, or in neither
        self._files: dict[str, Medium] = {}
        self._ghosts: dict[str, bytes] = {}  # unlinked, but their names are not yet gone

    def fail_sync(self, nth: int = 1) -> None:
        """Let the `nth` sync from now on fail, and the ones after it succeed again."""
        self._failing = self.syncs + nth

    def call_at_write(self, nth: int, callback: Callable[[], None]) -> None:
        """Call it, once, in the midst of the `nth` write from now on, in whatever thread."""
        self._at_write = (self.writes + nth, callback)

    def cut_power(self, folder: Path) -> None:
        """Write into `folder` what is left of each file; the disk itself goes on."""
        with self.lock:
            for name in sorted({*self._files, *self._ghosts}):
                medium = self._files.get(name)
                image = None if medium is None else medium.after_power_cut(self._random)
                if medium is None or not medium.linked:
                    # Neither the new name nor the removal of the old one is sure.
                    image = self._random.choice((image, self._ghosts.get(name)))
                if image is not None:
                    (folder / Path(name).name).write_bytes(image)

    def kill(self, folder: Path) -> Disk:
        """Return what SIGKILL leaves in `folder`: all that was written, if synced or not."""
        successor = Disk(self._random)
        with self.lock:
            for name, medium in self._files.items():
                copy = folder / Path(name).name
                copy.write_bytes(Path(name).read_bytes())
                successor._files[str(copy)] = Medium(
                    medium.size,
                    bytearray(medium.durable),
                    list(medium.since),
                    medium.linked,
                )
        return successor

    # ---- what the VFS reports ----

    def opened(self, name: str, size: int) -> Medium:
        """Return a file is opened: one that was there before the disk was is durable as it is."""
        with self.lock:
            medium = self._files.get(name)
            if medium is None:
                medium = self._files[name] = Medium(size)
                if size:
                    medium.durable[:] = Path(name).read_bytes()
                    medium.linked = True
            return medium

    def deleted(self, name: str, *, durably: bool) -> None:
        with self.lock:
            medium = self._files.pop(name, None)
            if durably:
                self._ghosts.pop(name, None)
            elif medium is not None and medium.linked:
                self._ghosts[name] = bytes(medium.durable)

    def fits(self, medium: Medium, offset: int, length: int) -> int:
        """Return how many of the bytes may be written; all of them unless the disk is full."""
        with self.lock:
            growth = max(0, offset + length - medium.size)
            if self.room is None or growth <= self.room:
                self.room = None if self.room is None else self.room - growth
                return length
            length -= growth - self.room
            self.room = 0
            return max(0, length)

    def wrote(self, medium: Medium, write: Write) -> None:
        with self.lock:
            self.writes += 1
            medium.since.append(write)
            if write.data is None:
                medium.size = write.offset
            else:
                medium.size = max(medium.size, write.offset + len(write.data))
            if self._at_write is not None and self.writes >= self._at_write[0]:
                (_, callback), self._at_write = self._at_write, None
                callback()

    def sync(self, name: str, medium: Medium) -> int:
        """Sync a file; return how many syncs of it have failed by then, this one included."""
        with self.lock:
            self.syncs += 1
            if self.syncs == self._failing:
                medium.sync_failed(self._random)
                return medium.failures
            medium.synced()
            if not medium.linked and name.endswith(("-journal", "-wal")):
                self._sync_folder()
            return medium.failures

    def failures(self, name: str) -> int:
        """Return how many syncs of a file have failed; 0 for a file that is not there."""
        with self.lock:
            medium = self._files.get(name)
            return 0 if medium is None else medium.failures

    def begin_sync(self, name: str) -> Callable[[], int]:
        """Begin a sync that takes a while; return the function that ends it.

        That function returns what `sync` returns. The writes become durable only when it is called;
        writes made in the meantime do not.
        """
        with self.lock:
            medium = self._files[name]
            before = list(medium.since)
            return lambda: self._end_sync(name, medium, before)

    def wal_sync(self, path: Path, _: WorkThread, failed: Failed) -> FaultySync:
        """`tailrace.ledger.sqlite.disk.file.SyncOf` for its files."""
        return FaultySync(self, path, failed)

    def _end_sync(self, name: str, medium: Medium, before: list[Write]) -> int:
        with self.lock:
            old = set(map(id, before))
            later = [write for write in medium.since if id(write) not in old]
            medium.since[:] = [write for write in medium.since if id(write) in old]
            failures = self.sync(name, medium)
            medium.since += later
            return failures

    def _sync_folder(self) -> None:
        """SQLite does so with the first sync of a new journal or WAL, and so do we."""
        self._ghosts.clear()
        for medium in self._files.values():
            medium.linked = True


class FaultySync:
    """A DiskSync of a file of a disk: some turns of the loop each."""

    def __init__(self, disk: Disk, path: Path, failed: Failed) -> None:
        self._disk = disk
        self._path = path
        self._failed = failed
        self._reported = disk.failures(str(path))

    def begin(self) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._sync(self._disk.begin_sync(str(self._path))))

    async def close(self) -> None:
        """Nothing is open."""

    async def _sync(self, end: Callable[[], int]) -> None:
        for _ in range(SYNC_TURNS):
            await asyncio.sleep(0)
        reported, self._reported = self._reported, end()
        if self._reported > reported:
            raise self._failed(OSError(errno.EIO, "the disk does not sync"))


class FaultyVfs(apsw.VFS):
    """SQLite's way to the files of a `Disk`; registered under `name` while it lives."""

    def __init__(self, name: str, disk: Disk) -> None:
        super().__init__(name, base="")
        self._disk = disk

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> FaultyFile:  # noqa: N802
        return FaultyFile(self._disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        with self._disk.lock:
            super().xDelete(filename, False)
            self._disk.deleted(filename, durably=syncdir)


class FaultyFile(apsw.VFSFile):
    """An open file; those without a name (SQLite's temporary ones) have no faults."""

    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk
        self._name = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        self._medium = disk.opened(self._name, self.xFileSize()) if name else Medium()
        self._reported = self._medium.failures

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        if self._disk.misread is not None:
            raise apsw.exception_for(self._disk.misread)
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        with self._disk.lock:
            fitting = self._disk.fits(self._medium, offset, len(data))
            part = bytes(data[:fitting])
            if part:
                super().xWrite(part, offset)
                self._disk.wrote(self._medium, Write(offset, part))
        if fitting < len(data):
            raise apsw.exception_for(apsw.SQLITE_FULL)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        with self._disk.lock:
            super().xTruncate(newsize)
            self._disk.wrote(self._medium, Write(newsize, None))

    def xSync(self, flags: int) -> None:  # noqa: N802
        reported, self._reported = self._reported, self._disk.sync(self._name, self._medium)
        if self._reported > reported:
            raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)

    def excepthook(
        self,
        etype: type[BaseException] | None,
        evalue: BaseException | None,
        etraceback: TracebackType | None,
    ) -> bool:
        """Swallow SQLite errors, since SQLite itself may forgive a fault in a checkpoint."""
        return isinstance(evalue, apsw.Error)
