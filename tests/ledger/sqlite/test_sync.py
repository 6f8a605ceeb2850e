"""The two ways to sync a file without holding up the event loop."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.frame import Durability, Token, encode
from tailrace.ledger.interface import Append, NewStream, Record
from tailrace.ledger.sqlite.disk import disk_sync
from tailrace.ledger.sqlite.disk.disk_sync import DiskSync, KernelSync, ThreadSync, sync_of
from tailrace.ledger.sqlite.disk.work_thread import WorkThread
from tailrace.ledger.sqlite.ledger import SqliteLedger

pytestmark = pytest.mark.anyio

STREAM = bytes([7]) * 16
linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in disk_sync._CALLS,
    reason="io_submit is Linux's, and its number is known for some processors",
)


def failed(error: OSError) -> Exception:
    return LedgerFailed(str(error))


@pytest.fixture
async def thread() -> AsyncIterator[WorkThread]:
    one = WorkThread("sync")
    yield one
    await one.close()


def kernel(path: Path, _: WorkThread) -> DiskSync:
    return KernelSync(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), failed)


def threaded(path: Path, thread: WorkThread) -> DiskSync:
    return ThreadSync(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), thread, failed)


ways = pytest.mark.parametrize("way", [pytest.param(kernel, marks=linux), threaded])


@ways
async def test_a_sync_ends_while_the_loop_goes_on(
    way: Callable[[Path, WorkThread], DiskSync], tmp_path: Path, thread: WorkThread
) -> None:
    path = tmp_path / "file"
    sync = way(path, thread)
    for _ in range(20):
        with path.open("ab") as file:
            file.write(bytes(5000))
        ended = sync.begin()
        assert not ended.done()
        await ended
    await sync.close()


@ways
async def test_a_sync_under_way_ends_before_it_is_closed(
    way: Callable[[Path, WorkThread], DiskSync], tmp_path: Path, thread: WorkThread
) -> None:
    sync = way(tmp_path / "file", thread)
    ended = sync.begin()
    await sync.close()
    assert ended.done()


@linux
async def test_a_sync_whose_waiter_was_cancelled_leaves_the_next_one_alone(tmp_path: Path) -> None:
    sync = KernelSync(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600), failed)
    sync.begin().cancel()
    await sync.close()


@linux
async def test_what_the_kernel_cannot_sync_is_left_to_a_thread(
    tmp_path: Path, thread: WorkThread
) -> None:
    os.mkfifo(tmp_path / "pipe")
    sync = sync_of(tmp_path / "pipe", thread, failed)
    assert isinstance(sync, ThreadSync)
    with pytest.raises(LedgerFailed):
        await sync.begin()
    await sync.close()


@linux
async def test_a_failed_sync_is_told_to_who_waits(tmp_path: Path) -> None:
    """The descriptor becomes another file's, which cannot be synced, behind its back."""
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    sync = KernelSync(descriptor, failed)
    pipe = os.pipe()
    os.dup2(pipe[1], descriptor)
    with pytest.raises(LedgerFailed, match="Invalid argument"):
        await sync.begin()
    await sync.close()
    for end in pipe:
        os.close(end)


async def test_without_io_submit_a_ledger_syncs_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_sync, "_CALLS", {})
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 0)
    await ledger.create(NewStream(STREAM, "{}", Durability.POWER, 60))
    records = [Record(encode(Token(" a", index)), (index,)) for index in range(5)]
    appends = [Append(STREAM, 1, index, record) for index, record in enumerate(records)]
    for append in appends:
        assert await ledger.append([append]) == []
    await ledger.close()
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 0)
    assert await ledger.read(STREAM, 0, 10) == records
    await ledger.close()


async def test_syncs_of_a_thread_end_in_their_order(tmp_path: Path, thread: WorkThread) -> None:
    sync = threaded(tmp_path / "file", thread)
    await asyncio.gather(sync.begin(), sync.begin())
    await sync.close()
