"""Commits of class `power` stay invisible while the disk is still syncing them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Append
from tailrace.ledger.sqlite.disk import checkpointer, wal
from tailrace.ledger.sqlite.disk.disk_sync import DiskSync, Failed
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.disk.work_thread import WorkThread
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.tail import SEGMENT_BYTES
from tests.ledger.backends import A, B, Clock, new, token, tokens

pytestmark = pytest.mark.anyio


class HeldSync:
    """A disk that a test holds: it says when a sync of the WAL has ended, or failed."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self._held = True
        self._waiting: asyncio.Future[None] | None = None

    def sync_of(self, _path: Path, _thread: WorkThread, failed: Failed) -> DiskSync:
        self._failed = failed
        return self

    def begin(self) -> asyncio.Future[None]:
        self.begun.release()
        self._waiting = asyncio.get_running_loop().create_future()
        if not self._held:
            self.end()
        return self._waiting

    def end(self) -> None:
        assert self._waiting is not None
        self._waiting.set_result(None)

    def fail(self) -> None:
        assert self._waiting is not None
        self._waiting.set_exception(self._failed(OSError("the disk does not sync")))

    def let_go(self) -> None:
        """End the sync under way, and every later one at once."""
        self._held = False
        if self._waiting is not None and not self._waiting.done():
            self.end()

    async def close(self) -> None:
        """Nothing is open."""


@asynccontextmanager
async def opened(folder: Path, disk: HeldSync) -> AsyncIterator[SqliteLedger]:
    ledger = await SqliteLedger.open(folder / "ledger.db", Clock(), wal_sync=disk.sync_of)
    try:
        yield ledger
    finally:
        disk.let_go()  # also where a test has failed
        await ledger.close()


async def test_a_power_stream_is_synced_and_only_then_released(tmp_path: Path) -> None:
    disk = HeldSync()
    async with opened(tmp_path, disk) as ledger:
        await ledger.create(new(A))
        await ledger.create(new(B, Durability.POWER))
        assert await ledger.append(tokens(A, [0])) == []
        assert disk.begun.locked()
        # One group: the stricter one rules.
        batch = [*tokens(A, [1]), *tokens(B, [0])]
        appending = asyncio.ensure_future(ledger.append(batch))
        await disk.begun.acquire()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (ledger.tail(A).released, ledger.tail(B).released) == (1, 0)
        assert not appending.done()
        assert ledger.silent_s() > 0
        disk.end()
        assert await appending == []
        assert (ledger.tail(A).released, ledger.tail(B).released) == (2, 1)
        assert ledger.silent_s() == 0


async def test_what_comes_while_the_disk_is_at_it_goes_with_the_next_commit(tmp_path: Path) -> None:
    disk = HeldSync()
    async with opened(tmp_path, disk) as ledger:
        await ledger.create(new(A, Durability.POWER))
        first = asyncio.ensure_future(ledger.append(tokens(A, [0])))
        await disk.begun.acquire()
        later = [asyncio.ensure_future(ledger.append(tokens(A, [index]))) for index in (1, 2)]
        await asyncio.sleep(0)
        disk.end()
        await first
        await disk.begun.acquire()
        assert ledger.tail(A).released == 1
        disk.end()
        assert await asyncio.gather(*later) == [[], []]
        assert (ledger.tail(A).released, disk.begun.locked()) == (3, True)


async def test_a_segment_stored_behind_a_commit_is_not_read_before_that_is_durable(
    tmp_path: Path,
) -> None:
    disk = HeldSync()
    async with opened(tmp_path, disk) as ledger:
        await ledger.create(new(A, Durability.POWER))
        long = [Append(A, 1, index, token(index, "x" * SEGMENT_BYTES)) for index in range(2)]
        for released, append in enumerate(long):
            appending = asyncio.ensure_future(ledger.append([append]))
            await disk.begun.acquire()
            # The records of the only stream.
            assert await ledger._storage.covered(1) == released + 1
            seen = await ledger.frames(A, 0, 10)
            assert seen == [one.record.frame for one in long[:released]]
            assert len(await ledger.read(A, 0, 10)) == released
            disk.end()
            assert await appending == []
        assert len(await ledger.frames(A, 0, 10)) == 2


async def test_after_a_failed_sync_nothing_is_released_and_nothing_more_is_taken(
    tmp_path: Path,
) -> None:
    disk = HeldSync()
    async with opened(tmp_path, disk) as ledger:
        await ledger.create(new(A, Durability.POWER))
        appending = asyncio.ensure_future(ledger.append(tokens(A, [0])))
        await disk.begun.acquire()
        disk.fail()
        with pytest.raises(LedgerFailed, match="does not sync"):
            await appending
        assert ledger.tail(A).released == 0
        with pytest.raises(LedgerFailed):
            await ledger.append(tokens(A, [1]))


async def test_the_end_of_a_checkpoint_keeps_no_event_loop_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the disk twice, also where nothing that is stored asks for that."""
    monkeypatch.setattr(checkpointer, "CHECKPOINT_PAGES", 16)
    ended_by: list[threading.Thread] = []

    end = wal.Wal.finish_checkpoint

    def noted(self: wal.Wal) -> None:
        ended_by.append(threading.current_thread())
        end(self)

    monkeypatch.setattr(wal.Wal, "finish_checkpoint", noted)
    file = await SqliteFile.open(tmp_path / "ledger.db")
    ledger = await SqliteLedger.recover(file, Clock())
    try:
        await ledger.create(new(A))
        index = 0
        async with asyncio.timeout(60):
            while index < 400 or not ended_by:  # a busy machine may take its time to move the WAL
                assert await ledger.append([Append(A, 1, index, token(index, "x" * 1_000))]) == []
                index += 1
        assert len(await ledger.read(A, 0, index + 1)) == index
    finally:
        await ledger.close()
    assert threading.main_thread() not in ended_by
