"""Workers that are forked from a fork server, with real processes that are killed."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.frame import Hello
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.origin.config import OriginConfig
from tailrace.origin.gpu.placement import gpu_environment
from tailrace.origin.workers import token_worker
from tailrace.origin.workers.fork_client import PR_SET_CHILD_SUBREAPER, ForkedProcess, ForkServer
from tailrace.origin.workers.program import program
from tailrace.origin.workers.worker_frame import (
    MAX_WORKER_FRAME_BYTES,
    SCHEMA_HASH,
    Ready,
    decode,
    encode,
)
from tailrace.origin.workers.worker_frame import WORKER as WORKER_SAYS
from tailrace.origin.workers.worker_process import Owner, WorkerSlot, worker_environment

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
    """A fork server, and where its workers call."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.fork_server = ForkServer(WORKER, settings, worker_environment())
        self.path = folder / "worker.sock"
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.said.put_nowait(json.loads(await reader.readline()))
        writer.close()
        await writer.wait_closed()

    async def fork(self, settings: str = "") -> ForkedProcess:
        worker = await self.fork_server.fork(str(self.path), settings)
        assert worker is not None
        return worker

    async def worker(self) -> tuple[ForkedProcess, dict[str, Any]]:
        return await self.fork(), await self.said.get()


@asynccontextmanager
async def home(folder: Path, settings: str = "") -> AsyncIterator[Home]:
    it = Home(folder, settings)
    keeping = asyncio.create_task(it.fork_server.keep())
    server = await asyncio.start_unix_server(it.hear, it.path)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield it
    finally:
        server.close()
        keeping.cancel()
        await asyncio.wait((keeping,))


class ReadyOwner(Owner):
    """Owner of a slot that waits for its worker to be ready."""

    def __init__(self) -> None:
        self.said = asyncio.Event()

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None:
        self.said.set()


async def gone(pid: int) -> None:
    """Wait until a process has ended and was waited for: the kernel no longer knows its pid."""
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
        await gone(first["stray"])  # processes that it had started have ended with it
        os.kill(second["stray"], 0)
        other.kill()
        assert await other.wait() == -signal.SIGKILL


async def test_a_forked_worker_sees_the_gpu_that_it_is_given_and_the_next_one_sees_its_own(
    tmp_path: Path,
) -> None:
    seen = []
    async with home(tmp_path) as it:
        for gpu in ("3", "5", None):
            own = gpu_environment(gpu, {})
            worker = await it.fork_server.fork(str(it.path), "", environment=own)
            assert worker is not None
            seen.append((await it.said.get())["gpu"])
            worker.kill()
            await worker.wait()
    assert seen == ["3", "5", os.environ.get("CUDA_VISIBLE_DEVICES")]


async def test_workers_outlive_their_fork_server_and_another_one_takes_its_place(
    tmp_path: Path,
) -> None:
    async with home(tmp_path) as it:
        worker, _ = await it.worker()
        assert it.fork_server.pid is not None
        os.kill(it.fork_server.pid, signal.SIGKILL)
        said = asyncio.create_task(it.said.get())
        while not said.done():
            # A request to the killed fork server gets no worker, or one that ends without an order.
            if (another := await it.fork_server.fork(str(it.path), "")) is not None:
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


async def stages_of_a_worker(fork_server: ForkServer, folder: Path) -> list[str]:
    """Return what the start of one more worker of a model consists of."""
    ready: asyncio.Queue[Ready] = asyncio.Queue()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(Hello(SCHEMA_HASH, "test")))
        splitter = FrameSplitter(WORKER_SAYS, MAX_WORKER_FRAME_BYTES)
        while data := await reader.read(1 << 16):
            for _, frame in map(decode, splitter.feed(data)):
                if isinstance(frame, Ready):
                    ready.put_nowait(frame)
                    writer.close()  # which ends it

    path = folder / "worker.sock"
    with closing(await asyncio.start_unix_server(hear, path)):
        worker = await fork_server.fork(str(path), fork_server._command[1])
        assert worker is not None
        said = await ready.get()
        assert await worker.wait() == 0
    path.unlink(missing_ok=True)  # from Python 3.13 on the server has removed it
    return [span.name for span in said.spans]


async def test_workers_are_forked_with_a_small_model_loaded_unless_its_files_have_changed(
    tmp_path: Path, checkpoint: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    config = OriginConfig(model=model, data=tmp_path / "data", device="cpu")
    fork_server = ForkServer(*program(config), worker_environment())
    keeping = asyncio.create_task(fork_server.keep())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert await stages_of_a_worker(fork_server, tmp_path) == ["connect"]
            assert "unpack" in [stage.name for stage in fork_server.stages]
            (model / "config.json").touch()
            assert "unpack" in await stages_of_a_worker(fork_server, tmp_path)
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))


async def test_a_start_counts_from_the_launch_even_if_the_slot_is_kept_later(
    tmp_path: Path, checkpoint: Path
) -> None:
    config = OriginConfig(model=checkpoint, data=tmp_path / "data", device="cpu")
    fork_server = ForkServer(*program(config), worker_environment())
    slot, ready = WorkerSlot(0, program(config), fork_server=fork_server), ReadyOwner()
    slot.belong_to(ready)
    slot.launch()
    keeping = [asyncio.create_task(fork_server.keep())]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not fork_server.stages:  # noqa: ASYNC110 - it tells nobody when it is ready
                await asyncio.sleep(0.01)
            keeping.append(asyncio.create_task(slot.keep()))
            await ready.said.wait()
        assert slot.start is not None
        stages = [stage.name for stage in slot.start.stages]
        assert stages[:2] == ["fork_server", "imports"]
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.wait(keeping)


def test_a_large_model_and_code_of_the_users_are_not_loaded_for_all_workers(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[token_worker.Loaded] = []
    monkeypatch.setattr(token_worker, "_ahead", ahead)
    config = OriginConfig(model=checkpoint, data=tmp_path, device="cpu")
    for other in (
        config.model_copy(update={"filter": "blocked_phrase:Filter"}),
        config.model_copy(update={"draft_model": checkpoint}),
    ):
        token_worker.prepare(program(other)[1])
    with monkeypatch.context() as patch:
        patch.setattr(token_worker, "LOAD_AHEAD_BYTES", 1)
        token_worker.prepare(program(config)[1])
    token_worker.prepare("cpu")  # for several models
    with monkeypatch.context() as patch:
        patch.setattr(token_worker, "_load", lambda *_: 1 / 0)  # no worker could be forked then
        token_worker.prepare(program(config)[1])
    assert ahead == []
    token_worker.prepare(program(config)[1])
    assert [loaded.config.model for loaded in ahead] == [checkpoint]


async def test_a_process_with_another_thread_is_not_forked(tmp_path: Path) -> None:
    async with home(tmp_path, "thread") as it:
        assert await it.fork_server.fork(str(it.path), "") is None
        assert it.fork_server.refusal == "2 threads run in the fork server"
