"""Text for a running stream: taken exactly once, whatever happens to workers, or refused."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.ledger.errors import Conflict, Overloaded, Unavailable
from tailrace.ledger.frame import FinishReason, StreamEnd, Token, encode, error_frame
from tailrace.ledger.interface import Append, Record
from tailrace.ledger.record_extra import IdSpan, RecordExtra
from tailrace.origin.core.states import StreamEvent
from tailrace.origin.core.stream import MAX_PENDING_STEERS
from tailrace.origin.workers.worker_frame import Emission, StartRun, Steer, Step
from tests.origin.stage import RECIPE, A, Slot, Stage

pytestmark = pytest.mark.anyio

IDS = (7, 8)


def steering(stage: Stage, ids: tuple[int, ...] = IDS) -> asyncio.Task[None]:
    return asyncio.create_task(stage.runs.steer(A, ids))


async def takes(
    stage: Stage, slot: Slot, index: int, orders: int = 1, ids: tuple[int, ...] = IDS
) -> None:
    """Have the worker take orders of `ids` up, in one emission."""
    frame = encode(Token(" and", index))
    spans = tuple(IdSpan(at * len(ids), len(ids)) for at in range(orders))
    emission = Emission(slot.last[0], index, ids * orders, spans, frame)
    await stage.runs.worker_step(slot, Step.of((emission,)).cut())


async def begun(stage: Stage) -> Slot:
    slot, _ = await stage.running(A)
    await stage.step(slot, slot.last[0], 0, "a")
    return slot


async def test_it_is_answered_when_it_is_durable(stage: Stage) -> None:
    slot = await begun(stage)
    asked = steering(stage)
    await asyncio.sleep(0)
    run, order = slot.last
    assert order == Steer(IDS)
    await stage.step(slot, run, 1, "b")  # a step that does not have it yet
    assert not asked.done()
    await takes(stage, slot, 2)
    await asked
    assert await stage.frames(A) == [Token("a", 0), Token("b", 1), Token(" and", 2)]


async def test_what_no_worker_has_taken_is_sent_to_the_next(stage: Stage) -> None:
    one = await begun(stage)
    first, second = steering(stage), steering(stage, (9,))
    await asyncio.sleep(0)
    await takes(stage, one, 1)
    await first
    await stage.lost(one)
    two = stage.slots[1]
    await stage.ready(two)
    [(_, run), (_, again)] = two.sent
    assert isinstance(run, StartRun)
    assert run.generated_ids == (100, *IDS)
    assert run.steered == (IdSpan(1, len(IDS)),)
    assert again == Steer((9,))
    assert not second.done()
    await takes(stage, two, 2, ids=(9,))
    await second


async def test_one_that_waits_for_a_worker_is_sent_behind_its_order_to_run(stage: Stage) -> None:
    await stage.start(A)
    asked = steering(stage)
    await asyncio.sleep(0)
    slot = stage.slots[0]
    await stage.ready(slot)
    assert [type(order) for _, order in slot.sent] == [StartRun, Steer]
    await takes(stage, slot, 0)
    await asked


async def test_one_that_was_stored_before_anybody_heard_of_it_is_not_sent_again(
    stage: Stage,
) -> None:
    one = await begun(stage)
    asked = steering(stage)
    await asyncio.sleep(0)
    # The answer to this append is lost with the worker.
    extra = RecordExtra(steered=(IdSpan(0, len(IDS)),)).pack()
    record = Record(encode(Token(" and", 1)), IDS, extra)
    await stage.ledger.append([Append(A, 1, 1, record)])
    await stage.lost(one)
    await stage.ready(stage.slots[1])
    await asked
    assert [type(order) for _, order in stage.slots[1].sent] == [StartRun]


async def test_those_of_an_origin_that_is_gone_are_not_counted_as_ours(stage: Stage) -> None:
    one = await begun(stage)
    asked = steering(stage)
    await asyncio.sleep(0)
    await takes(stage, one, 1)
    await asked
    stage.runs.table.drop(stage.runs.table.by_id[A], StreamEvent.TAKEN, stage.clock_s)
    await stage.runs.restore([A])  # as another process would
    again = steering(stage)
    await asyncio.sleep(0)
    assert not again.done()
    assert one.last[1] == Steer(IDS)
    await takes(stage, one, 2)
    await again


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_an_end_that_comes_first_is_said(stage: Stage, reason: FinishReason) -> None:
    slot = await begun(stage)
    asked = steering(stage)
    await asyncio.sleep(0)
    end = encode(StreamEnd(1, reason, 1, 2))
    await stage.runs.worker_step(slot, Step.of((Emission(slot.last[0], 1, (), (), end),)).cut())
    with pytest.raises(Conflict, match="ended"):
        await asked


async def test_a_cancel_that_comes_first_is_said(stage: Stage) -> None:
    await begun(stage)
    asked = steering(stage)
    await asyncio.sleep(0)
    await stage.runs.cancel(A)
    with pytest.raises(Conflict, match="cancelled"):
        await stage.runs.steer(A, IDS)
    await stage.lost(stage.slots[0])
    await stage.ready(stage.slots[1])
    with pytest.raises(Conflict, match="cancelled"):
        await asked


async def test_no_more_wait_than_may(stage: Stage) -> None:
    slot = await begun(stage)
    waiting = [steering(stage) for _ in range(MAX_PENDING_STEERS)]
    await asyncio.sleep(0)
    waits = set()
    for _ in range(20):
        with pytest.raises(Overloaded) as refused:
            await stage.runs.steer(A, IDS)
        waits.add(error_frame(refused.value).retry_after_ms)
    assert None not in waits
    assert len(waits) > 1, "all would come back at once"
    await takes(stage, slot, 1, orders=MAX_PENDING_STEERS)
    await asyncio.gather(*waiting)


async def test_a_stream_that_is_not_generated_here_is_not_taken(stage: Stage) -> None:
    await stage.create(A)
    waits = set()
    for _ in range(20):
        with pytest.raises(Unavailable, match="another origin") as refused:
            await stage.runs.steer(A, IDS)
        waits.add(error_frame(refused.value).retry_after_ms)
    assert None not in waits
    assert len(waits) > 1, "all would come back at once"


async def test_a_stream_that_has_ended_is_not_steered(stage: Stage) -> None:
    slot = await begun(stage)
    await stage.step(slot, slot.last[0], 1, None)
    with pytest.raises(Conflict, match="has ended"):
        await stage.runs.steer(A, IDS)


async def test_a_worker_that_claims_more_than_it_was_sent_confirms_nothing_else(
    stage: Stage,
) -> None:
    slot = await begun(stage)
    await takes(stage, slot, 1, orders=5)
    assert RECIPE.max_tokens > len(IDS)
    assert stage.runs.table.count == 1


async def test_an_order_that_is_cut_for_want_of_room_is_not_answered_as_taken(stage: Stage) -> None:
    slot = await begun(stage)
    asked = steering(stage)
    await asyncio.sleep(0)
    await takes(stage, slot, 1, ids=IDS[:1])
    await asyncio.sleep(0)
    assert not asked.done()
    await stage.step(slot, slot.last[0], 2, None)
    with pytest.raises(Conflict, match="ended"):
        await asked
