"""Streams that other origins take over or end, appends that are refused, a ledger that is away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.ledger.errors import Damaged, LedgerFailed, Unavailable
from tailrace.ledger.frame import FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.origin.core.streams import MAX_DEATHS
from tailrace.origin.generations.stream_log import read_history
from tailrace.origin.workers.worker_frame import CancelRun, Emission, Step
from tests.origin.stage import RECIPE, A, B, Stage

pytestmark = pytest.mark.anyio

SMALL = RetentionSettings(max_stream_bytes=150)


@pytest.fixture
async def other(stage: Stage) -> Stage:
    """Another origin on the same ledger."""
    return Stage(stage.ledger)


async def test_a_stream_that_another_origin_took_over_is_halted_and_forgotten(
    stage: Stage, other: Stage
) -> None:
    here, there = stage.slots[0], other.slots[0]
    await stage.ready(here)
    await other.ready(there)
    await stage.start(A)
    run, _ = here.last
    await stage.step(here, run, 0, "a")
    await other.runs.restore([A])
    await stage.step(here, run, 1, "late")
    assert here.last == (run, CancelRun())
    assert stage.runs.table.count == 0
    await stage.step(here, run, 2, None)  # what it says before it obeys
    await other.step(there, there.last[0], 1, "b")
    assert await stage.frames(A) == [Token("a", 0), Token("b", 1)]
    assert other.runs.table.count == 1


async def test_the_other_streams_of_a_step_are_stored_when_one_is_refused(stage: Stage) -> None:
    one, _ = await stage.running(A)
    await stage.start(B)
    (run_a, _), (run_b, _) = one.sent
    await stage.ledger.take_over(A)
    step = Step.of(
        tuple(Emission(run, 0, (1,), (), encode(Token("x", 0))) for run in (run_a, run_b))
    )
    await stage.runs.worker_step(one, step.cut())
    assert await stage.frames(A) == []
    assert await stage.frames(B) == [Token("x", 0)]
    assert one.last == (run_a, CancelRun())


async def test_a_stream_that_another_origin_generates_is_cancelled_here(
    stage: Stage, other: Stage
) -> None:
    one, run = await stage.running(A)
    await stage.step(one, run, 0, "a")
    await other.runs.cancel(A)
    await stage.step(one, run, 1, "late")
    assert one.last == (run, CancelRun())
    [_, end] = await stage.frames(A)
    assert end == StreamEnd(1, FinishReason.CANCELLED, 1, 2)
    assert stage.runs.table.count == other.runs.table.count == 0


async def test_a_cancel_is_not_lost_with_the_stream_that_another_origin_took(
    stage: Stage, other: Stage
) -> None:
    here, there = stage.slots[0], other.slots[0]
    await stage.ready(here)
    await other.ready(there)
    await stage.start(A)
    run, _ = here.last
    await other.runs.restore([A])
    await stage.runs.cancel(A)  # it does not know yet that it has lost the stream
    await stage.cancelled(here, run, 0)
    assert await stage.frames(A) == [StreamEnd(0, FinishReason.CANCELLED, 0, 2)]
    await other.step(there, there.last[0], 0, "late")
    assert stage.runs.table.count == other.runs.table.count == 0


async def test_a_cancel_ends_a_waiting_stream_that_another_origin_took(
    stage: Stage, other: Stage
) -> None:
    await stage.start(A)
    await other.ready(other.slots[0])
    await other.runs.restore([A])
    await stage.runs.cancel(A)
    assert await stage.frames(A) == [StreamEnd(0, FinishReason.CANCELLED, 0, 2)]


async def test_a_cancel_of_anothers_stream_is_kept_while_the_ledger_is_away(
    stage: Stage, other: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the stream has one record here, although it is looked for at the same time."""
    await other.running(A)
    await stage.ready(stage.slots[0])
    take_over, asked = stage.ledger.take_over, asyncio.Event()

    async def unanswered(stream: bytes) -> int:
        await take_over(stream)
        asked.set()
        await asyncio.sleep(0)
        raise Unavailable("the answer of the ledger is lost")

    monkeypatch.setattr(stage.ledger, "take_over", unanswered)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.runs.cancel(A))
        await asked.wait()
        tasks.create_task(stage.runs.restore([A]))
    monkeypatch.undo()
    assert stage.runs.table.count == 1
    await stage.runs.restore([A])
    end = await stage.end_of(A)
    assert end.finish_reason is FinishReason.CANCELLED
    assert stage.slots[0].sent == []
    assert stage.runs.table.count == 0


