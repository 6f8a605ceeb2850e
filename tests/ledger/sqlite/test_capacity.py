"""Limits on space: the ledger's own, and a disk that others fill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import LedgerFull
from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import Append, NewStream, ObjectKey, ObjectWrite, Record, StreamKind
from tailrace.ledger.sqlite import retention
from tailrace.ledger.sqlite.capacity import (
    DISK_SHARE,
    HARD_SHARE,
    LOW_SHARE,
    MAX_WAL_BYTES,
    MIB,
    Room,
)
from tailrace.ledger.sqlite.disk import wal as sqlite_wal
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.disk.maintenance import SqliteMaintenance
from tailrace.ledger.sqlite.disk.preallocation import reserve
from tailrace.ledger.sqlite.disk.wal import STAT_BLOCK_BYTES, WAL_BYTES, WAL_PAGE_BYTES
from tailrace.ledger.sqlite.disk.wal_mark import WAL_HEADER_BYTES
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.ledger.sqlite.storage import Sizes
from tests.ledger.sqlite.cold_material import TTL_S, Clock, extend, sentence, store, stream_id
from tests.ledger.sqlite.faulty_vfs import Disk, FaultyVfs

pytestmark = pytest.mark.anyio

DISK_BYTES = 128 * MIB
GENERATION, OBJECT = StreamKind.GENERATION, StreamKind.OBJECT


class SharedDisk(SqliteMaintenance):
    """The maintenance of a ledger's file, on a disk of which others leave `free_bytes` free."""

    def __init__(self, maintenance: SqliteMaintenance) -> None:
        self.__dict__.update(maintenance.__dict__)
        self.free_bytes = DISK_BYTES
        self.wal_room_bytes = WAL_BYTES
        self.looks = 0
        self.looked = asyncio.Event()

    def sizes(self) -> Sizes:
        self.looks += 1
        self.looked.set()
        return (
            super()
            .sizes()
            ._replace(
                disk_bytes=DISK_BYTES,
                disk_free_bytes=self.free_bytes,
                wal_room_bytes=self.wal_room_bytes,
            )
        )

    async def look_again(self, times: int) -> None:
        """Wait until the ledger has looked at its disk so often."""
        for _ in range(times):
            self.looked.clear()
            await self.looked.wait()


@asynccontextmanager
async def opened(
    folder: Path, **settings: float | None
) -> AsyncIterator[tuple[SqliteLedger, SharedDisk]]:
    file = await SqliteFile.open(folder / "ledger.db")
    file.maintenance = disk = SharedDisk(file.maintenance)
    limits = RetentionSettings(pause_s=0, cold_after_s=10 * TTL_S, **settings)  # type: ignore[arg-type]
    ledger = await SqliteLedger.recover(file, Clock(), retention=limits)
    try:
        yield ledger, disk
    finally:
        await ledger.close()


def long(index: int, size: int = 1_000) -> Record:
    return Record(encode(Token("x" * size, index)), (index,))


def end(index: int) -> Record:
    return Record(encode(StreamEnd(index, FinishReason.STOP, index, 0)), ())


async def living(ledger: SqliteLedger, numbers: Sequence[int]) -> int:
    """Return how many of these streams are there."""
    rows = [await ledger._storage.stream_by_id(stream_id(number)) for number in numbers]
    return sum(row is not None for row in rows)


