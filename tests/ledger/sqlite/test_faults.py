"""The real ledger on a disk that loses power, fills up, fails to sync, or rots.

What was acknowledged is held here, outside the ledger, and looked for afterwards.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from threading import Event, current_thread
from typing import NamedTuple

import pytest

from tailrace.ledger.errors import ConfigError, LedgerFailed, NotFound
from tailrace.ledger.frame import Durability, Token, encode
from tailrace.ledger.interface import Append, NewStream, ObjectKey, ObjectWrite, Record
from tailrace.ledger.sqlite.disk.checkpointer import Phase
from tailrace.ledger.sqlite.disk.disk_sync import sync_of
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.storage import Commit
from tests.ledger.sqlite.faulty_vfs import Disk, FaultyFile, FaultyVfs, Medium

pytestmark = pytest.mark.anyio

KEY = ObjectKey("counter", "one")
POWER, PROCESS = bytes([1]) * 16, bytes([2]) * 16
DURABILITY = {POWER: Durability.POWER, PROCESS: Durability.PROCESS}
CUTS = 60


@pytest.fixture(autouse=True)
def _few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the WAL is moved, and begins anew, while things go wrong."""
    monkeypatch.setattr("tailrace.ledger.sqlite.disk.checkpointer.CHECKPOINT_PAGES", 20)
    monkeypatch.setattr("tailrace.ledger.sqlite.disk.checkpointer.CHECKPOINT_REST_PAGES", 4)


def record(stream: bytes, index: int) -> Record:
    """Return what a stream holds at an index; some are long, so that segments form."""
    size = 3000 if index % 5 == 0 else index % 60
    return Record(encode(Token(f"{stream[0]}/{index} " + "x" * size, index)), (stream[0], index))


class Lost(NamedTuple):
    """Acknowledged frames of each class, and writes of an object of class `power`."""

    power: int
    process: int
    object: int


NOTHING = Lost(0, 0, 0)


@dataclass
class Outside:
    """A client that appends, and what was acknowledged to it: the next index of each stream."""

    acknowledged: dict[bytes, int] = field(default_factory=lambda: {POWER: 0, PROCESS: 0})
    counted: int = 0

    async def produce(self, ledger: SqliteLedger, stream: bytes, count: int) -> None:
        first = (await ledger.info(stream)).next_index
        epoch = await ledger.take_over(stream)
        for index in range(first, first + count):
            append = Append(stream, epoch, index, record(stream, index))
            assert await ledger.append([append]) == []
            self.acknowledged[stream] = index + 1

    async def count(self, ledger: SqliteLedger, count: int) -> None:
        """Write an object whose value says which of its writes was the last."""
        epoch = (await ledger.objects.claim(KEY)).epoch
        stored = await ledger.objects.get(KEY, ["n"])
        for n in range(int(stored.get("n", b"0")) + 1, count):
            puts = {"n": b"%d" % n, "twice": b"%d" % (2 * n)}
            write = ObjectWrite(KEY, epoch, puts=puts, durability=Durability.POWER)
            await ledger.objects.write(write)
            self.counted = n

    async def work(self, ledger: SqliteLedger, count: int) -> None:
        await asyncio.gather(
            self.produce(ledger, POWER, count),
            self.produce(ledger, PROCESS, 3 * count),
            self.count(ledger, count),
        )

    async def lost(self, ledger: SqliteLedger) -> Lost:
        """Return what was acknowledged and is missing; what there is must be as it was written."""
        return Lost(
            await self._frames_lost(ledger, POWER),
            await self._frames_lost(ledger, PROCESS),
            await self._writes_lost(ledger),
        )

    async def _frames_lost(self, ledger: SqliteLedger, stream: bytes) -> int:
        try:
            found = (await ledger.info(stream)).next_index
        except NotFound:
            return self.acknowledged[stream]
        records = await ledger.read(stream, 0, found + 1)
        assert records == [record(stream, index) for index in range(found)]
        return max(0, self.acknowledged[stream] - found)

    async def _writes_lost(self, ledger: SqliteLedger) -> int:
        values = await ledger.objects.get(KEY, ["n", "twice"])
        n = int(values.get("n", b"0"))
        assert int(values.get("twice", b"0")) == 2 * n
        return max(0, self.counted - n)