async def test_cancelling_what_another_origin_has_ended_changes_nothing(
    stage: Stage, other: Stage
) -> None:
    one, run = await stage.running(A)
    await stage.step(one, run, 0, None)
    epoch = (await stage.ledger.info(A)).epoch
    await other.runs.cancel(A)
    assert len(await stage.frames(A)) == 1
    assert (await stage.ledger.info(A)).epoch == epoch


async def test_what_another_origin_took_while_it_waited_is_dropped(
    stage: Stage, other: Stage
) -> None:
    one, _ = await stage.running(A)
    await stage.lost(one)  # it waits, and so does another's from before
    await stage.create(B)
    await stage.runs.restore([B])
    await other.ready(other.slots[0])
    await other.runs.restore([A, B])
    await stage.ready(stage.slots[1])
    assert stage.slots[1].sent == []
    assert (stage.runs.table.count, other.runs.table.count) == (0, 2)


async def test_a_stream_that_was_ended_while_it_waited_for_its_first_worker_is_dropped(
    stage: Stage, other: Stage
) -> None:
    await stage.start(A)
    await other.runs.cancel(A)
    await stage.ready(stage.slots[0])
    assert stage.slots[0].sent == []
    assert stage.runs.table.count == 0


async def test_what_runs_or_waits_here_is_not_restored_again(stage: Stage) -> None:
    one = stage.slots[0]
    await stage.start(A)
    await stage.runs.restore(await stage.ledger.unfinished())
    await stage.ready(one)
    await stage.runs.restore(await stage.ledger.unfinished())
    assert len(one.sent) == 1
    assert (await stage.ledger.info(A)).epoch == 1


async def test_a_stream_that_is_restored_before_it_is_started_runs_once(stage: Stage) -> None:
    await stage.ready(stage.slots[0])
    await stage.create(A)
    await stage.runs.restore([A])
    await stage.runs.start((A, RECIPE))
    assert len(stage.slots[0].sent) == 1


async def test_what_has_ended_or_is_gone_is_not_restored(stage: Stage) -> None:
    await stage.start(A)
    await stage.runs.cancel(A)
    await stage.runs.restore([A, B])
    assert stage.runs.table.count == 0


async def test_a_stream_of_another_version_is_left_to_others(stage: Stage) -> None:
    await stage.create(A, '{"version": 9}')
    await stage.create(B)
    await stage.ready(stage.slots[0])
    await stage.runs.restore([A, B])
    assert stage.runs.table.count == 1
    assert (await stage.ledger.info(A)).epoch == 1


async def test_no_more_streams_are_restored_than_there_is_room_for(stage: Stage) -> None:
    streams = [bytes([n]) * 16 for n in range(6)]
    for stream in streams:
        await stage.create(stream)
    await stage.runs.restore(streams)
    assert stage.runs.table.count == 4
    await stage.runs.cancel(streams[0])
    await stage.runs.restore(streams[1:])
    assert stage.runs.table.count == 4


async def test_a_run_that_is_not_in_step_with_the_ledger_begins_again_from_there(
    stage: Stage,
) -> None:
    one, run = await stage.running(A)
    await stage.step(one, run, 0, "a")
    await stage.step(one, run, 2, "c")
    (_, halt), (again, order) = one.sent[-2:]
    history = await read_history(stage.ledger, A, asyncio.Lock())
    assert (halt, order) == (CancelRun(), RECIPE.run(history))
    await stage.step(one, again, 1, "b")
    assert await stage.frames(A) == [Token("a", 0), Token("b", 1)]


async def test_a_stream_that_no_run_keeps_in_step_is_ended_as_failed(stage: Stage) -> None:
    one, _ = await stage.running(A)
    for _ in range(MAX_DEATHS):
        await stage.step(one, one.last[0], 1, "b")
    end = await stage.end_of(A)
    assert end.message == f"{MAX_DEATHS} workers sent frames that do not fit this stream"
    assert stage.runs.table.count == 0


async def test_a_stream_that_was_deleted_is_halted_and_forgotten(stage: Stage) -> None:
    one, run = await stage.running(A)
    await stage.ledger.delete(A)
    await stage.step(one, run, 0, "a")
    assert one.last == (run, CancelRun())
    assert stage.runs.table.count == 0


# ---- a ledger that is away for a while ----


