"""An origin that has too much to do: what streams and workers notice of it."""

from __future__ import annotations

import pytest

from tailrace.ledger.errors import Overloaded
from tailrace.ledger.frame import FinishReason, Notice, Priority
from tailrace.origin.core.load_shedding import RISE_S, SHORT_BATCH_TOKENS, LoadLevel
from tailrace.origin.core.streams import MOST_WAIT_S
from tailrace.origin.workers.worker_frame import CancelRun, SetShedding
from tests.origin.stage import RECIPE, A, B, C, Stage, fresh

pytestmark = pytest.mark.anyio

FREE = 0.5
BATCH = RECIPE.model_copy(update={"priority": "batch", "max_tokens": 1000})


async def raised(stage: Stage, level: LoadLevel) -> None:
    """Raise the load level that far, because a stream that a worker has is not begun."""
    while stage.runs.core.shedding.level < level:
        stage.clock_s += RISE_S
        await stage.runs.measure_load(FREE)


async def test_workers_do_less_and_the_less_urgent_are_refused_while_a_stream_waits(
    stage: Stage,
) -> None:
    slot, _ = await stage.running(A)
    await stage.runs.measure_load(FREE)
    assert SetShedding not in {type(frame) for _, frame in slot.sent}
    stage.clock_s += MOST_WAIT_S + 1
    await stage.runs.measure_load(FREE)
    assert slot.last == (0, SetShedding(small_steps=True, guess=True))
    await raised(stage, LoadLevel.NO_GUESSES)
    assert slot.last == (0, SetShedding(small_steps=True, guess=False))
    await stage.ready(stage.slots[1])
    assert stage.slots[1].last == (0, SetShedding(small_steps=True, guess=False))
    await raised(stage, LoadLevel.NO_BATCH)
    batch = stage.runs.room(fresh(), priority=Priority.BATCH)
    with pytest.raises(Overloaded, match="for a worker to start it") as error, batch:
        pass
    assert error.value.retryable
    with stage.runs.room(fresh(), priority=Priority.STANDARD):
        pass
    await raised(stage, LoadLevel.NOTHING_NEW)
    with pytest.raises(Overloaded), stage.runs.room(fresh(), priority=Priority.INTERACTIVE):
        pass
    assert stage.metrics.registry.get_sample_value("tailrace_overload_rung") == 6


async def test_a_stream_that_a_worker_has_begun_or_that_is_of_class_batch_does_not_count(
    stage: Stage,
) -> None:
    slot, _ = await stage.running(A)
    stage.begun(slot, A)
    await stage.start(B, BATCH)
    stage.clock_s += 10 * MOST_WAIT_S
    await stage.runs.measure_load(FREE)
    assert stage.runs.core.shedding.level is LoadLevel.NORMAL


async def test_new_streams_of_class_batch_are_shorter_and_say_so(stage: Stage) -> None:
    await stage.running(A)
    assert stage.runs.core.shedding.shortened(BATCH) is BATCH
    stage.clock_s += MOST_WAIT_S + 1
    await raised(stage, LoadLevel.SHORT_BATCH)
    assert stage.runs.core.shedding.shortened(RECIPE) is RECIPE
    recipe = stage.runs.core.shedding.shortened(BATCH)
    assert recipe.max_tokens == SHORT_BATCH_TOKENS
    await stage.start(B, recipe)
    [notice] = await stage.frames(B)
    assert isinstance(notice, Notice)
    assert notice.code == "shortened"


async def test_where_memory_is_nearly_used_up_the_longest_batch_stream_ends_and_no_other(
    stage: Stage,
) -> None:
    slot, standard = await stage.running(A)
    runs = {}
    for stream in (B, C):
        await stage.start(stream, BATCH)
        runs[stream] = slot.last[0]
    for index in range(3):
        await stage.step(slot, standard, index, "a")
        await stage.step(slot, runs[B], index, "b")
    await stage.step(slot, runs[C], 0, "c")
    await stage.runs.measure_load(0.01)
    assert (runs[B], CancelRun(is_final=True)) in slot.sent
    end = await stage.end_of(B, after=3)
    assert (end.finish_reason, end.retryable) == (FinishReason.FAILED, True)
    assert end.message is not None
    assert "memory" in end.message
    await stage.step(slot, standard, 3, "a")
    await stage.step(slot, runs[C], 1, "c")
    assert [len(await stage.frames(stream)) for stream in (A, C)] == [4, 2]