@contextmanager
def faulty(random: Random) -> Iterator[Disk]:
    disk = Disk(random)
    vfs = FaultyVfs("faulty", disk)
    yield disk
    vfs.unregister()


@asynccontextmanager
async def opened(path: Path, disk: Disk | None) -> AsyncIterator[SqliteLedger]:
    """On a faulty disk, or on a good one."""
    vfs, wal_sync = ("faulty", disk.wal_sync) if disk is not None else (None, sync_of)
    ledger = await SqliteLedger.open(path / "ledger.db", lambda: 0, vfs=vfs, wal_sync=wal_sync)
    try:
        yield ledger
    finally:
        await ledger.close()


async def create(ledger: SqliteLedger) -> None:
    for stream, durability in DURABILITY.items():
        await ledger.create(NewStream(stream, "{}", durability, 3600))


def folder(tmp_path: Path, name: str) -> Path:
    made = tmp_path / name
    made.mkdir()
    return made


# ---- power ----


async def cut_while(
    work: Callable[[Outside, SqliteLedger], Awaitable[None]], tmp_path: Path, seed: int
) -> Lost:
    """Cut the power at a random moment of `work`."""
    random, outside, told = Random(seed), Outside(), list[Outside]()
    left = folder(tmp_path, f"left{seed}")

    def cut() -> None:
        told.append(Outside(dict(outside.acknowledged), outside.counted))
        disk.cut_power(left)

    with faulty(random) as disk:
        async with opened(folder(tmp_path, f"disk{seed}"), disk) as ledger:
            await create(ledger)
            disk.call_at_write(random.randint(1, 300), cut)
            await work(outside, ledger)
            if not told:
                cut()
    async with opened(left, None) as ledger:
        return await told[0].lost(ledger)


async def test_a_power_cut_takes_nothing_of_class_power(tmp_path: Path) -> None:
    for seed in range(CUTS):
        lost = await cut_while(lambda o, ledger: o.work(ledger, 40), tmp_path, seed)
        assert (lost.power, lost.object) == (0, 0), f"seed {seed}"


async def test_a_power_cut_brings_no_deleted_stream_of_class_power_back(tmp_path: Path) -> None:
    for seed in range(10):
        left = folder(tmp_path, f"left{seed}")
        with faulty(Random(seed)) as disk:
            async with opened(folder(tmp_path, f"disk{seed}"), disk) as ledger:
                await create(ledger)
                await Outside().produce(ledger, POWER, 3)
                await ledger.delete(POWER)
                disk.cut_power(left)
        async with opened(left, None) as ledger:
            with pytest.raises(NotFound):
                await ledger.info(POWER)


