"""A generation is counted once, whatever happens to it and to its readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import Cancel, FinishReason, StreamEnd, encode
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.usage import UsageCounts, UsageQuery
from tailrace.origin.core.frame_tokens import FrameTokens, delivered_tokens
from tailrace.origin.edges.feed import Feed
from tailrace.origin.generations.presence import MAX_REACHED, Readers
from tailrace.origin.workers.worker_frame import Emission, Step, TokenCounts
from tests.ledger.backends import opened_file
from tests.origin.edges.test_feed import Outlet
from tests.origin.edges.test_link import serving
from tests.origin.stage import RECIPE, Slot, Stage, fresh

pytestmark = pytest.mark.anyio

OF_ACME = RECIPE.model_copy(update={"tenant": "acme", "key": "0123456789ab", "priority": "batch"})


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    async with opened_file(tmp_path / "ledger.db") as opened:
        yield opened


@pytest.fixture
async def stage(ledger: SqliteLedger) -> Stage:
    return Stage(ledger)


async def total(stage: Stage) -> UsageCounts:
    return (await stage.ledger.usage(UsageQuery())).total


async def read(
    stage: Stage, stream: bytes, *, start: int = 0, credit: int = 1000
) -> tuple[Feed, Outlet]:
    """Read a stream as a client does."""
    outlet, window = Outlet(), Window.starting(start, credit)
    feed = Feed(outlet, 9, window, stage.ledger, stage.runs.readers)
    info = await stage.ledger.info(stream)
    feed.attach(stream, info.next_index)
    await outlet.has(min(credit, info.next_index - start))
    return feed, outlet


async def finish(stage: Stage, slot: Slot, run: int, index: int, counted: TokenCounts) -> None:
    end = StreamEnd(index, FinishReason.STOP, index, 2)
    emission = Emission(run, index, (), (), encode(end), counted=counted)
    await stage.runs.worker_step(slot, Step.of((emission,)).cut())


async def test_the_row_of_a_stream_says_who_used_what(stage: Stage) -> None:
    [stream] = fresh()
    await stage.ready(stage.slots[0])
    await stage.start(stream, OF_ACME)
    slot, run = stage.slots[0], stage.slots[0].last[0]
    await stage.step(slot, run, 0, "a")
    await finish(stage, slot, run, 1, TokenCounts(cached=1, reasoning=1))
    by = ("tenant", "key", "model", "priority", "finish")
    assert (await stage.ledger.usage(UsageQuery(by))).rows == [
        (("acme", "0123456789ab", "demo", "batch", "stop"), UsageCounts(1, 2, 1, 1, 1, 0, 1))
    ]


async def test_what_a_reader_at_the_tip_is_sent_is_delivered_with_the_end(stage: Stage) -> None:
    [stream] = fresh()
    slot, run = await stage.running(stream)
    _, outlet = await read(stage, stream)
    for index in range(3):
        await stage.step(slot, run, index, "a")
    await stage.step(slot, run, 3, None)
    assert outlet.done.is_set()
    assert (await total(stage)).unread_tokens == 0
    assert stage.runs.readers.take_reached() == {}, "nothing is left to be stored"


async def test_a_reader_without_credit_has_what_it_was_sent(stage: Stage) -> None:
    [stream] = fresh()
    slot, run = await stage.running(stream)
    feed, _ = await read(stage, stream, credit=2)
    for index in range(4):
        await stage.step(slot, run, index, "a")
    await stage.step(slot, run, 4, None)
    assert (await total(stage)).delivered_tokens == 2
    feed.grant(3, None)
    feed.detach()
    await stage.runs.store_deliveries()
    assert (await total(stage)).delivered_tokens == 3


async def test_of_a_reader_that_has_left_only_what_it_got_is_delivered(stage: Stage) -> None:
    [stream] = fresh()
    slot, run = await stage.running(stream)
    feed, _ = await read(stage, stream)
    await stage.step(slot, run, 0, "a")
    await stage.step(slot, run, 1, "b")
    feed.detach()
    await stage.runs.report_readers()
    for index in range(2, 5):
        await stage.step(slot, run, index, "c")
    await stage.step(slot, run, 5, None)
    assert await total(stage) == UsageCounts(1, 2, 0, 5, 0, 2, 3)


async def test_what_is_read_after_the_end_is_delivered_too(stage: Stage) -> None:
    [stream] = fresh()
    slot, run = await stage.running(stream)
    for index in range(5):
        await stage.step(slot, run, index, "a")
    await stage.step(slot, run, 5, None)
    assert (await total(stage)).delivered_tokens == 0
    for credit, expected in ((2, 2), (1, 2), (100, 5)):
        feed, _ = await read(stage, stream, credit=credit)
        feed.detach()
        await stage.runs.report_readers()
        counts = await total(stage)
        assert (counts.streams, counts.delivered_tokens) == (1, expected)


async def test_what_was_sent_of_a_stream_counts_although_it_is_deleted(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with serving(tmp_path, checkpoint) as house:
        [stream] = fresh()
        await house.start(stream)
        run = house.slot.last[0]
        for index in range(5):
            await house.step(house.slot, run, index, "a")
        await house.step(house.slot, run, 5, None)
        feed, _ = await read(house, stream)
        feed.detach()
        await house.service.cancel(Cancel(stream, forget=True))
        assert (await total(house)).delivered_tokens == 5


async def test_deliveries_are_counted_when_a_stream_that_another_origin_ended_is_deleted(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with serving(tmp_path, checkpoint) as house:
        [stream] = fresh()
        await house.start(stream)
        run, _ = house.slot.last
        for index in range(5):
            await house.step(house.slot, run, index, "a")
        other = Stage(house.ledger)
        await other.runs.cancel(stream)
        assert stream in house.runs.table.by_id, "it has not heard of the end"
        feed, _ = await read(house, stream)
        feed.detach()
        await house.service.cancel(Cancel(stream, forget=True))
        assert (await total(house)).delivered_tokens == 5


async def test_deliveries_are_stored_when_a_second_call_returns(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An origin that stops calls while its regular call may still wait for the ledger."""
    [stream] = fresh()
    slot, run = await stage.running(stream)
    await stage.step(slot, run, 0, "a")
    await stage.step(slot, run, 1, None)
    feed, _ = await read(stage, stream)
    feed.detach()
    asked, answers = asyncio.Event(), asyncio.Event()
    deliver = stage.ledger.deliver

    async def late(tokens: Mapping[bytes, int]) -> None:
        asked.set()
        await answers.wait()
        await deliver(tokens)

    monkeypatch.setattr(stage.ledger, "deliver", late)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.runs.store_deliveries())
        await asked.wait()
        second = tasks.create_task(stage.runs.store_deliveries())
        await asyncio.sleep(0)
        assert not second.done()
        answers.set()
        await second
        assert (await total(stage)).delivered_tokens == 1


