"""Workers that are forked from a launcher, with real processes that are killed."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from origin.workers.forked import PR_SET_CHILD_SUBREAPER, ForkedProcess, Launcher
from origin.workers.worker_process import worker_environment

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only"),
]

WORKER = "tests.origin.workers.forkable"
TIMEOUT_S = 240.0


@pytest.fixture(autouse=True)
def _orphans_are_ours_for_a_test_only() -> Iterator[None]:
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


class Home:
    """A launcher, and where its workers call."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.launcher = Launcher(WORKER, settings, worker_environment())
        self.path = folder / "worker.sock"
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.said.put_nowait(json.loads(await reader.readline()))
        writer.close()
        await writer.wait_closed()

    async def fork(self, settings: str = "") -> ForkedProcess:
        worker = await self.launcher.fork(str(self.path), settings)
        assert worker is not None
        return worker

    async def worker(self) -> tuple[ForkedProcess, dict[str, Any]]:
        return await self.fork(), await self.said.get()


@asynccontextmanager
async def home(folder: Path, settings: str = "") -> AsyncIterator[Home]:
    it = Home(folder, settings)
    keeping = asyncio.create_task(it.launcher.keep())
    server = await asyncio.start_unix_server(it.hear, it.path)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield it
    finally:
        server.close()
        keeping.cancel()
        await asyncio.wait((keeping,))


async def gone(pid: int) -> None:
    """It has ended, and was waited for: the kernel knows no such process."""
    while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110 - nobody tells us of another's child
        await asyncio.sleep(0.05)


async def test_workers_are_our_own_children_and_hold_nothing_of_each_other(tmp_path: Path) -> None:
    async with home(tmp_path) as it:
        one, first = await it.worker()
        other, second = await it.worker()
        assert (first["parent"], second["parent"]) == (os.getpid(), os.getpid())
        # Standard files, the socket, and the folder that was listed.
        assert first["open"] == second["open"] == [0, 1, 2, 3]
        assert first["drawn"] != second["drawn"]
        one.send_signal(signal.SIGTERM)
        assert await one.wait() == -signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            one.kill()
        await gone(first["stray"])  # what it had started has ended with it
        os.kill(second["stray"], 0)
        other.kill()
        assert await other.wait() == -signal.SIGKILL


async def test_workers_outlive_their_launcher_and_another_one_takes_its_place(
    tmp_path: Path,
) -> None:
    async with home(tmp_path) as it:
        worker, _ = await it.worker()
        assert it.launcher.pid is not None
        os.kill(it.launcher.pid, signal.SIGKILL)
        said = asyncio.create_task(it.said.get())
        while not said.done():
            # Who asked the one that was killed gets no worker, or one that ends without an order.
            if (another := await it.launcher.fork(str(it.path), "")) is not None:
                ended = asyncio.create_task(another.wait())
                await asyncio.wait((said, ended), return_when=asyncio.FIRST_COMPLETED)
        assert said.result()["parent"] == os.getpid()
        assert worker.returncode is None
        assert another is not None
        for each in (worker, another):
            each.kill()
            await each.wait()


async def test_a_forked_worker_ends_as_one_that_was_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with home(tmp_path) as it:
        assert await (await it.fork("exit")).wait() == 3
        assert await (await it.fork("raise")).wait() == 1
    assert "ValueError: of the worker" in capfd.readouterr().err


async def test_a_process_with_another_thread_is_not_forked(tmp_path: Path) -> None:
    async with home(tmp_path, "thread") as it:
        assert await it.launcher.fork(str(it.path), "") is None
        assert it.launcher.refusal == "2 threads run in it"
