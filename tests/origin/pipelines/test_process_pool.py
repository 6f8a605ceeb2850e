"""Stages in processes of their own: the same items, whatever happens to the processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tailrace.ledger.frame import FinishReason
from tailrace.origin.pipelines.order_pipe import StageFailed, StageLost
from tailrace.origin.pipelines.process_pool import (
    COMMAND,
    ProcessPool,
    RemoteStage,
)
from tailrace.origin.pipelines.queue import MAX_QUEUED_ITEMS
from tailrace.origin.pipelines.runner import STAGE_SKIPPED, RunningStage, outputs
from tailrace.origin.pipelines.stage import AnyStage, Prompt, StageContext, StageOptions
from tailrace.origin.pipelines.stage_orders import Load, StageObjects
from tailrace.origin.producer import End, Remark, RunFate, Text
from tests.e2e.processes import children_of
from tests.edge.scripted_origin import until
from tests.origin.pipelines.staged import (
    Leaves,
    PassOn,
    Scale,
    ScaleOptions,
    ShoutOutside,
    Sleeps,
    Words,
    run,
    running,
    unswitched,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def pool() -> AsyncIterator[ProcessPool]:
    made = ProcessPool(1)
    yield made
    await made.close()


def outside(
    pool: ProcessPool,
    kind: type[AnyStage],
    limit_s: float | None = None,
    *,
    optional: bool = False,
    said: StageOptions | None = None,
) -> RunningStage:
    """Return a stage in a process of the pool, with the options `said`."""

    def remote(options: object, context: StageContext) -> RemoteStage:
        return RemoteStage(kind, said or kind.Options(), context, pool, limit_s)

    return running(remote, kind.__name__.lower(), optional=optional)


def processes() -> set[int]:
    """Return the processes of stages that this process has started."""
    return {
        pid
        for pid in children_of(os.getpid())
        if COMMAND[-1].encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


async def test_a_stage_in_a_process_gives_the_same_items(pool: ProcessPool) -> None:
    made = await run([running(Words), outside(pool, ShoutOutside)], "one two three")
    assert made == [Text("ONE "), Text("TWO "), Text("THREE "), End()]
    again = await run([running(Words), outside(pool, ShoutOutside)], "four")
    assert again == [Text("FOUR "), End()]
    assert len(processes()) == 1


async def test_a_failure_names_the_stage_and_the_error(pool: ProcessPool) -> None:
    *before, end = await run([running(Words), outside(pool, ShoutOutside)], "one two fail")
    assert before == [Text("ONE ")]
    message = "the stage shoutoutside failed: ValueError: a word that fails"
    assert end == End(FinishReason.FAILED, message=message)


async def test_an_optional_stage_that_fails_gives_back_what_it_held(pool: ProcessPool) -> None:
    stages = [running(Words), outside(pool, ShoutOutside, optional=True), running(PassOn)]
    made = await run(stages, "one two fail three")
    message = "shoutoutside is skipped from item 2 on: ValueError: a word that fails"
    skipped = Remark(STAGE_SKIPPED, message)
    rest = [Text("two "), skipped, Text("fail "), Text("three ")]
    assert made == [Text("ONE "), *rest, End()]


async def test_a_stage_that_hangs_is_killed_at_its_limit(pool: ProcessPool) -> None:
    stages = [running(Words), outside(pool, Sleeps, 0.5, optional=True)]
    made = await run(stages, "one hang three")
    message = "sleeps is skipped from item 1 on: it took more than 0.5 s for an item"
    rest = [Remark(STAGE_SKIPPED, message), Text("hang "), Text("three ")]
    assert made == [Text("one "), *rest, End()]
    await until(lambda: not processes())  # it was killed, and dies soon
    assert await run([running(Words), outside(pool, Sleeps)], "four") == [Text("four "), End()]


async def test_a_killed_process_is_known_and_the_next_stream_gets_a_new_one(
    pool: ProcessPool,
) -> None:
    with pytest.raises(StageLost):
        await read_and_kill([running(Words), outside(pool, ShoutOutside)])
    made = await run([running(Words), outside(pool, ShoutOutside)], "four")
    assert made == [Text("FOUR "), End()]


async def read_and_kill(
    stages: list[RunningStage], word: str = "word", first: str = "WORD "
) -> None:
    """Read a stream of more items than its queues hold, and kill the process in its middle."""
    prompt = Prompt(f"{word} " * 4 * MAX_QUEUED_ITEMS)
    async with aclosing(outputs(stages, prompt, unswitched(stages), RunFate())) as made:
        assert await anext(made) == Text(first)
        [process] = processes()
        os.kill(process, signal.SIGKILL)
        async for _ in made:
            pass


async def test_a_stream_that_is_given_up_leaves_its_process_to_the_others(
    pool: ProcessPool,
) -> None:
    stages = [running(Words), outside(pool, ShoutOutside)]
    async with aclosing(
        outputs(stages, Prompt("one two three"), unswitched(stages), RunFate())
    ) as made:
        await anext(made)
    assert await run([running(Words), outside(pool, ShoutOutside)], "four") == [
        Text("FOUR "),
        End(),
    ]
    assert pool.least_loaded().objects == 0


async def test_a_stage_in_a_process_is_closed(pool: ProcessPool, tmp_path: Path) -> None:
    note = tmp_path / "closed"
    await run([running(Words), outside(pool, Leaves)], str(note))
    # The order to close was sent before this stream begins, on the same pipe.
    await run([running(Words), outside(pool, ShoutOutside)], "one")
    assert note.read_text() == "True"


# ---- stages with a device ----


async def test_a_stage_with_a_device_loads_once_for_all_streams_of_a_process(
    tmp_path: Path,
) -> None:
    options = ScaleOptions(notes=tmp_path / "loads")
    pool = ProcessPool(2, Load(Scale, options, "cpu"))
    try:
        assert await pool.load() == "cpu"
        loads = options.notes.read_text().split("\n")[:-1]
        assert sorted(loads) == sorted(f"{process} cpu" for process in processes())
        for _ in range(3):
            made = await run([running(Words), outside(pool, Scale, said=options)], "a ab")
            assert made == [Text("a 1 "), Text("ab 3 "), End()]
        assert len(options.notes.read_text().split("\n")[:-1]) == 2
    finally:
        await pool.close()


async def test_a_process_with_a_device_that_is_killed_loads_again(tmp_path: Path) -> None:
    options = ScaleOptions(notes=tmp_path / "loads")
    pool = ProcessPool(1, Load(Scale, options, "cpu"))
    try:
        await pool.load()
        with pytest.raises(StageLost):
            await read_and_kill([running(Words), outside(pool, Scale, said=options)], "a", "a 1 ")
        again = await run([running(Words), outside(pool, Scale, said=options)], "ab")
        assert again == [Text("ab 3 "), End()]
        assert len(set(options.notes.read_text().split("\n")[:-1])) == 2
    finally:
        await pool.close()


async def test_an_idle_process_with_a_device_that_is_killed_loads_again_at_once(
    tmp_path: Path,
) -> None:
    options = ScaleOptions(notes=tmp_path / "loads")
    pool = ProcessPool(1, Load(Scale, options, "cpu"))

    def loads() -> list[str]:
        return options.notes.read_text().split("\n")[:-1]

    try:
        await pool.load()
        assert len(await run([running(Words), outside(pool, Scale, said=options)], "ab")) == 2
        [process] = processes()
        os.kill(process, signal.SIGKILL)
        await until(lambda: len(loads()) == 2)
        assert await pool.load() == "cpu"
        assert len(loads()) == 2
        # A process that has had no stage object may end again and again: it waits for one.
        [process] = processes()
        with capture_logs() as logged:
            os.kill(process, signal.SIGKILL)
            await until(lambda: bool(logged))
        assert [each["event"] for each in logged] == ["stage.process_lost"]
        names = [str(task.get_coro()) for task in asyncio.all_tasks()]
        assert not [name for name in names if "StageProcess._restart" in name]
    finally:
        await pool.close()


async def test_a_stage_that_cannot_load_leaves_no_process(tmp_path: Path) -> None:
    options = ScaleOptions(notes=tmp_path / "loads", fails=True)
    pool = ProcessPool(1, Load(Scale, options, "cpu"))
    with pytest.raises(StageFailed, match="RuntimeError: the weights are missing"):
        await pool.load()
    assert not processes()
    *_, end = await run([running(Words), outside(pool, Scale, said=options)], "a")
    message = "the stage scale failed: RuntimeError: the weights are missing"
    assert end == End(FinishReason.FAILED, message=message)
    await pool.close()


@pytest.mark.parametrize(("gpus", "device"), [((), "cpu"), (("0",), "cuda")])
def test_an_automatic_device_is_a_gpu_if_there_is_one(
    gpus: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    assert StageObjects().carry_out(Load(ShoutOutside, StageOptions(), "auto")).device == device
    assert StageObjects().carry_out(Load(ShoutOutside, StageOptions(), "cpu")).device == "cpu"