async def test_a_stream_that_another_worker_finishes_is_counted_once(stage: Stage) -> None:
    [stream] = fresh()
    one, run = await stage.running(stream)
    feed, _ = await read(stage, stream)
    await stage.step(one, run, 0, "a")
    feed.detach()
    await stage.lost(one)
    other = stage.slots[1]
    await stage.ready(other)
    again = other.last[0]
    await stage.step(one, run, 1, None)  # of the dead worker: ignored
    await stage.step(other, again, 1, "b")
    await stage.step(other, again, 2, None)
    assert await total(stage) == UsageCounts(1, 2, 0, 2, 0, 1, 1)


async def test_a_stream_that_is_cancelled_before_a_worker_has_it_is_counted(stage: Stage) -> None:
    [stream] = fresh()
    await stage.start(stream)
    await stage.runs.cancel(stream)
    assert await total(stage) == UsageCounts(1, 2)


async def test_another_origin_that_takes_a_stream_over_counts_it(
    stage: Stage, ledger: SqliteLedger
) -> None:
    [stream] = fresh()
    slot, run = await stage.running(stream)
    await stage.step(slot, run, 0, "a")
    other = Stage(ledger)
    await other.ready(other.slots[0])
    await other.runs.restore([stream])
    await read(other, stream, start=1)
    again = other.slots[0].last[0]
    await stage.step(slot, run, 1, None)  # fenced
    await other.step(other.slots[0], again, 1, "b")
    await other.step(other.slots[0], again, 2, None)
    counts = await total(stage)
    assert counts == UsageCounts(1, 2, 0, 2, 0, 2, 0), "its reader had the first token already"


async def test_a_reader_of_a_stream_that_runs_elsewhere_is_kept_until_it_ends(
    stage: Stage, ledger: SqliteLedger
) -> None:
    [stream] = fresh()
    slot, run = await stage.running(stream)
    other = Stage(ledger)
    await stage.step(slot, run, 0, "a")
    feed, _ = await read(other, stream)
    feed.detach()
    await other.runs.store_deliveries()
    await stage.step(slot, run, 1, None)
    assert (await total(stage)).delivered_tokens == 0
    await other.runs.store_deliveries()
    assert (await total(stage)).delivered_tokens == 1


# ---- tokens of frames ----


@given(st.lists(st.integers(0, 3), max_size=30))
def test_tokens_before_an_index_are_those_of_the_frames_before_it(counts: list[int]) -> None:
    tokens = FrameTokens()
    for index, count in enumerate(counts):
        tokens.add(index, count)
    for index in range(len(counts) + 1):
        assert tokens.before(index) == sum(counts[:index])


@pytest.mark.parametrize(("reach", "expected"), [(0, 0), (1, 2), (4, 8), (5, 11), (6, 11)])
def test_frames_without_token_ids_count_equally(reach: int, expected: int) -> None:
    assert delivered_tokens(reach, 5, 11, None) == expected


def test_an_empty_stream_is_delivered() -> None:
    assert delivered_tokens(0, 0, 0, None) == 0
    assert delivered_tokens(0, 0, 0, FrameTokens()) == 0


def test_readers_that_have_left_are_kept_for_a_limited_number_of_streams() -> None:
    readers = Readers()
    for number in range(MAX_REACHED + 3):
        readers.leave(number.to_bytes(16, "big"), lambda _: 0, 1)
    reached = readers.take_reached()
    assert len(reached) == MAX_REACHED
    assert min(reached) == (3).to_bytes(16, "big")


def test_the_furthest_of_several_readers_counts() -> None:
    readers, stream = Readers(), bytes(16)
    readers.join(stream, one := lambda released: min(released, 7))
    readers.join(stream, lambda _: 3)
    assert readers.reach(stream, 5) == 5
    readers.leave(stream, one, 4)
    assert readers.reach(stream, 5) == 4