async def test_of_class_process_a_power_cut_takes_the_last_frames_only(tmp_path: Path) -> None:
    """This is what the class says. Where nothing of class `power` syncs, most cuts do."""
    cost = 0
    for seed in range(CUTS // 2):
        lost = await cut_while(lambda o, ledger: o.produce(ledger, PROCESS, 200), tmp_path, seed)
        cost += lost.process > 0
    assert cost > CUTS // 10


async def test_these_cuts_would_find_a_commit_that_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def commit(file: SqliteFile, commit: Commit, behind: Callable[[], Commit]) -> None:
        file.commit(commit)
        file.commit(behind())

    monkeypatch.setattr(SqliteFile, "commit_durably", commit)
    found = 0
    for seed in range(CUTS // 3):
        lost = await cut_while(lambda o, ledger: o.work(ledger, 40), tmp_path, seed)
        found += (lost.power, lost.object) != (0, 0)
    assert found > 0


# ---- a disk that is full, or does not sync ----


async def until_it_fails(outside: Outside, ledger: SqliteLedger) -> LedgerFailed:
    """Work until the ledger gives up; it takes nothing more then, and shows nothing new."""
    work = [
        asyncio.ensure_future(outside.produce(ledger, POWER, 500)),
        asyncio.ensure_future(outside.produce(ledger, PROCESS, 1500)),
        asyncio.ensure_future(outside.count(ledger, 500)),
    ]
    errors = await asyncio.gather(*work, return_exceptions=True)
    assert [type(error) for error in errors] == [LedgerFailed] * 3
    for stream in DURABILITY:
        index = ledger.tail(stream).released
        assert index == outside.acknowledged[stream]
        with pytest.raises(LedgerFailed):
            await ledger.append([Append(stream, 2, index, record(stream, index))])
        with pytest.raises(LedgerFailed):
            await ledger.take_over(stream)
    assert await outside.lost(ledger) == NOTHING  # reading goes on
    assert isinstance(errors[0], LedgerFailed)
    return errors[0]


async def test_a_ledger_that_cannot_be_made_for_want_of_room_says_so(tmp_path: Path) -> None:
    with faulty(Random(1)) as disk:
        disk.room = 0
        with pytest.raises(ConfigError, match="free some space on the disk of"):
            async with opened(tmp_path, disk):
                pass


@pytest.mark.parametrize("room", [0, 1, 500, 4_095, 4_096, 30_000, 100_001, 200_000])
async def test_on_a_full_disk_the_ledger_stops_and_loses_nothing(tmp_path: Path, room: int) -> None:
    outside = Outside()
    with faulty(Random(room)) as disk:
        async with opened(tmp_path, disk) as ledger:
            await create(ledger)
            await outside.work(ledger, 20)
            disk.room = room
            error = await until_it_fails(outside, ledger)
            assert "full" in str(error)
        disk.room = None
        async with opened(tmp_path, disk) as ledger:
            assert await outside.lost(ledger) == NOTHING
            await outside.work(ledger, 10)
            assert await outside.lost(ledger) == NOTHING


@asynccontextmanager
async def failed(tmp_path: Path, outside: Outside, sync: int) -> AsyncIterator[Disk]:
    """Yield a disk under a ledger that has worked until a sync failed, and is still open."""
    with faulty(Random(sync)) as disk:
        async with opened(folder(tmp_path, "disk"), disk) as ledger:
            await create(ledger)
            await outside.work(ledger, 10)
            disk.fail_sync(sync)
            await until_it_fails(outside, ledger)
            yield disk


@pytest.mark.parametrize("sync", [1, 2, 3, 10, 40])
async def test_after_a_sync_that_failed_nothing_acknowledged_is_lost_even_by_a_power_cut(
    tmp_path: Path, sync: int
) -> None:
    """The process is killed, its successor goes on, then the power fails too.

    What Linux has dropped after the failed sync, the successor still reads from the page
    cache; it must not acknowledge anything that would only be whole together with that.
    """
    outside = Outside()
    after_kill, after_cut = folder(tmp_path, "killed"), folder(tmp_path, "cut")
    async with failed(tmp_path, outside, sync) as disk:
        successor = disk.kill(after_kill)
    vfs = FaultyVfs("faulty", successor)
    async with opened(after_kill, successor) as ledger:
        assert await outside.lost(ledger) == NOTHING
        await outside.work(ledger, 10)
        successor.cut_power(after_cut)
    vfs.unregister()
    async with opened(after_cut, None) as ledger:
        lost = await outside.lost(ledger)
        assert (lost.power, lost.object) == (0, 0)


@pytest.mark.parametrize("sync", [1, 10])
async def test_after_a_sync_that_failed_a_power_cut_while_the_successor_opens_takes_nothing(
    tmp_path: Path, sync: int
) -> None:
    """At each of its writes: it moves a WAL of which the disk has not all that it reads."""
    outside, killed, cuts = Outside(), list[tuple[Path, Disk]](), 0
    async with failed(tmp_path, outside, sync) as disk:
        for nth in range(CUTS):
            copy = folder(tmp_path, f"killed{nth}")
            killed.append((copy, disk.kill(copy)))
    for nth, (copy, successor) in enumerate(killed):
        left = folder(tmp_path, f"left{nth}")
        vfs = FaultyVfs("faulty", successor)
        successor.call_at_write(nth + 1, partial(successor.cut_power, left))
        async with opened(copy, successor):
            pass
        vfs.unregister()
        if successor.writes <= nth:
            break
        cuts += 1
        async with opened(left, None) as ledger:
            lost = await outside.lost(ledger)
            assert (lost.power, lost.object) == (0, 0), f"write {nth}"
    assert cuts > 1


async def test_a_checkpoint_under_way_when_a_sync_fails_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commits' sync fails when the checkpoint has begun and has not yet synced the WAL.

    A database with pages of commits that the failed sync has dropped would meet a WAL without them.
    """
    has_failed, left = Event(), list[bytes]()
    database = folder(tmp_path, "disk") / "ledger.db"
    sync, sync_failed = FaultyFile.xSync, Medium.sync_failed

    def late(file: FaultyFile, flags: int) -> None:
        if current_thread().name == "ledger-checkpoint" and not has_failed.is_set():
            disk.fail_sync()
            has_failed.wait()
        sync(file, flags)

    def fails(medium: Medium, random: Random) -> None:
        sync_failed(medium, random)
        left.append(database.read_bytes())
        has_failed.set()

    monkeypatch.setattr(Medium, "sync_failed", fails)
    outside = Outside()
    with faulty(Random(1)) as disk:
        async with opened(database.parent, disk) as ledger:
            await create(ledger)
            await outside.work(ledger, 10)
            monkeypatch.setattr(FaultyFile, "xSync", late)
            await until_it_fails(outside, ledger)
    assert [database.read_bytes()] == left


@pytest.fixture
def _no_checkpoint(_few_pages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the WAL is moved when a test says so."""
    monkeypatch.setattr("tailrace.ledger.sqlite.disk.checkpointer.CHECKPOINT_PAGES", 4_096)


@pytest.mark.usefixtures("_no_checkpoint")
async def test_after_a_sync_that_failed_the_wal_is_not_moved_when_the_ledger_is_closed(
    tmp_path: Path,
) -> None:
    async with failed(tmp_path, Outside(), 3) as disk:
        writes = disk.writes
    assert disk.writes == writes


async def require_that_no_checkpoint_follows(outside: Outside, ledger: SqliteLedger) -> None:
    """Not even the one that the very next commit is asked for."""
    file = ledger._storage
    assert isinstance(file, SqliteFile)
    with pytest.raises(LedgerFailed):
        file._checkpointer._move_and_sync()
    file._checkpointer._phase = Phase.FINISHING
    with pytest.raises(LedgerFailed):
        await outside.work(ledger, 1)


@pytest.mark.usefixtures("_no_checkpoint")
async def test_after_a_checkpoint_that_failed_the_wal_does_not_begin_anew(tmp_path: Path) -> None:
    """It is all that the pages of the database can be written from once more."""
    outside = Outside()
    with faulty(Random(1)) as disk:
        async with opened(tmp_path, disk) as ledger:
            await create(ledger)
            await outside.work(ledger, 10)
            disk.fail_sync(2)  # the WAL's succeeds, the database's does not
            await require_that_no_checkpoint_follows(outside, ledger)


@pytest.mark.usefixtures("_no_checkpoint")
async def test_nor_does_it_where_what_was_moved_so_far_cannot_be_synced(tmp_path: Path) -> None:
    outside, (end, other_end) = Outside(), os.pipe()
    async with opened(tmp_path, None) as ledger:
        await create(ledger)
        await outside.work(ledger, 10)
        assert isinstance(ledger._storage, SqliteFile)
        os.dup2(end, ledger._storage._synced)  # a pipe has nothing to sync
        await require_that_no_checkpoint_follows(outside, ledger)
    os.close(end)
    os.close(other_end)


async def test_a_ledger_that_cannot_sync_when_it_is_opened_is_not_opened(tmp_path: Path) -> None:
    outside, killed = Outside(), folder(tmp_path, "killed")
    with faulty(Random(1)) as disk:
        async with opened(folder(tmp_path, "disk"), disk) as ledger:
            await create(ledger)
            await outside.work(ledger, 10)
            successor = disk.kill(killed)
    vfs = FaultyVfs("faulty", successor)
    successor.fail_sync(1)
    with pytest.raises(ConfigError, match=r"ledger\.db"):
        async with opened(killed, successor):
            pass
    async with opened(killed, successor) as ledger:
        assert await outside.lost(ledger) == NOTHING
    vfs.unregister()
