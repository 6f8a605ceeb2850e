"""Streams that nobody reads, and the room of each class."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tailrace.ledger.errors import LedgerAway, Overloaded
from tailrace.ledger.frame import (
    Durability,
    FinishReason,
    Priority,
    StreamEnd,
    Token,
    error_frame,
)
from tailrace.ledger.interface import NewStream, StreamInfo
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.core.streams import IDLE_STREAM_S, UNREAD_GRACE_S
from tailrace.origin.generations.runs import Runs
from tailrace.origin.metrics import Metrics
from tailrace.origin.workers.worker_frame import CancelRun, SetUnread, StartRun, Steer
from tests.origin.stage import READY, RECIPE, A, B, Slot, Stage, fresh, host_of

pytestmark = pytest.mark.anyio

PAUSE = RECIPE.model_copy(update={"unread": "pause", "unread_after_s": 30})
CANCEL = RECIPE.model_copy(update={"unread": "cancel", "unread_after_s": 30})
PAUSED_S = 1000.0


class Audience(Stage):
    """A stage with one ready worker and a clock."""

    def __init__(self, ledger: SqliteLedger) -> None:
        super().__init__(ledger)
        self.metrics = Metrics(lambda: self.clock_s)
        self.renew()

    def renew(self) -> None:
        """Another origin on the same ledger."""
        self.slots = [Slot(0)]
        self.models = host_of(self.slots, self.metrics, self._count)
        self.runs = Runs(self.ledger, 4, self.models, self.metrics, paused_s=PAUSED_S)

    async def later(self, seconds: float) -> None:
        self.clock_s += seconds
        await self.runs.report_readers()

    @property
    def orders(self) -> list[object]:
        return [frame for _, frame in self.slots[0].sent]

    async def find_orphans(self) -> None:
        await self.runs.restore(await self.ledger.unfinished())


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Audience]:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 0)
    audience = Audience(ledger)
    await audience.ready(audience.slots[0])
    yield audience
    await ledger.close()


async def test_a_stream_that_may_pause_is_taken_from_its_worker_and_goes_on_when_it_is_read(
    stage: Audience,
) -> None:
    await stage.start(A, PAUSE)
    [run, _] = stage.slots[0].last
    await stage.step(stage.slots[0], run, 0, "a")
    await stage.later(29)
    assert not any(isinstance(order, CancelRun) for order in stage.orders)
    await stage.later(1)
    assert stage.orders[-1] == CancelRun()
    # The worker's cancelled end is not the stream's end.
    await stage.cancelled(stage.slots[0], run, 1)
    assert stage.runs.table.count == 0, "it needs no room"
    await stage.find_orphans()
    assert stage.runs.table.count == 0, "and is not one that was left by its origin"
    stage.runs.readers.begin(A)
    await stage.later(0)
    again = stage.orders[-1]
    assert isinstance(again, StartRun)
    assert (again.generated_ids, again.next_index) == ((100,), 1)
    assert await stage.frames(A) == [Token("a", 0)]


async def test_a_paused_stream_that_is_read_is_looked_for_until_the_ledger_answers(
    stage: Audience, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(stream: bytes) -> StreamInfo:
        raise LedgerAway("the ledger does not answer")

    await stage.start(A, PAUSE)
    await stage.later(30)
    stage.runs.readers.begin(A)
    monkeypatch.setattr(stage.ledger, "info", away)
    for _ in range(2):
        with pytest.raises(LedgerAway):
            await stage.later(0)
    monkeypatch.undo()
    await stage.later(0)
    assert isinstance(stage.orders[-1], StartRun)


async def test_a_stream_is_read_while_a_reader_could_be_sent_more_and_a_visit_counts(
    stage: Audience,
) -> None:
    await stage.start(A, PAUSE)
    stage.runs.readers.begin(A)
    await stage.later(1000)
    stage.runs.readers.end(A)
    await stage.later(29)
    with stage.runs.readers.reading(A):
        pass
    await stage.later(29)
    await stage.later(29)
    assert not any(isinstance(order, CancelRun) for order in stage.orders)
    await stage.later(1)
    assert CancelRun() in stage.orders


async def test_a_stream_that_is_to_be_cancelled_ends_and_one_that_runs_on_does_not(
    stage: Audience,
) -> None:
    await stage.start(A, CANCEL)
    await stage.start(B)
    [run, _] = next(sent for sent in stage.slots[0].sent if isinstance(sent[1], StartRun))
    await stage.later(30)
    assert (run, CancelRun(is_final=True)) in stage.slots[0].sent
    await stage.cancelled(stage.slots[0], run, 0)
    await stage.end_of(A)
    await stage.later(10_000)
    assert stage.runs.table.count == 1


@pytest.mark.parametrize("state", ["running", "waiting"])
async def test_a_stream_that_nobody_reads_and_that_makes_nothing_is_ended_in_time(
    stage: Audience, state: str
) -> None:
    if state == "waiting":
        await stage.runs.worker_lost(stage.slots[0])
    await stage.start(A)
    await stage.start(B)
    stage.runs.readers.begin(B)
    if state == "running":
        [run, _] = next(sent for sent in stage.slots[0].sent if isinstance(sent[1], StartRun))
        await stage.later(IDLE_STREAM_S - 1)
        await stage.step(stage.slots[0], run, 0, "a")  # which begins its time anew
    await stage.later(IDLE_STREAM_S - 1)
    assert stage.runs.table.count == 2
    await stage.later(1)
    end = await stage.end_of(A, after=int(state == "running"))
    assert (end.finish_reason, end.retryable) == (FinishReason.FAILED, True)
    assert end.message == f"the stream had neither a reader nor output for {IDLE_STREAM_S:g} s"
    assert stage.runs.table.count == 1, "one that is read may wait"
    assert (CancelRun(is_final=True) in stage.orders) is (state == "running")
    labels = {"state": state}
    ended = stage.metrics.registry.get_sample_value("tailrace_idle_streams_ended_total", labels)
    assert ended == 1


async def test_text_for_a_paused_stream_wakes_it(stage: Audience) -> None:
    await stage.start(A, PAUSE)
    await stage.later(30)
    steering = asyncio.create_task(stage.runs.steer(A, (7,)))
    while stage.orders[-1] != Steer((7,)):
        stage.slots[0].ordered.clear()
        await stage.slots[0].ordered.wait()
    await stage.later(100)
    assert not isinstance(stage.orders[-1], CancelRun), "not while the text waits"
    steering.cancel()


async def test_a_paused_stream_outlives_its_origin_and_is_not_kept_for_ever(
    stage: Audience,
) -> None:
    await stage.start(A, PAUSE)
    await stage.later(30)
    stage.renew()
    await stage.ready(stage.slots[0])
    await stage.find_orphans()
    assert isinstance(stage.orders[-1], StartRun), "its time begins anew"
    await stage.later(30)
    assert stage.runs.table.count == 0
    await stage.later(PAUSED_S)
    end = await stage.end_of(A)
    assert end.finish_reason is FinishReason.CANCELLED


async def test_what_was_paused_leaves_room_when_an_origin_starts(stage: Audience) -> None:
    streams = [bytes([n]) * 16 for n in range(10)]
    for stream in streams:
        new = NewStream(stream, PAUSE.model_dump_json(), Durability.PROCESS, 60)
        await stage.ledger.create(new)
    await stage.find_orphans()
    await stage.find_orphans()
    with stage.runs.room(fresh(), Priority.INTERACTIVE):
        assert stage.runs.table.count == 4
    last = streams[-1]
    stage.runs.readers.begin(last)
    await stage.later(0)
    assert stage.runs.table.count == 4


async def test_a_paused_stream_can_be_cancelled(stage: Audience) -> None:
    await stage.start(A, PAUSE)
    await stage.later(30)
    await stage.runs.cancel(A)
    assert isinstance((await stage.frames(A))[-1], StreamEnd)
    stage.runs.readers.begin(A)
    await stage.later(0)
    assert stage.runs.table.count == 0


async def test_an_origin_takes_over_what_may_pause_when_it_is_read_there(stage: Audience) -> None:
    await stage.start(A, PAUSE)
    await stage.start(B)
    there = Audience(stage.ledger)
    await there.ready(there.slots[0])
    there.runs.readers.begin(A)
    there.runs.readers.begin(B)
    await there.later(0)
    assert [type(order) for order in there.orders] == [StartRun]
    assert (await stage.ledger.info(A)).epoch == 2
    # Taken over once, although both are read: two origins would take it from each other.
    stage.runs.readers.begin(A)
    await stage.later(0)
    await stage.step(stage.slots[0], stage.slots[0].sent[0][0], 0, "late")
    await stage.later(0)
    await there.later(0)
    assert (await stage.ledger.info(A)).epoch == 2


async def test_a_worker_is_told_who_gives_way(stage: Audience) -> None:
    await stage.create(A)
    await stage.runs.start((A, RECIPE), read=False)
    assert stage.orders[-1] == SetUnread(unread=True)
    stage.runs.readers.begin(A)
    await stage.later(0)
    assert stage.orders[-1] == SetUnread(unread=False)
    stage.runs.readers.end(A)
    await stage.later(UNREAD_GRACE_S / 2)
    await stage.later(UNREAD_GRACE_S / 2)
    assert stage.orders[-1] == SetUnread(unread=False), "its reader may be about to come back"
    await stage.later(UNREAD_GRACE_S / 2)
    assert stage.orders[-1] == SetUnread(unread=True)


# ---- room ----


async def test_less_urgent_streams_leave_room_for_more_urgent_ones(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 0)
    slot, metrics = Slot(0), Metrics()
    runs = Runs(ledger, 16, host_of([slot], metrics), metrics)
    slot.ready = READY
    await runs.worker_ready(slot, READY)
    with runs.room(fresh(12), Priority.BATCH):
        with pytest.raises(Overloaded), runs.room(fresh(), Priority.BATCH):
            pass
        with runs.room(fresh(2), Priority.STANDARD):
            with pytest.raises(Overloaded), runs.room(fresh(), Priority.STANDARD):
                pass
            both = runs.room(fresh(2), Priority.INTERACTIVE), pytest.raises(Overloaded)
            with both[0], both[1], runs.room(fresh(), Priority.INTERACTIVE):
                pass
    with (
        runs.room(fresh(16), Priority.INTERACTIVE),
        pytest.raises(Overloaded),
        runs.room(fresh(), Priority.BATCH),
    ):
        pass
    await ledger.close()


async def test_those_who_are_refused_are_told_to_come_back_at_different_times(
    stage: Audience,
) -> None:
    waits = set[int]()
    with stage.runs.room(fresh(4), Priority.INTERACTIVE):
        for _ in range(100):
            with pytest.raises(Overloaded) as refused, stage.runs.room(fresh()):
                pass
            wait_ms = error_frame(refused.value).retry_after_ms
            assert wait_ms is not None
            waits.add(wait_ms)
    assert min(waits) >= 1_000 and max(waits) <= 5_000
    assert len(waits) > 50