class Writer:
    """An object that writes what the test wants."""

    def __init__(self, ledger: SqliteLedger, name: str = "one") -> None:
        self._objects, self.key = ledger.objects, ObjectKey("stream", name)

    async def write(self, **changes: object) -> None:
        state = await self._objects.claim(self.key)
        await self._objects.write(ObjectWrite(self.key, state.epoch, **changes))  # type: ignore[arg-type]

    async def put_stream(self, number: int, size: int) -> None:
        """Create a stream of `size` bytes, as PUT does."""
        stream = stream_id(number)
        new = NewStream(stream, "", Durability.PROCESS, 0.0, kind=OBJECT)
        each = 64_000
        appends = [Append(stream, 1, n, long(n, each)) for n in range(size // each)]
        await self.write(creates=(new,), appends=appends)


# ---- a disk that others fill ----


async def test_a_disk_that_something_else_fills_costs_no_ended_stream(tmp_path: Path) -> None:
    async with opened(tmp_path) as (ledger, disk):
        for number in range(40):
            await store(ledger, number, sentence(200, seed=number))
        running = await store(ledger, 100, [])
        disk.free_bytes = 0
        for _ in range(3):
            assert await ledger.expire() == 0
        new = NewStream(stream_id(101), "{}", Durability.PROCESS, TTL_S)
        for index in range(3):  # new streams are refused, and end no other stream
            with pytest.raises(LedgerFull, match="bytes left") as error:
                await ledger.create(new)
            assert error.value.hint == f"free space on the disk of {tmp_path / 'ledger.db'}"
            assert await ledger.append([Append(running, 1, index, long(index))]) == []
        assert "bytes left" in str(ledger.shortage())
        assert await living(ledger, range(40)) == 40
        disk.free_bytes = DISK_BYTES
        assert ledger.shortage() is None
        await ledger.create(new)
        assert await ledger.append([Append(running, 1, 3, end(3))]) == []


async def test_where_the_wal_has_no_room_left_either_producers_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FULL_LOOK_S", 0)
    async with opened(tmp_path) as (ledger, disk):
        running = await store(ledger, 1, [])
        assert await ledger.append([Append(running, 1, 0, long(0))]) == []
        disk.free_bytes, disk.wal_room_bytes = 0, MIB
        assert ledger.shortage() is not None
        waiting = asyncio.create_task(ledger.append([Append(running, 1, 1, long(1))]))
        await disk.look_again(5)
        new = NewStream(stream_id(2), "{}", Durability.PROCESS, TTL_S)
        with pytest.raises(LedgerFull):
            await ledger.create(new)
        assert await ledger.read(running, 0, 9) == [long(0)]  # stored records can be read
        assert not waiting.done()
        disk.free_bytes = DISK_BYTES
        assert await waiting == []
        await ledger.create(new)
        assert await ledger.read(running, 0, 9) == [long(0), long(1)]


async def test_a_disk_that_stays_full_ends_streams_after_the_grace(tmp_path: Path) -> None:
    async with opened(tmp_path, full_disk_grace_s=0) as (ledger, disk):
        running = await store(ledger, 1, [])
        disk.free_bytes, disk.wal_room_bytes = 0, MIB
        assert ledger.shortage() is not None
        before = disk.looks
        [refused] = await ledger.append([Append(running, 1, 0, long(0))])
        assert disk.looks > before + 1
        assert isinstance(refused.error, LedgerFull)
        assert refused.error.retryable
        assert await ledger.append([Append(running, 1, 0, end(0))]) == []
        disk.free_bytes = DISK_BYTES
        other = await store(ledger, 2, [])
        assert await ledger.append([Append(other, 1, 0, long(0))]) == []


async def test_a_wal_that_cannot_be_moved_to_a_full_disk_is_moved_later(tmp_path: Path) -> None:
    full = Disk(Random(0))
    vfs = FaultyVfs("faulty", full)
    path = tmp_path / "ledger.db"
    ledger = await SqliteLedger.open(path, Clock(), vfs="faulty", wal_sync=full.wal_sync)
    stream = await store(ledger, 1, [])
    await extend(ledger, stream, [long(n) for n in range(2_000)])
    await ledger._storage.maintenance.checkpoint(cut=False)
    await extend(ledger, stream, [long(n) for n in range(2_000, 2_500)], 2_000)
    full.room = 0  # the WAL has begun anew: its file has room, the database's has not
    await ledger._storage.maintenance.checkpoint(cut=False)
    assert ledger._storage.maintenance.sizes().unmoved_bytes > 0
    await extend(ledger, stream, [long(n) for n in range(2_500, 2_600)], 2_500)
    full.room = None
    await ledger._storage.maintenance.checkpoint(cut=False)
    assert ledger._storage.maintenance.sizes().unmoved_bytes == 0
    assert await ledger.read(stream, 0, 3_000) == [long(n) for n in range(2_600)]
    await ledger.close()
    vfs.unregister()


async def test_a_disk_that_something_else_fills_costs_nothing_of_what_is_nearly_too_much(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, max_ledger_bytes=4 * MIB) as (ledger, disk):
        limit, low = 3 * MIB, 3 * MIB * LOW_SHARE
        number = 0
        while not low * 1.03 < disk.sizes().used_bytes < limit:
            await store(ledger, number, [*(long(n) for n in range(60)), end(60)])
            number += 1
        assert await living(ledger, range(number)) == number
        disk.free_bytes = -disk.sizes().free_bytes
        assert await ledger.expire() == 0
        assert await living(ledger, range(number)) == number


async def test_free_pages_of_the_file_are_room_on_a_full_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as (ledger, disk):
        await store(ledger, 1, [long(n) for n in range(8_000)])
        await ledger.delete(stream_id(1))
        await ledger._retention._reclaim()
        disk.free_bytes = 0
        await store(ledger, 2, sentence(20))


def require_reserving(folder: Path) -> None:
    """Skip the test if the file system cannot reserve space for a file."""
    probe = folder / "probe"
    probe.touch()
    try:
        reserve(probe, WAL_BYTES)
    except OSError as error:
        pytest.skip(f"no room can be kept here: {error}")


async def test_the_wal_has_room_kept_for_it_but_not_most_of_a_small_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_reserving(tmp_path)
    wal = tmp_path / "ledger.db-wal"
    async with opened(tmp_path) as (_, disk):
        assert wal.stat().st_blocks * 512 >= sqlite_wal.WAL_BYTES
        assert disk.sizes().wal_bytes < MIB
    monkeypatch.setattr(sqlite_wal, "WAL_DISK_SHARE", 0)
    async with opened(tmp_path) as (ledger, disk):
        await ledger.create(NewStream(stream_id(1), "{}", Durability.POWER, TTL_S))
        assert wal.stat().st_blocks * 512 < MIB


async def test_the_wal_has_less_room_after_each_commit_and_all_of_it_after_a_checkpoint(
    tmp_path: Path,
) -> None:
    require_reserving(tmp_path)
    wal = tmp_path / "ledger.db-wal"
    file = await SqliteFile.open(tmp_path / "ledger.db")
    ledger = await SqliteLedger.recover(file, Clock())
    maintenance = file.maintenance
    await ledger.create(NewStream(stream_id(1), "{}", Durability.POWER, TTL_S))
    reserved = wal.stat().st_blocks * STAT_BLOCK_BYTES
    assert reserved >= WAL_BYTES
    for index in range(5):
        room, written = maintenance.sizes().wal_room_bytes, maintenance.written_bytes
        assert await ledger.append([Append(stream_id(1), 1, index, long(index))]) == []
        assert maintenance.written_bytes > written
        added = maintenance.written_bytes - written
        assert maintenance.sizes().wal_room_bytes == room - added
    assert maintenance.sizes().wal_room_bytes < reserved - 5 * WAL_PAGE_BYTES
    await maintenance.checkpoint(cut=False)
    assert maintenance.sizes().wal_room_bytes == reserved - WAL_HEADER_BYTES
    written = maintenance.written_bytes
    assert await ledger.append([Append(stream_id(1), 1, 5, end(5))]) == []  # begins the WAL anew
    added = maintenance.written_bytes - written
    assert maintenance.sizes().wal_room_bytes == reserved - WAL_HEADER_BYTES - added
    await ledger.close()


# ---- what the ledger itself holds ----


async def test_what_running_streams_hold_costs_no_ended_one(tmp_path: Path) -> None:
    async with opened(tmp_path, max_ledger_bytes=4 * MIB) as (ledger, _):
        for number in range(20):
            await store(ledger, number, sentence(50, seed=number))
        running = [await store(ledger, number, []) for number in (100, 101)]
        for stream in running:  # each too short to be packed
            await extend(ledger, stream, [long(n) for n in range(1_550)])
        await ledger.expire()
        with pytest.raises(LedgerFull, match="generations hold"):
            await store(ledger, 102, [])
        assert await living(ledger, range(20)) == 20
        for stream in running:
            await extend(ledger, stream, [end(1_550)], 1_550)
        await store(ledger, 102, [])  # now removing something ends it


async def test_streams_of_objects_do_not_push_generations_out(tmp_path: Path) -> None:
    async with opened(tmp_path, max_ledger_bytes=8 * MIB) as (ledger, _):
        for number in range(50):
            await store(ledger, number, sentence(50, seed=number))
        taken = 0
        for number in range(100, 109):
            with suppress(LedgerFull):
                await Writer(ledger, str(number)).put_stream(number, MIB)
                taken += 1
        assert 1 <= taken <= 3  # a quarter of the ledger is theirs
        await store(ledger, 60, sentence(50))
        await ledger.expire()
        await store(ledger, 61, sentence(50))
        assert await living(ledger, [*range(50), 60, 61]) == 52


async def test_generations_leave_objects_their_share(tmp_path: Path) -> None:
    async with opened(tmp_path, max_ledger_bytes=4 * MIB) as (ledger, _):
        for number in range(30):
            await store(ledger, number, [*(long(n) for n in range(150)), end(150)])
        assert 0 < await living(ledger, range(30)) < 25
        writer = Writer(ledger)
        await writer.put_stream(100, MIB // 2)
        kept = await living(ledger, range(30))
        await ledger.expire()
        assert await living(ledger, [100]) == 1
        assert await living(ledger, range(30)) >= kept - 5  # down to the low mark, for themselves


async def test_values_of_objects_count(tmp_path: Path) -> None:
    async with opened(tmp_path, max_ledger_bytes=4 * MIB) as (ledger, _):
        writer, value, stored = Writer(ledger), b"x" * 100_000, 0
        with suppress(LedgerFull):
            for stored in range(100):
                await writer.write(puts={f"link:{stored}": value})
        assert MIB * 0.9 < stored * len(value) < MIB * HARD_SHARE * HARD_SHARE
        await writer.write(puts={"link:0": value})  # the same length as before
        with pytest.raises(LedgerFull, match="objects hold"):
            await writer.put_stream(100, 64_000)
        await store(ledger, 1, sentence(50))
        await writer.write(clear=True)
        await ledger.expire()
        await writer.write(puts={"link": value})
        assert await ledger.objects.get(writer.key, ["link"]) == {"link": value}


async def test_what_objects_hold_is_counted_about_right(tmp_path: Path) -> None:
    async with opened(tmp_path) as (ledger, disk):
        before = disk.sizes().used_bytes
        for number in range(20):
            writer = Writer(ledger, str(number))
            await writer.put_stream(number, 200_000)
            await writer.write(puts={"a": b"x" * 5_000})
        await ledger.expire()
        taken = disk.sizes().used_bytes - before
        assert 0.8 < await disk.object_bytes() / taken < 1.3


# ---- judging ----


amounts = st.integers(0, 400 * MIB)


@given(file=amounts, free=amounts, wal=amounts, unmoved=amounts, disk_free=amounts, objects=amounts)
def test_nothing_is_removed_for_what_others_or_running_streams_hold(
    file: int, free: int, wal: int, unmoved: int, disk_free: int, objects: int
) -> None:
    room = Room(None, 0.25, "ledger.db")
    disk = file + wal + disk_free + 100 * MIB
    room.sizes = Sizes(file, min(file, free), wal, unmoved, disk, disk_free, False)
    room.object_bytes = objects
    for kind in StreamKind:
        shortage = room.shortage(kind)
        if room.used(kind) <= room.limit(kind):
            assert shortage is None or not shortage.own
        else:
            assert shortage is not None
            assert shortage.own
            assert shortage.spent is (room.used(kind) > room.limit(kind) * HARD_SHARE)
    limit = room.limit(GENERATION)
    assert room.goal(limit) is None
    assert limit + room.limit(OBJECT) == int(disk * DISK_SHARE)


def test_what_only_the_wal_has_yet_will_take_its_room_on_the_disk() -> None:
    room = Room(None, 0.25, "ledger.db")
    for unmoved, is_short in ((0, False), (50 * MIB, True)):
        room.sizes = Sizes(MIB, 0, 60 * MIB, unmoved, 1 << 40, 100 * MIB, False)
        assert (room.shortage(GENERATION) is not None) is is_short


def test_a_wal_that_does_not_end_is_no_reason_to_remove_anything() -> None:
    room = Room(None, 0.25, "ledger.db")
    room.sizes = Sizes(MIB, 0, MAX_WAL_BYTES + 1, 0, 1 << 40, 1 << 39, False)
    for kind in StreamKind:
        shortage = room.shortage(kind)
        assert shortage is not None
        assert not shortage.own
        assert "WAL" in shortage.what


def test_a_disk_that_does_not_say_how_large_it_is_sets_no_limit() -> None:
    room = Room(None, 0.25, "ledger.db")
    room.sizes = Sizes(400 * MIB, 0, MIB, MIB, 0, 0, False)
    room.object_bytes = 100 * MIB
    assert [room.shortage(kind) for kind in StreamKind] == [None, None]
