"""A worker's slot, with real workers that are stopped and killed."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tailrace.ledger.frame import StreamEnd, Token
from tailrace.ledger.frame import decode as decode_client
from tailrace.origin.config import OriginConfig
from tailrace.origin.workers.liveness import ExitKind, SilenceLimits
from tailrace.origin.workers.program import program
from tailrace.origin.workers.worker_frame import Emissions, Ready, StartTextRun
from tailrace.origin.workers.worker_process import Owner, WorkerSlot
from tests.origin.emissions import rows
from tests.origin.producers.asked import recipe

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 240.0
SLOTS = 4
ROUNDS = 5
PRODUCERS = "tests.origin.producers.text_producers"


class Owned(Owner):
    """A slot with a real worker, and the reports that its owner gets."""

    def __init__(
        self,
        producer: str,
        limits: SilenceLimits,
        filter_place: str | None = None,
        gpu: str | None = None,
    ) -> None:
        place = producer if ":" in producer else f"{PRODUCERS}:{producer}"
        config = OriginConfig(
            producer=place, worker_silence_s=limits.silence_s, filter=filter_place
        )
        self.slot = WorkerSlot(0, program(config), limits, gpu=gpu)
        self.slot.belong_to(self)
        self.readies: asyncio.Queue[Ready] = asyncio.Queue()
        self.losses: asyncio.Queue[str] = asyncio.Queue()
        self.silences: asyncio.Queue[bool] = asyncio.Queue()
        self.rests: asyncio.Queue[int | None] = asyncio.Queue()
        self.frames: list[object] = []
        self.ended = asyncio.Event()

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None:
        self.readies.put_nowait(ready)

    async def worker_step(self, slot: WorkerSlot, made: Emissions) -> None:
        self.frames += [decode_client(emission.frame)[1] for emission in rows(made)]
        if any(isinstance(frame, StreamEnd) for frame in self.frames):
            self.ended.set()

    async def worker_lost(self, slot: WorkerSlot) -> None:
        self.losses.put_nowait(slot.exit_reason)
        slot.launch()

    async def worker_rested(self, slot: WorkerSlot) -> None:
        self.rests.put_nowait(slot.pid)

    def worker_silent(self, slot: WorkerSlot) -> None:
        self.silences.put_nowait(True)

    async def worker_heard(self, slot: WorkerSlot) -> None:
        self.silences.put_nowait(False)

    def ask(self, run: int, prompt: str) -> None:
        self.slot.send(StartTextRun(recipe(prompt).model_dump_json(), "", 0), run)

    @property
    def pid(self) -> int:
        assert self.slot.pid is not None
        return self.slot.pid


@asynccontextmanager
async def owned(
    producer: str,
    *,
    filter_place: str | None = None,
    limits: SilenceLimits | None = None,
    gpu: str | None = None,
) -> AsyncIterator[Owned]:
    it = Owned(producer, limits or SilenceLimits(), filter_place, gpu)
    it.slot.launch()
    keeping = asyncio.create_task(it.slot.keep())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield it
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))
    assert keeping.cancelled()  # the cache was still being written


async def killed_with_unread_orders() -> None:
    """Kill a stopped worker that has unread orders; check that the next one in its slot answers."""
    async with owned("echo") as it:
        for _ in range(ROUNDS):
            await it.readies.get()
            death = os.pidfd_open(it.pid)
            os.kill(it.pid, signal.SIGSTOP)
            it.ask(1, "unread")
            os.kill(it.pid, signal.SIGKILL)
            # The loop does not look before this: it sees the death and the broken socket at once.
            select.select([death], [], [])
            os.close(death)
            await it.losses.get()
        await it.readies.get()
        it.ask(1, "read")
        await it.ended.wait()


async def gpu_seen(gpu: str) -> str:
    """Return the GPU that a worker's process sees, and again after it was replaced."""
    async with owned("seeing", gpu=gpu) as it:
        for _ in range(2):
            await it.readies.get()
            it.ended.clear()
            it.frames.clear()
            it.ask(1, "")
            await it.ended.wait()
            os.kill(it.pid, signal.SIGKILL)
            await it.losses.get()
        return "".join(frame.text for frame in it.frames if isinstance(frame, Token))


async def test_each_worker_process_sees_its_gpu_and_no_other() -> None:
    assert await asyncio.gather(*map(gpu_seen, ("0", "7", "GPU-8932f937"))) == [
        "0",
        "7",
        "GPU-8932f937",
    ]


async def test_a_worker_that_dies_with_unread_orders_is_replaced() -> None:
    await asyncio.gather(*(killed_with_unread_orders() for _ in range(SLOTS)))


