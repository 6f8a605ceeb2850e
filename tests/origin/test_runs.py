"""What becomes of streams as workers come, die and make tokens."""

from __future__ import annotations

import asyncio

import pytest

from ledger.errors import Overloaded, Unavailable
from ledger.frame import Durability, FinishReason, StreamEnd, Token
from ledger.interface import NewStream
from origin.runs import MAX_DEATHS
from origin.worker_frame import Halt, LoadProgress, Ready, Run
from tests.origin.stage import READY, RECIPE, A, B, C, Stage

pytestmark = pytest.mark.anyio


async def test_a_stream_waits_for_a_worker_and_then_runs(stage: Stage) -> None:
    await stage.start(A)
    one = stage.slots[0]
    assert one.sent == []
    await stage.ready(one)
    run, order = one.last
    assert order == RECIPE.run([])
    await stage.step(one, run, 0, "a")
    await stage.step(one, run, 1, None)
    assert await stage.frames(A) == [Token("a", 0), StreamEnd(1, FinishReason.LENGTH, 1, 2)]
    assert stage.runs.count == 0


async def test_streams_go_to_the_worker_with_the_fewest(stage: Stage) -> None:
    for slot in stage.slots:
        await stage.ready(slot)
    for stream in (A, B, C):
        await stage.start(stream)
    assert sorted(len(slot.sent) for slot in stage.slots) == [1, 2]


async def test_another_worker_goes_on_from_what_the_ledger_holds(stage: Stage) -> None:
    one, two = stage.slots
    await stage.ready(one)
    await stage.start(A)
    run, _ = one.last
    await stage.step(one, run, 0, "é")
    await stage.step(one, run, 1, "b")
    await stage.ready(two)
    await stage.lost(one)
    _, order = two.last
    assert isinstance(order, Run)
    assert (order.generated_ids, order.sent_bytes, order.next_index) == ((100, 101), 3, 2)
    assert (await stage.ledger.info(A)).epoch == 2


async def test_a_worker_that_dies_while_it_is_given_a_stream_is_not_sent_it(stage: Stage) -> None:
    one, two = stage.slots
    await stage.ready(one)
    await stage.ledger.create(NewStream(A, RECIPE.model_dump_json(), Durability.PROCESS, 60))
    giving = asyncio.create_task(stage.runs.restore([A]))
    await asyncio.sleep(0)  # it waits for the ledger now
    assert not giving.done()
    await stage.lost(one)
    await stage.ready(one)  # the slot's next worker, which has its own order
    await giving
    assert len(one.sent) == 1
    assert two.sent == []
    assert one.last[0] == stage.runs._streams[A].run


async def test_a_lost_workers_late_frames_are_not_stored(stage: Stage) -> None:
    one, two = stage.slots
    await stage.ready(one)
    await stage.start(A)
    run, _ = one.last
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
        await stage.lost(one)
    [end] = await stage.frames(A)
    assert isinstance(end, StreamEnd)
    assert end.finish_reason is FinishReason.FAILED
    assert end.message == f"{MAX_DEATHS} workers died on this stream"
    await stage.ready(one)
    assert stage.runs.count == 0


async def test_the_neighbours_of_a_stream_that_kills_workers_are_not_blamed(stage: Stage) -> None:
    one = stage.slots[0]
    await stage.ready(one)
    await stage.start(A)
    await stage.start(B)  # the one that kills
    await stage.lost(one)  # either may have been the cause
    for life in range(MAX_DEATHS):
        before = len(one.sent)
        await stage.ready(one)
        assert len(one.sent) == before + 1  # A alone
        await stage.step(one, one.last[0], life, "a")
        assert len(one.sent) == before + 2  # A is proven, and B is tried beside it
        await stage.lost(one)
    assert await stage.frames(A) == [Token("a", index) for index in range(MAX_DEATHS)]
    [end] = await stage.frames(B)
    assert isinstance(end, StreamEnd)
    assert end.finish_reason is FinishReason.FAILED
    await stage.ready(one)
    assert stage.runs.count == 1


async def test_suspects_are_tried_one_after_the_other(stage: Stage) -> None:
    one, two = stage.slots
    await stage.ready(one)
    for stream in (A, B, C):
        await stage.start(stream)
    await stage.lost(one)
    await stage.ready(two)
    for stream in (A, B, C):
        [run] = [run for run, _ in two.sent[-1:]]
        assert stage.runs._streams[stream].run == run
        await stage.step(two, run, 0, "a")
    assert len(two.sent) == 3


