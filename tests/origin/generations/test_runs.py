"""Tests of an origin's streams as workers start, die and make tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest

from tailrace.ledger.errors import Damaged, Overloaded, Unavailable
from tailrace.ledger.frame import (
    FinishReason,
    FormatKind,
    Logged,
    Notice,
    OutputFormat,
    Priority,
    Revision,
    Sampling,
    StreamEnd,
    Token,
    decode,
    encode,
)
from tailrace.ledger.record_extra import RecordExtra
from tailrace.origin.core.events import Tick
from tailrace.origin.core.poison_streams import TOGETHER_DEATHS
from tailrace.origin.core.states import WorkerState
from tailrace.origin.core.streams import MAX_DEATHS
from tailrace.origin.generations.runs import Runs
from tailrace.origin.generations.stream_log import History
from tailrace.origin.serving.model_host import FAILED_STARTS
from tailrace.origin.workers.liveness import MOST_DEATHS, OPEN_MAX_S
from tailrace.origin.workers.worker_frame import (
    MAX_WORKER_FRAME_BYTES,
    CancelRun,
    Emission,
    LoadProgress,
    Ready,
    StartRun,
    StartTextRun,
    Step,
)
from tests.origin.stage import READY, RECIPE, A, B, C, Slot, Stage, fresh

pytestmark = pytest.mark.anyio


async def test_a_stream_waits_for_a_worker_and_then_runs(stage: Stage) -> None:
    await stage.start(A)
    one = stage.slots[0]
    assert one.sent == []
    await stage.ready(one)
    run, order = one.last
    assert order == RECIPE.run(History())
    await stage.step(one, run, 0, "a")
    await stage.step(one, run, 1, None)
    assert await stage.frames(A) == [Token("a", 0), StreamEnd(1, FinishReason.LENGTH, 1, 2)]
    assert stage.runs.table.count == 0


async def test_a_damaged_row_costs_its_stream_and_no_other_of_the_step(
    stage: Stage, tmp_path: Path
) -> None:
    slot = stage.slots[0]
    await stage.ready(slot)
    await stage.start(A)
    await stage.start(B)
    runs = [run for run, _ in slot.sent]
    for _ in range(2):
        await stage.ledger.expire()  # what has made nothing leaves the memory
    connection = apsw.Connection(str(tmp_path / "ledger.db"))
    connection.execute("UPDATE stream SET recipe = '1' WHERE id = ?", (A,))
    connection.close()
    made = [Emission(run, 0, (100,), (), encode(Token("a", 0))) for run in runs]
    await stage.runs.worker_step(slot, Step.of(made).cut())
    assert await stage.frames(B) == [Token("a", 0)]
    assert slot.last == (runs[0], CancelRun(is_final=False))
    assert stage.runs.table.by_id.keys() == {B}
    with pytest.raises(Damaged):  # its readers are told
        await stage.frames(A)
    await stage.runs.restore(await stage.ledger.unfinished())
    await stage.step(slot, runs[1], 1, None)
    assert stage.runs.table.count == 0


async def test_streams_go_to_the_worker_with_the_fewest(stage: Stage) -> None:
    for slot in stage.slots:
        await stage.ready(slot)
    for stream in (A, B, C):
        await stage.start(stream)
    assert sorted(len(slot.sent) for slot in stage.slots) == [1, 2]


async def test_another_worker_goes_on_from_what_the_ledger_holds(stage: Stage) -> None:
    two = stage.slots[1]
    one, run = await stage.running(A)
    await stage.step(one, run, 0, "é")
    await stage.step(one, run, 1, "b")
    await stage.ready(two)
    await stage.lost(one)
    _, order = two.last
    assert isinstance(order, StartRun)
    assert (order.generated_ids, order.sent_bytes, order.next_index) == ((100, 101), 3, 2)
    assert (await stage.ledger.info(A)).epoch == 2


async def test_a_worker_that_dies_while_it_is_given_a_stream_is_not_sent_it(stage: Stage) -> None:
    one, two = stage.slots
    await stage.ready(one)
    await stage.create(A)
    giving = asyncio.create_task(stage.runs.restore([A]))
    await asyncio.sleep(0)  # it waits for the ledger now
    assert not giving.done()
    await stage.lost(one)
    await stage.ready(one)  # the slot's next worker, which has its own order
    await giving
    assert len(one.sent) == 1
    assert two.sent == []
    assert one.last[0] == stage.runs.table.by_id[A].run


async def test_a_worker_that_is_ready_after_it_was_told_to_stop_gets_no_streams(
    stage: Stage,
) -> None:
    one = stage.slots[0]
    stage.models.core.workers[one.number].state = WorkerState.STOPPING
    await stage.ready(one)
    await stage.start(A)
    assert one.sent == []
    assert not stage.runs.models.is_up("demo")
    await stage.rested(one)
    stage.models.core.workers[one.number].state = WorkerState.STARTING
    await stage.ready(one)
    assert [type(order) for _, order in one.sent] == [StartRun]
    await stage.lost(one)
    assert not stage.runs.models.is_up("demo")  # it was listed once


async def test_the_streams_of_a_worker_that_was_told_to_stop_wait_for_another_one(
    stage: Stage,
) -> None:
    one, _ = await stage.running(A)
    stage.models.core.workers[one.number].state = WorkerState.STOPPING
    await stage.rested(one)
    assert not stage.runs.models.is_up("demo")
    await stage.start(B)
    await stage.ready(stage.slots[1])
    assert [type(order) for _, order in stage.slots[1].sent] == [StartRun, StartRun]
    assert len(one.sent) == 1


async def test_a_stream_that_is_placed_as_its_worker_leaves_waits_for_another_one(
    stage: Stage,
) -> None:
    one, two = stage.slots
    await stage.ready(one)
    starting = asyncio.create_task(stage.start(A))
    while not stage.runs.table.on(one.number):  # noqa: ASYNC110
        await asyncio.sleep(0)
    stage.models.core.workers[one.number].state = WorkerState.STOPPING
    await stage.rested(one)
    await starting
    assert one.sent == []
    assert stage.runs.table.count == 1
    await stage.ready(two)
    run, order = two.last
    assert order == RECIPE.run(History())
    await stage.step(two, run, 0, None)
    assert await stage.end_of(A) == StreamEnd(0, FinishReason.LENGTH, 0, 2)


async def test_a_lost_workers_late_frames_are_not_stored(stage: Stage) -> None:
    two = stage.slots[1]
    one, run = await stage.running(A)
    await stage.ready(two)
    await stage.lost(one)
    await stage.step(one, run, 0, "late")
    assert await stage.frames(A) == []
    await stage.step(two, two.last[0], 0, "new")
    assert await stage.frames(A) == [Token("new", 0)]


async def test_a_stream_that_keeps_killing_workers_is_ended_as_failed(stage: Stage) -> None:
    one = stage.slots[0]
    await stage.start(A)
    for _ in range(MAX_DEATHS):
        await stage.ready(one)
        stage.begun(one)
        await stage.lost(one)
    end = await stage.end_of(A)
    assert end.finish_reason is FinishReason.FAILED
    assert end.message == f"{MAX_DEATHS} workers died while they ran this stream"
    await stage.ready(one)
    assert stage.runs.table.count == 0


async def test_the_neighbours_of_a_stream_that_kills_workers_are_not_blamed(stage: Stage) -> None:
    one = stage.slots[0]
    for stream in (A, B):
        await stage.start(stream)
    for _ in range(TOGETHER_DEATHS + 1):
        await stage.ready(one)
        # Either may be the cause, and most likely neither.
        assert len(stage.runs.table.on(one.number)) == 2
        stage.begun(one)
        await stage.lost(one)
    for life in range(MAX_DEATHS):
        await stage.ready(one)
        [alone] = stage.runs.table.on(one.number)
        assert alone.id == A
        await stage.step(one, alone.run, life, "a")
        _, beside = stage.runs.table.on(one.number)  # A is proven, and B is tried beside it
        assert beside.id == B
        stage.begun(one, B)
        await stage.lost(one)
    assert await stage.frames(A) == [Token("a", index) for index in range(MAX_DEATHS)]
    end = await stage.end_of(B)
    assert end.finish_reason is FinishReason.FAILED
    await stage.ready(one)
    assert stage.runs.table.count == 1


async def test_a_stream_that_only_waited_in_a_worker_is_not_suspected_of_its_death(
    stage: Stage,
) -> None:
    one = stage.slots[0]
    for stream in (A, B):
        await stage.start(stream)
    for _ in range(TOGETHER_DEATHS + 1):
        await stage.ready(one)
        assert len(stage.runs.table.on(one.number)) == 2
        stage.begun(one, A)
        await stage.lost(one)
    for _ in range(MAX_DEATHS):
        await stage.ready(one)
        assert [stream.id for stream in stage.runs.table.on(one.number)] == [
            B
        ]  # A is to wait for it
        await stage.lost(one)
    assert await stage.frames(B) == []


async def test_newcomers_do_not_wait_for_suspects(stage: Stage) -> None:
    one = stage.slots[0]
    for stream in (A, B):
        await stage.start(stream)
    for _ in range(TOGETHER_DEATHS + 1):
        await stage.ready(one)
        stage.begun(one)
        await stage.lost(one)
    await stage.ready(one)
    await stage.start(C)
    assert [stream.id for stream in stage.runs.table.on(one.number)] == [A, C]  # B waits for A


async def test_suspects_are_handed_over_when_the_others_have_made_something(stage: Stage) -> None:
    one = stage.slots[0]
    for stream in (A, B):
        await stage.start(stream)
    for _ in range(TOGETHER_DEATHS + 1):
        await stage.ready(one)
        stage.begun(one)
        await stage.lost(one)
    await stage.start(C)
    await stage.ready(one)
    assert [stream.id for stream in stage.runs.table.on(one.number)] == [C]
    await stage.step(one, one.last[0], 0, "c")
    assert [stream.id for stream in stage.runs.table.on(one.number)] == [C, A]


async def test_an_urgent_stream_is_handed_over_first(stage: Stage) -> None:
    for stream, priority in ((A, "batch"), (B, "standard"), (C, "interactive")):
        await stage.start(stream, RECIPE.model_copy(update={"priority": priority}))
    await stage.ready(stage.slots[0])
    assert [stream.id for stream in stage.runs.table.on(stage.slots[0].number)] == [C, B, A]


async def test_an_urgent_stream_does_not_wait_until_others_are_taken_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.create(A, RECIPE.model_copy(update={"priority": "batch"}).model_dump_json())
    await stage.create(B, RECIPE.model_copy(update={"priority": "interactive"}).model_dump_json())
    await stage.runs.restore([A, B])
    one, take_over = stage.slots[0], stage.ledger.take_over
    ordered_before: dict[bytes, int] = {}

    async def noted(stream: bytes) -> int:
        ordered_before[stream] = len(one.sent)
        return await take_over(stream)

    monkeypatch.setattr(stage.ledger, "take_over", noted)
    await stage.ready(one)
    assert ordered_before == {B: 0, A: 1}


async def test_a_stream_that_makes_tokens_between_deaths_goes_on(stage: Stage) -> None:
    one = stage.slots[0]
    await stage.start(A)
    for index in range(MAX_DEATHS + 2):
        await stage.ready(one)
        await stage.step(one, one.last[0], index, "a")
        await stage.lost(one)
    assert len(await stage.frames(A)) == MAX_DEATHS + 2
    assert stage.runs.table.count == 1


async def test_a_running_stream_is_cancelled_by_its_worker(stage: Stage) -> None:
    one, run = await stage.running(A)
    await stage.runs.cancel(A)
    assert one.last == (run, CancelRun(is_final=True))


async def test_a_waiting_stream_is_cancelled_at_once(stage: Stage) -> None:
    await stage.start(A)
    await stage.runs.cancel(A)
    end = await stage.end_of(A)
    assert (end.finish_reason, end.prompt_tokens) == (FinishReason.CANCELLED, 2)


async def test_a_cancel_is_not_forgotten_when_the_worker_dies_before_it_obeys(
    stage: Stage,
) -> None:
    two = stage.slots[1]
    one, run = await stage.running(A)
    await stage.step(one, run, 0, "a")
    await stage.runs.cancel(A)
    await stage.lost(one)
    await stage.ready(two)
    assert two.sent == []
    end = await stage.end_of(A, after=1)
    assert (end.finish_reason, end.total_tokens) == (FinishReason.CANCELLED, 1)


async def test_a_cancelled_stream_whose_worker_died_ends_although_no_other_is_ready(
    stage: Stage,
) -> None:
    one, run = await stage.running(A)
    await stage.step(one, run, 0, "a")
    await stage.runs.cancel(A)
    await stage.lost(one)
    await stage.runs.restore([A])
    end = await stage.end_of(A, after=1)
    assert (end.finish_reason, end.total_tokens) == (FinishReason.CANCELLED, 1)
    assert stage.runs.table.count == 0


async def test_cancelling_what_is_over_or_unknown_does_nothing(stage: Stage) -> None:
    await stage.runs.cancel(A)
    assert stage.runs.table.count == 0


async def test_another_engine_goes_on_and_says_so(stage: Stage) -> None:
    two = stage.slots[1]
    one, run = await stage.running(A)
    await stage.step(one, run, 0, "a")
    await stage.lost(one)
    await stage.ready(two, replace(READY, fingerprint="another", device="cuda"))
    run, order = two.last
    assert isinstance(order, StartRun)
    assert (order.generated_ids, order.next_index) == ((100,), 2)
    await stage.step(two, run, 2, "b")
    _, notice, token = await stage.frames(A)
    assert isinstance(notice, Notice)
    assert (notice.code, notice.index, token) == ("inexact", 1, Token("b", 2))
    for said in ("another", "cuda", "fingerprint"):
        assert said in notice.message


async def test_what_makes_a_stream_whose_recipe_could_not_say_it_stands_in_its_log(
    stage: Stage,
) -> None:
    """Another origin finds it there: an engine that is the same goes on in silence."""
    one = stage.slots[0]
    await stage.ready(one)
    await stage.start(A, RECIPE.model_copy(update={"fingerprint": ""}))
    await stage.step(one, one.last[0], 0, "a")
    [record] = await stage.ledger.read(A, 0, 100)
    assert (decode(record.frame)[1], record.ids) == (Token("a", 0), (100,))
    assert RecordExtra.of(record) == RecordExtra(engine="fingerprint", at_ms=stage.unix_ms)
    for fingerprint, said in (("fingerprint", []), ("another", ["inexact"])):
        other = Stage(stage.ledger)
        await other.runs.restore([A])
        await other.ready(other.slots[0], replace(READY, fingerprint=fingerprint))
        _, *more = await other.frames(A)
        assert [notice.code for notice in more if isinstance(notice, Notice)] == said


async def test_an_engine_that_ends_before_it_has_made_anything_is_not_the_streams(
    stage: Stage,
) -> None:
    one, two = stage.slots
    await stage.ready(one, replace(READY, fingerprint="first"))
    await stage.start(A, RECIPE.model_copy(update={"fingerprint": ""}))
    await stage.lost(one)
    await stage.ready(two, replace(READY, fingerprint="second"))
    await stage.step(two, two.last[0], 0, "a")
    [record] = await stage.ledger.read(A, 0, 100)
    assert RecordExtra.of(record) == RecordExtra(engine="second", at_ms=stage.unix_ms)


async def test_the_engine_that_began_a_stream_is_known_although_its_recipe_names_another(
    stage: Stage,
) -> None:
    one, two = stage.slots
    await stage.start(A)
    await stage.ready(one, replace(READY, fingerprint="another"))
    await stage.step(one, one.last[0], 0, "a")
    await stage.lost(one)
    await stage.ready(two)  # the one that the recipe names
    _, notice = await stage.frames(A)
    assert isinstance(notice, Notice)
    assert notice.code == "inexact"


async def test_a_notice_is_not_repeated(stage: Stage) -> None:
    two = stage.slots[1]
    one, run = await stage.running(A)
    await stage.step(one, run, 0, "a")
    await stage.lost(one)
    for _ in range(2):
        await stage.ready(two, replace(READY, fingerprint="another"))
        await stage.lost(two)
    assert len(await stage.frames(A)) == 2
    assert (await stage.ledger.info(A)).epoch == 3


async def test_an_engine_that_takes_a_stream_over_before_it_began_is_exact(stage: Stage) -> None:
    await stage.start(A)
    await stage.ready(stage.slots[0], replace(READY, fingerprint="another"))
    assert await stage.frames(A) == []
    assert len(stage.slots[0].sent) == 1


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(READY, model="other"), "serves 'other' now"),
        (replace(READY, kind="text"), "another kind"),
        (replace(READY, vocab=50, fingerprint="another"), "another vocabulary"),
        (replace(READY, context=2, fingerprint="another"), "shorter context"),
    ],
)
async def test_a_worker_that_cannot_go_on_ends_the_stream(
    stage: Stage, other: Ready, why: str
) -> None:
    two = stage.slots[1]
    one, run = await stage.running(A)
    await stage.step(one, run, 0, "a")
    await stage.lost(one)
    await stage.ready(two, other)
    end = await stage.end_of(A, after=1)
    assert end.finish_reason is FinishReason.ORIGIN_LOST
    assert end.message is not None
    assert why in end.message


async def test_what_was_dropped_of_the_prompt_is_logged_first_and_once(stage: Stage) -> None:
    one, two = stage.slots
    recipe = RECIPE.model_copy(update={"notices": (("truncated", "2 messages"),)})
    await stage.ready(one)
    await stage.start(A, recipe)
    assert await stage.frames(A) == [Notice("truncated", "2 messages", 0)]
    _, order = one.last
    assert isinstance(order, StartRun)
    assert order.next_index == 1
    await stage.lost(one)
    await stage.ready(two)
    assert two.last[1] == order
    assert len(await stage.frames(A)) == 1


async def test_a_worker_of_kind_text_is_asked(stage: Stage) -> None:
    one, two = stage.slots
    recipe = RECIPE.model_copy(update={"prompt_ids": (), "messages": (("user", "Hi"),)})
    text = replace(READY, kind="text", context=0, vocab=0)
    await stage.ready(one, text)
    await stage.start(A, recipe)
    run, ask = one.last
    assert ask == StartTextRun(recipe.model_dump_json(), "", 0, stream=A)
    frames: list[Logged] = [
        Token("a", 0),
        Revision(0, "b", False, 1),
        Revision(0, "c", True, 2),
        Token("d", 3),
    ]
    for frame in frames:
        emission = Emission(run, frame.index, (), (), encode(frame))
        await stage.runs.worker_step(one, Step.of((emission,)).cut())
    await stage.lost(one)
    await stage.ready(two, text)
    assert two.last[1] == StartTextRun(recipe.model_dump_json(), "cd", 4, stream=A)


async def test_every_setting_of_a_recipe_reaches_the_worker(stage: Stage) -> None:
    settings: dict[str, Any] = {
        "sampling": Sampling(0.7, 3, 0.9, 0.1, 1.2, 0.3, -0.4, 5),
        "logprobs": 5,
        "stop": ("x",),
        "ignore_eos": False,
        "completes": True,
    }
    told = {"priority": "batch", "format": ("regex", "a+"), **settings}
    await stage.ready(stage.slots[0])
    await stage.start(A, RECIPE.model_copy(update=told))
    _, order = stage.slots[0].last
    assert isinstance(order, StartRun)
    assert {name: getattr(order, name) for name in settings} == settings
    assert (order.priority, order.format) == (Priority.BATCH, OutputFormat(FormatKind.REGEX, "a+"))


async def test_an_order_that_no_frame_can_hold_ends_its_stream_only(stage: Stage) -> None:
    text = replace(READY, kind="text", context=0, vocab=0)
    await stage.ready(stage.slots[0], text)
    recipe = RECIPE.model_copy(update={"prompt_ids": (), "prompt": "x" * MAX_WORKER_FRAME_BYTES})
    await stage.start(A, recipe)
    end = await stage.end_of(A)
    assert end.finish_reason is FinishReason.FAILED
    await stage.start(B, recipe.model_copy(update={"prompt": "x"}))
    assert stage.runs.table.count == 1


async def fail(stage: Stage, slot: Slot, run: int, index: int) -> StreamEnd:
    """Let a run fail after text that was held back, as on NaN; return its end."""
    end = StreamEnd(index, FinishReason.FAILED, index + 1, 2, "NaN in the logits", retryable=True)
    made = (
        Emission(run, index, (index + 100,), (), encode(Token("held", index))),
        Emission(run, index + 1, (), (), encode(end), can_retry=True),
    )
    await stage.runs.worker_step(slot, Step.of(made).cut())
    return end


async def test_a_failed_run_is_continued_once_by_another_worker_with_a_notice(
    stage: Stage,
) -> None:
    one, run = await stage.running(A)
    two = stage.slots[1]
    await stage.ready(two)
    await stage.step(one, run, 0, "a")
    await fail(stage, one, run, 1)
    await stage.step(one, run, 2, None)  # whatever else it may say of this run
    again, order = two.last
    assert isinstance(order, StartRun)
    assert (tuple(order.generated_ids), order.next_index, order.sent_bytes) == ((100,), 2, 1)
    assert (await stage.ledger.info(A)).epoch == 2
    told = Notice(
        "retried", "the run failed and is tried once more from here: NaN in the logits", 1
    )
    assert await stage.frames(A) == [Token("a", 0), told]
    await stage.step(two, again, 2, "b")
    end = await fail(stage, two, again, 3)
    frames = await stage.frames(A)
    assert frames == [Token("a", 0), told, Token("b", 2), Token("held", 3), end]
    assert stage.runs.table.count == 0
    assert stage.metrics.registry.get_sample_value("tailrace_run_retries_total") == 1


async def test_a_failed_run_is_continued_by_the_same_worker_if_there_is_no_other(
    stage: Stage,
) -> None:
    one, run = await stage.running(A)
    await fail(stage, one, run, 0)
    again, order = one.last
    assert again != run
    assert isinstance(order, StartRun)
    await stage.step(one, again, 1, "a")
    await stage.step(one, again, 2, None)
    _, *made = await stage.frames(A)
    assert made == [Token("a", 1), StreamEnd(2, FinishReason.LENGTH, 2, 2)]


async def test_another_origin_sees_in_the_log_that_a_run_was_retried(stage: Stage) -> None:
    one, run = await stage.running(A)
    await fail(stage, one, run, 0)
    stage.runs = Runs(stage.ledger, 4, stage.models, stage.metrics)
    await stage.runs.restore([A])
    again, _ = one.last
    end = await fail(stage, one, again, 1)
    _, *made = await stage.frames(A)
    assert made == [Token("held", 1), end]


async def test_a_failure_after_which_nothing_can_continue_is_the_end(stage: Stage) -> None:
    one, run = await stage.running(A)
    end = StreamEnd(0, FinishReason.ORIGIN_LOST, 0, 2, "it was lost", retryable=True)
    await stage.runs.worker_step(one, Step.of((Emission(run, 0, (), (), encode(end)),)).cut())
    assert await stage.frames(A) == [end]


async def test_a_text_worker_is_told_of_the_notice_of_a_retry(stage: Stage) -> None:
    one, two = stage.slots
    recipe = RECIPE.model_copy(update={"prompt_ids": (), "prompt": "Hi"})
    text = replace(READY, kind="text", context=0, vocab=0)
    await stage.ready(one, text)
    await stage.start(A, recipe)
    run, _ = one.last
    await stage.step(one, run, 0, "a")
    await fail(stage, one, run, 1)
    assert one.last[1] == StartTextRun(recipe.model_dump_json(), "a", 2, 0, (1,), stream=A)
    await stage.lost(one)
    await stage.ready(two, text)
    assert two.last[1] == StartTextRun(recipe.model_dump_json(), "a", 2, 0, (1,), stream=A)


async def test_an_unfinished_stream_of_a_dead_origin_is_taken_over(stage: Stage) -> None:
    await stage.create(A)
    await stage.runs.restore([A])
    await stage.ready(stage.slots[0])
    assert (await stage.ledger.info(A)).epoch == 2
    assert len(stage.slots[0].sent) == 1


async def test_nothing_is_admitted_before_the_first_model_is_loaded(stage: Stage) -> None:
    with pytest.raises(Unavailable) as error, stage.runs.room(fresh()):
        pass
    assert (error.value.code, error.value.retryable) == ("loading", True)
    assert error.value.min_retry_ms is not None
    await stage.ready(stage.slots[0])
    with stage.runs.room(fresh()) as model:
        assert model.ready == READY
    await stage.lost(stage.slots[0])
    with stage.runs.room(fresh()) as model:
        assert model.ready == READY  # a restart is a pause, not a refusal


async def test_no_more_streams_than_the_limit_are_admitted(stage: Stage) -> None:
    await stage.ready(stage.slots[0])
    for n in range(4):
        with stage.runs.room(fresh()):
            await stage.start(bytes([n]) * 16)
    with pytest.raises(Overloaded, match="the limit is 4"), stage.runs.room(fresh()):
        pass


async def test_room_is_kept_for_all_streams_of_a_request_or_for_none(stage: Stage) -> None:
    await stage.ready(stage.slots[0])
    with stage.runs.room(fresh(3)):
        with pytest.raises(Overloaded), stage.runs.room(fresh(2)):
            pass
        with stage.runs.room(fresh()), pytest.raises(Overloaded), stage.runs.room(fresh()):
            pass
    with stage.runs.room(fresh(4)):
        pass
    assert stage.runs.table.count == 0


async def test_readiness_tells_what_is_awaited(stage: Stage) -> None:
    reasons = [stage.runs.models.reasons]
    for stage_of_load in ("unpack", "compile"):
        stage.runs.worker_loading(stage.slots[0], LoadProgress(stage_of_load, 2, 6))
        reasons.append(stage.runs.models.reasons)
    await stage.ready(stage.slots[0])
    reasons.append(stage.runs.models.reasons)
    await stage.lost(stage.slots[0])
    reasons.append(stage.runs.models.reasons)
    assert reasons == [
        ("starting a worker",),
        ("loading: unpack 2/6",),
        ("compiling 2 of 6 kernels",),
        (),
        ("starting a worker; 1 died before, the last: ended by SIGKILL",),
    ]
    assert stage.changes == 4


async def test_readiness_and_clients_are_told_of_a_crash_loop(stage: Stage) -> None:
    slot = stage.slots[0]
    for _ in range(MOST_DEATHS):
        await stage.ready(slot)
        await stage.lost(slot)
    [reason] = stage.runs.models.reasons
    assert reason == (
        f"{MOST_DEATHS} workers in a row died without any output; another one will be tried; "
        "1 died before, the last: ended by SIGKILL"
    )
    for _ in range(FAILED_STARTS - 1):
        stage.clock_s += OPEN_MAX_S
        stage.models.happen(Tick())
        await stage.lost(slot)
    with pytest.raises(Unavailable, match="ended by SIGKILL") as error, stage.runs.room(fresh()):
        pass
    assert stage.metrics.registry.get_sample_value("tailrace_circuit_state") == 2
    assert error.value.min_retry_ms is not None
    assert error.value.min_retry_ms >= stage.models.find("").circuit.retry_s(stage.clock_s) * 1000


async def test_readiness_tells_that_all_workers_are_silent(stage: Stage) -> None:
    for slot in stage.slots:
        await stage.ready(slot)
        stage.runs.worker_silent(slot)
    reasons = [stage.runs.models.reasons]
    await stage.runs.worker_heard(stage.slots[0])
    reasons.append(stage.runs.models.reasons)
    assert reasons == [("all workers are silent for over 5 s",), ()]


async def test_a_silent_worker_is_given_no_stream_until_it_is_heard(stage: Stage) -> None:
    one, two = stage.slots
    for slot in stage.slots:
        await stage.ready(slot)
    stage.runs.worker_silent(one)
    for stream in (A, B):
        await stage.start(stream)
    assert (len(one.sent), len(two.sent)) == (0, 2)
    stage.runs.worker_silent(two)
    await stage.start(C)
    assert (len(one.sent), len(two.sent)) == (0, 2)
    await stage.runs.worker_heard(one)
    assert (len(one.sent), len(two.sent)) == (1, 2)


async def test_clients_are_told_why_no_worker_starts(stage: Stage) -> None:
    one = stage.slots[0]
    one.exit_reason = "ConfigError: No module named 'speech'"
    await stage.lost(one)
    with (
        pytest.raises(Unavailable, match="No module named 'speech'") as error,
        stage.runs.room(fresh()),
    ):
        pass
    assert (error.value.code, error.value.retryable) == ("unavailable", True)
    await stage.ready(one)
    for _ in range(FAILED_STARTS - 1):
        await stage.lost(one)
        with stage.runs.room(fresh()):
            pass  # it is restarted: a pause, not a refusal
    await stage.lost(one)
    with pytest.raises(Unavailable, match="No module named 'speech'"), stage.runs.room(fresh()):
        pass


async def test_steps_of_two_workers_at_once_are_all_stored(stage: Stage) -> None:
    one, two = stage.slots
    await stage.ready(one)
    await stage.ready(two)
    await stage.start(A)
    await stage.start(B)
    for index in range(20):
        await asyncio.gather(*(stage.step(slot, slot.last[0], index, "x") for slot in (one, two)))
    for stream in (A, B):
        assert await stage.frames(stream) == [Token("x", index) for index in range(20)]


async def test_records_store_a_time_at_most_once_a_second(stage: Stage) -> None:
    slot, run = await stage.running(A)
    for index in range(8):
        await stage.step(slot, run, index, "a")
        stage.unix_ms += 300
    times = [RecordExtra.of(record).at_ms for record in await stage.ledger.read(A, 0, 9)]
    begun = stage.unix_ms - 8 * 300
    assert times == [begun, *[None] * 3, begun + 1200, *[None] * 3]


async def test_times_never_decrease_if_another_origins_clock_is_behind(stage: Stage) -> None:
    slot, run = await stage.running(A)
    await stage.step(slot, run, 0, "a")
    ahead_ms = stage.unix_ms
    stage.unix_ms -= 5000
    await stage.lost(slot)
    other = stage.slots[1]
    await stage.ready(other)
    run, _ = other.last
    for index in range(1, 4):
        await stage.step(other, run, index, "a")
        stage.unix_ms += 3000
    times = [RecordExtra.of(record).at_ms for record in await stage.ledger.read(A, 0, 9)]
    assert times == [ahead_ms, None, None, ahead_ms + 1000]


async def test_the_end_of_a_paused_stream_has_its_time(stage: Stage) -> None:
    slot, run = await stage.running(A)
    await stage.step(slot, run, 0, "a")
    await stage.lost(slot)
    stage.unix_ms += 60_000
    await stage.runs.cancel(A)
    [_, end] = await stage.ledger.read(A, 0, 9)
    assert RecordExtra.of(end).at_ms == stage.unix_ms