async def test_a_stopped_slot_has_no_worker_until_it_is_launched_and_that_is_no_death() -> None:
    async with owned("echo") as it:
        await it.readies.get()
        first = it.pid
        it.slot.stop()
        assert await it.rests.get() is None  # its process is gone by then
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert it.losses.empty()
        it.slot.launch()
        await it.readies.get()
        assert it.pid != first
        it.ask(1, "read")
        await it.ended.wait()


async def test_a_worker_that_has_not_connected_when_it_is_stopped_never_becomes_ready() -> None:
    async with owned("echo") as it:
        while it.slot.pid is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        it.slot.stop()
        assert await it.rests.get() is None
        assert it.readies.empty()
        it.slot.launch()
        await it.readies.get()


async def test_a_child_that_holds_a_dead_workers_socket_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "child"
    monkeypatch.setenv("NOTED", str(noted))
    children = set()
    try:
        async with owned("forking") as it:
            await it.readies.get()
            children.add(int(noted.read_text()))
            os.kill(it.pid, signal.SIGKILL)
            await it.losses.get()
            await it.readies.get()
            children.add(int(noted.read_text()))
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert len(children) == 2


async def test_a_worker_is_heard_while_it_is_given_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ready(it: Owned, slot: WorkerSlot, ready: Ready) -> None:
        it.ask(1, "the first of many")
        await it.ended.wait()
        it.readies.put_nowait(ready)

    monkeypatch.setattr(Owned, "worker_ready", ready)
    async with owned("echo") as it:
        await it.readies.get()


async def test_a_worker_that_is_stopped_is_silent_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.origin.workers.liveness.SILENT_S", 1.5)
    async with owned("echo") as it:
        await it.readies.get()
        os.kill(it.pid, signal.SIGSTOP)
        assert await it.silences.get()
        os.kill(it.pid, signal.SIGCONT)
        assert not await it.silences.get()


async def test_a_worker_that_hangs_is_killed_and_replaced() -> None:
    async with owned("echo", limits=SilenceLimits(silence_s=3)) as it:
        await it.readies.get()
        os.kill(it.pid, signal.SIGSTOP)
        assert (await it.losses.get()).startswith("hung: ")
        assert it.slot.exit_kind is ExitKind.HUNG
        await it.readies.get()


async def test_a_start_that_never_ends_is_a_hang_and_leaves_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = ""
    async with owned("stuck", limits=SilenceLimits(start_s=1.0)) as it:
        while "in stuck" not in said:  # a busy machine may still import when the time is over
            assert (await it.losses.get()).startswith("hung: ")
            said += capfd.readouterr().err


async def test_a_worker_that_holds_its_loop_up_ends_itself_with_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with owned("blocking", limits=SilenceLimits(silence_s=3)) as it:
        await it.readies.get()
        it.ask(1, "x")
        assert await it.losses.get() == "exit status 1"  # the watchdog's status
    assert "in produce" in capfd.readouterr().err


async def test_a_worker_that_cannot_start_says_why() -> None:
    async with owned("no_such_module:make") as it:
        assert "No module named 'no_such_module'" in await it.losses.get()
        assert it.slot.exit_kind is ExitKind.START


async def test_a_slot_that_is_launched_twice_runs_one_process_and_ends_with_it() -> None:
    async with owned("echo") as it:
        await it.readies.get()
        it.slot.launch()
        it.slot.stop()
        assert await it.rests.get() is None
        assert (it.readies.empty(), it.slot.pid) == (True, None)


async def test_a_slot_that_is_stopped_before_its_process_began_says_that_it_is_at_rest() -> None:
    it = Owned(f"{PRODUCERS}:echo", SilenceLimits(), None)
    it.slot.launch()
    it.slot.stop()
    keeping = asyncio.create_task(it.slot.keep())
    async with asyncio.timeout(TIMEOUT_S):
        assert await it.rests.get() is None
    keeping.cancel()
    await asyncio.wait((keeping,))


def written_from_the_docs(folder: Path) -> None:
    """Write the Python files that docs/models.md shows, each of which begins with its name."""
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    for name, code in re.findall(r"```python\n# (\w+\.py)(.*?)```", text, re.DOTALL):
        (folder / name).write_text(f"# {code}")


async def test_the_producer_and_the_filter_of_the_docs_run_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_from_the_docs(tmp_path)
    for name in ("origin", "json", "pydantic"):  # must not hide these modules
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the wrong place')\n")
    monkeypatch.chdir(tmp_path)
    async with owned("speech:Speech", filter_place="my_filter:NoFoxes") as it:
        assert (await it.readies.get()).model == "speech"
        it.ask(1, "said")
        await it.ended.wait()
    said = "".join(frame.text for frame in it.frames if isinstance(frame, Token))
    assert said == "recognise speech"