async def test_a_stream_that_makes_tokens_between_deaths_goes_on(stage: Stage) -> None:
    one = stage.slots[0]
    await stage.start(A)
    for index in range(MAX_DEATHS + 2):
        await stage.ready(one)
        await stage.step(one, one.last[0], index, "a")
        await stage.lost(one)
    assert len(await stage.frames(A)) == MAX_DEATHS + 2
    assert stage.runs.count == 1


async def test_a_running_stream_is_cancelled_by_its_worker(stage: Stage) -> None:
    one = stage.slots[0]
    await stage.ready(one)
    await stage.start(A)
    run, _ = one.last
    await stage.runs.cancel(A)
    assert one.last == (run, Halt())


async def test_a_waiting_stream_is_cancelled_at_once(stage: Stage) -> None:
    await stage.start(A)
    await stage.runs.cancel(A)
    [end] = await stage.frames(A)
    assert isinstance(end, StreamEnd)
    assert (end.finish_reason, end.prompt_tokens) == (FinishReason.CANCELLED, 2)


async def test_a_cancel_is_not_forgotten_when_the_worker_dies_before_it_obeys(
    stage: Stage,
) -> None:
    one, two = stage.slots
    await stage.ready(one)
    await stage.start(A)
    await stage.step(one, one.last[0], 0, "a")
    await stage.runs.cancel(A)
    await stage.lost(one)
    await stage.ready(two)
    assert two.sent == []
    [_, end] = await stage.frames(A)
    assert isinstance(end, StreamEnd)
    assert (end.finish_reason, end.total_tokens) == (FinishReason.CANCELLED, 1)


async def test_cancelling_what_is_over_or_unknown_does_nothing(stage: Stage) -> None:
    await stage.runs.cancel(A)
    assert stage.runs.count == 0


async def test_another_engine_does_not_go_on_with_tokens_it_would_not_have_made(
    stage: Stage,
) -> None:
    one, two = stage.slots
    await stage.ready(one)
    await stage.start(A)
    await stage.step(one, one.last[0], 0, "a")
    await stage.lost(one)
    other = Ready("demo", "another fingerprint", "cpu", context=64, vocab=300, load_ms=1)
    await stage.ready(two, other)
    [_, end] = await stage.frames(A)
    assert isinstance(end, StreamEnd)
    assert end.finish_reason is FinishReason.ORIGIN_LOST
    assert end.message is not None
    assert "engine changed" in end.message


async def test_an_unfinished_stream_of_a_dead_origin_is_taken_over(stage: Stage) -> None:
    await stage.ledger.create(NewStream(A, RECIPE.model_dump_json(), Durability.PROCESS, 60))
    await stage.runs.restore([A])
    await stage.ready(stage.slots[0])
    assert (await stage.ledger.info(A)).epoch == 2
    assert len(stage.slots[0].sent) == 1


async def test_nothing_is_admitted_before_the_first_model_is_loaded(stage: Stage) -> None:
    with pytest.raises(Unavailable) as error:
        stage.runs.require_room()
    assert (error.value.code, error.value.retryable) == ("loading", True)
    assert error.value.retry_after_ms is not None
    await stage.ready(stage.slots[0])
    assert stage.runs.require_room() == READY
    await stage.lost(stage.slots[0])
    assert stage.runs.require_room() == READY  # a restart is a pause, not a refusal


async def test_no_more_streams_than_the_limit_are_admitted(stage: Stage) -> None:
    await stage.ready(stage.slots[0])
    for n in range(4):
        stage.runs.require_room()
        await stage.start(bytes([n]) * 16)
    with pytest.raises(Overloaded, match="the limit is 4"):
        stage.runs.require_room()


async def test_readiness_tells_what_is_awaited(stage: Stage) -> None:
    reasons = [stage.runs.reasons]
    stage.runs.worker_loading(stage.slots[0], LoadProgress("unpack", 2, 6))
    reasons.append(stage.runs.reasons)
    await stage.ready(stage.slots[0])
    reasons.append(stage.runs.reasons)
    await stage.lost(stage.slots[0])
    reasons.append(stage.runs.reasons)
    assert reasons == [
        ("starting a worker",),
        ("loading: unpack 2/6",),
        (),
        ("starting a worker; 1 died before, see the origin's log",),
    ]
    assert stage.changes == 3


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