class Outage:
    """Takeovers get no answer until it is `over`; they may `come_through` all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ledger: SqliteLedger) -> None:
        self.over = False
        self.come_through = False
        self._take_over = ledger.take_over
        monkeypatch.setattr(ledger, "take_over", self._answer)

    async def _answer(self, stream: bytes) -> int:
        epoch = await self._take_over(stream) if self.over or self.come_through else 0
        if not self.over:
            raise Unavailable("the ledger is away")
        return epoch


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> Outage:
    return Outage(monkeypatch, stage.ledger)


@pytest.mark.parametrize("come_through", [False, True])
async def test_a_stream_that_cannot_be_taken_over_is_tried_again(
    stage: Stage, outage: Outage, come_through: bool
) -> None:
    one, two = stage.slots
    outage.come_through = come_through
    await stage.ready(one)
    await stage.start(A)
    await stage.step(one, one.last[0], 0, "a")
    await stage.lost(one)
    await stage.ready(two)
    await stage.runs.restore([])
    assert two.sent == []
    outage.over = True
    await stage.runs.restore([])
    await stage.step(two, two.last[0], 1, "b")
    assert await stage.frames(A) == [Token("a", 0), Token("b", 1)]


async def test_a_cancel_outlives_an_outage(stage: Stage, other: Stage, outage: Outage) -> None:
    await stage.start(A)
    await stage.runs.cancel(A)
    await other.runs.cancel(A)
    assert await stage.frames(A) == []
    outage.over = True
    for origin in (stage, other):
        await origin.ready(origin.slots[0])
        await origin.runs.restore([])
        assert origin.runs.table.count == 0
    assert await stage.frames(A) == [StreamEnd(0, FinishReason.CANCELLED, 0, 2)]


async def test_a_stream_that_killed_its_workers_during_an_outage_is_ended_after_it(
    stage: Stage, outage: Outage
) -> None:
    one = stage.slots[0]
    await stage.start(A)
    stage.runs.table.by_id[A].standing.blamed = MAX_DEATHS - 1
    await stage.ready(one)
    stage.begun(one)
    await stage.lost(one)
    outage.over = True
    await stage.runs.restore([])
    await stage.ready(one)
    assert len(one.sent) == 2  # it is given once more: that it was to be ended was not stored
    stage.begun(one)
    await stage.lost(one)
    end = await stage.end_of(A)
    assert end.finish_reason is FinishReason.FAILED


async def test_a_ledger_that_has_failed_is_no_outage(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failed(_: bytes) -> int:
        raise LedgerFailed("the disk is full")

    await stage.ready(stage.slots[0])
    await stage.create(A)
    monkeypatch.setattr(stage.ledger, "take_over", failed)
    with pytest.raises(LedgerFailed):
        await stage.runs.restore([A])


async def test_a_stream_at_its_size_limit_ends_as_length(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(tmp_path / "small.db", lambda: 1000, retention=SMALL)
    try:
        stage = Stage(ledger)
        one, run = await stage.running(A)
        await stage.step(one, run, 0, "x" * 90)
        await stage.step(one, run, 1, "y" * 90)
        end = await stage.end_of(A, after=1)
        assert (end.finish_reason, end.index) == (FinishReason.LENGTH, 1)
        assert one.last == (run, CancelRun())
        assert stage.runs.table.count == 0
    finally:
        await ledger.close()


async def test_a_stream_that_the_ledger_has_no_room_for_may_be_tried_again(tmp_path: Path) -> None:
    tiny = RetentionSettings(max_ledger_bytes=170_000)
    ledger = await SqliteLedger.open(tmp_path / "tiny.db", lambda: 1000, retention=tiny)
    try:
        stage = Stage(ledger)
        one, run = await stage.running(A)
        await stage.step(one, run, 0, "x" * 100_000)
        await ledger.expire()
        await stage.step(one, run, 1, "y")
        end = await stage.end_of(A, after=1)
        assert (end.finish_reason, end.index) == (FinishReason.FAILED, 1)
        assert end.retryable
        assert stage.runs.table.count == 0
    finally:
        await ledger.close()


async def test_a_damaged_stream_is_ended_as_failed_and_the_others_go_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = stage.slots[1]
    one, _ = await stage.running(A)
    await stage.start(B)
    (run_a, _), (run_b, _) = one.sent
    await stage.step(one, run_a, 0, "a")
    await stage.step(one, run_b, 0, "b")
    read = stage.ledger.read

    async def half_rotten(stream: bytes, start: int, limit: int) -> list[Record]:
        if stream == A:
            raise Damaged("stream A: segment at index 0 does not match its checksum")
        return await read(stream, start, limit)

    monkeypatch.setattr(stage.ledger, "read", half_rotten)
    await stage.lost(one)
    await stage.ready(two)
    monkeypatch.undo()
    end = await stage.end_of(A, after=1)
    assert (end.finish_reason, end.index) == (FinishReason.FAILED, 1)
    await stage.step(two, two.last[0], 1, "c")
    assert await stage.frames(B) == [Token("b", 0), Token("c", 1)]
