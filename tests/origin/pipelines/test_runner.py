"""The stages of a stream: order, back-pressure, failures, and stages that are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from time import perf_counter

import pytest

from tailrace.ledger.frame import FinishReason
from tailrace.origin.pipelines.queue import MAX_QUEUED_BYTES, MAX_QUEUED_ITEMS
from tailrace.origin.pipelines.runner import STAGE_SKIPPED, STAGE_SWITCHED, outputs
from tailrace.origin.pipelines.stage import Item, Items, Prompt, Stage, StageOptions
from tailrace.origin.producer import End, Remark, RunFate, Text
from tests.origin.pipelines.staged import (
    Hangs,
    PassOn,
    Shout,
    Words,
    run,
    running,
    switches,
    unswitched,
)

pytestmark = pytest.mark.anyio


async def test_items_pass_through_all_stages_in_order() -> None:
    made = await run([running(Words), running(Shout), running(Shout, "again")], "one two three")
    assert made == [Text("ONE "), Text("TWO "), Text("THREE "), End()]


async def test_a_required_stage_that_fails_ends_the_stream_by_name() -> None:
    *before, end = await run([running(Words), running(Shout)], "one two fail three")
    assert before == [Text("ONE ")]
    assert end == End(
        FinishReason.FAILED, message="the stage shout failed: ValueError: a word that fails"
    )


async def test_an_optional_stage_that_fails_is_skipped_and_holds_nothing_back() -> None:
    stages = [running(Words), running(Shout, optional=True), running(PassOn)]
    made = await run(stages, "one two fail three")
    message = "shout is skipped from item 2 on: ValueError: a word that fails"
    assert made == [
        Text("ONE "),
        Text("two "),
        Remark(STAGE_SKIPPED, message),
        Text("fail "),
        Text("three "),
        End(),
    ]


class Patient(Shout):
    """A Shout that does not fail."""

    def process(self, item: Item) -> Iterable[Item]:
        """Return the item before this one."""
        ready, self._last = self._last, [item]
        return [Text(one.text.upper()) for one in ready if isinstance(one, Text)]


async def test_a_stage_that_was_skipped_is_skipped_at_the_same_item_again() -> None:
    first = await run([running(Words), running(Shout, optional=True)], "one two fail three")
    again = [running(Words), running(Patient, "shout", optional=True)]
    switched = unswitched(again)
    switched.add_changes(b'["shout", 2, false, 0, "a word that fails"]\n')
    second = await run(again, "one two fail three", switched)
    assert [type(one) for one in second] == [type(one) for one in first]
    assert [one for one in second if isinstance(one, Text)] == [
        one for one in first if isinstance(one, Text)
    ]


def switched(message: str) -> Remark:
    return Remark(STAGE_SWITCHED, message)


async def test_a_stage_is_switched_off_at_its_next_item_and_holds_nothing_back() -> None:
    switching, stored = switches(["words", "shout", "passon"], is_new=[False])
    switching.add_request(b'{"shout": false}')
    stages = [running(Words), running(Shout, optional=True), running(PassOn)]
    made = await run(stages, "one two three", switching)
    off = switched("shout is off from item 1 on")
    assert made == [Text("one "), off, Text("two "), Text("three "), End()]
    assert stored == [b'["shout", 1, false, 1, ""]\n']


async def test_a_stage_that_is_off_first_is_switched_on_with_a_new_object() -> None:
    switching, stored = switches(["words", "shout"], off=["shout"], is_new=[False])
    switching.add_request(b'{"shout": true}')
    shout = running(Shout, optional=True)
    made = await run([running(Words), shout], "one two three", switching)
    on = switched("shout is on from item 1 on")
    assert made == [Text("one "), on, Text("TWO "), Text("THREE "), End()]
    assert stored == [b'["shout", 1, true, 1, ""]\n']


async def test_a_stage_that_has_failed_can_be_switched_on_again() -> None:
    switching, stored = switches(["words", "shout", "asksatthree"])

    class AsksAtThree(PassOn):
        def process(self, item: Item) -> Iterable[Item]:
            if item == Text("three "):
                switching.add_request(b'{"shout": true}')
            return (item,)

    shout = running(Shout, optional=True)
    stages = [running(Words), shout, running(AsksAtThree)]
    prompt = "one fail three " + "more " * 4 * MAX_QUEUED_ITEMS
    made = await run(stages, prompt, switching)
    assert made[:3] == [
        Text("one "),
        Remark(STAGE_SKIPPED, "shout is skipped from item 1 on: ValueError: a word that fails"),
        Text("fail "),
    ]
    [on] = (one for one in made[3:] if isinstance(one, Remark))
    at = made.index(on)
    assert all(one == Text("more ") for one in made[4:at])
    assert all(one == Text("MORE ") for one in made[at + 1 : -1])
    assert len(made) == 3 + 2 + 4 * MAX_QUEUED_ITEMS + 1
    assert len(stored) == 2


async def test_a_required_stage_is_never_switched() -> None:
    switching, stored = switches(["words", "shout"])
    switching.add_request(b'{"shout": false}')
    made = await run([running(Words), running(Shout)], "one two", switching)
    assert (made, stored) == ([Text("ONE "), Text("TWO "), End()], [])


async def test_an_optional_stage_that_is_late_passes_on_none_of_its_items() -> None:
    stages = [running(Words), running(Hangs, optional=True, limit_s=0.05)]
    made = await run(stages, "one hang three")
    message = "hangs is skipped from item 1 on: it took more than 0.05 s for an item"
    expected = [Text("-"), Text("one "), Remark(STAGE_SKIPPED, message)]
    assert made == [*expected, Text("hang "), Text("three "), End()]


async def test_a_required_stage_that_is_late_ends_the_stream() -> None:
    *_, end = await run([running(Words), running(Hangs, limit_s=0.05)], "one hang three")
    assert isinstance(end, End)
    assert end.message == "the stage hangs failed: it took more than 0.05 s for an item"


class Counts(Stage[StageOptions]):
    """Counts what it gives."""

    given = 0

    def process(self, item: Item) -> Iterable[Item]:
        """Yield text without end."""
        size = 1 if isinstance(item, Prompt) and item.text == "small" else MAX_QUEUED_BYTES
        while True:
            yield Text("x" * size)
            self.given += 1


@pytest.mark.parametrize(("prompt", "most"), [("small", 2 * MAX_QUEUED_ITEMS + 3), ("large", 5)])
async def test_a_reader_that_stops_stops_the_stages(prompt: str, most: int) -> None:
    source, last = running(Counts), running(Hangs)
    async with aclosing(
        outputs([source, last], Prompt(prompt), unswitched([source, last]), RunFate())
    ) as made:
        assert await anext(made) == Text("-")
        for _ in range(50):
            await anext(made)
        [stage] = source.made
        assert isinstance(stage, Counts)
        taken = 25  # each text is two outputs of the last stage
        assert taken <= stage.given <= taken + most


async def test_a_prompt_that_no_model_takes_ends_the_stream() -> None:
    made = await run([running(PassOn, "nothing")], "one")
    message = "the stage nothing gave a prompt, and no model follows it"
    assert made == [End(FinishReason.FAILED, message=message)]


async def test_nothing_follows_the_end_of_a_stage() -> None:
    class Ends(PassOn):
        def process(self, item: Item) -> Iterable[Item]:
            return (End(FinishReason.FILTERED), item) if item == Text("two ") else (item,)

    made = await run([running(Words), running(Ends), running(Shout)], "one two three")
    assert made == [Text("ONE "), End(FinishReason.FILTERED)]


async def test_the_time_of_a_stage_is_that_in_which_it_works() -> None:
    class Waits(PassOn):
        def process(self, item: Item) -> Items:
            return self._later(item)

        async def _later(self, item: Item) -> AsyncIterator[Item]:
            if isinstance(item, Text):
                await asyncio.sleep(0.02)
            yield item

    fast, slow = running(Words), running(Waits)
    await run([fast, slow], "word " * 10)
    assert (fast.time.items, slow.time.items) == (2, 11)
    assert slow.time.busy_s >= 0.2
    assert fast.time.busy_s < slow.time.busy_s / 2


async def test_the_time_of_a_stage_has_that_of_the_item_at_work() -> None:
    words, hangs = running(Words), running(Hangs)
    async with aclosing(
        outputs([words, hangs], Prompt("one hang"), unswitched([words, hangs]), RunFate())
    ) as made:
        assert [await anext(made) for _ in range(3)] == [Text("-"), Text("one "), Text("-")]
        begun_s = perf_counter()
        assert hangs.time.items == 1  # the first word
        busy_s = hangs.time.busy_s
        assert hangs.time.so_far_s(begun_s + 60) >= busy_s + 60


async def test_a_stage_that_was_skipped_is_not_busy_afterwards() -> None:
    class Slow(PassOn):
        def process(self, item: Item) -> Items:
            return self._later(item)

        async def _later(self, item: Item) -> AsyncIterator[Item]:
            await asyncio.sleep(0.02)
            yield item

    shout, slow = running(Shout, optional=True), running(Slow)
    await run([running(Words), slow, shout], "fail " + "word " * 10)
    assert slow.time.busy_s >= 0.2
    assert shout.time.busy_s < 0.1


async def test_a_stage_is_not_busy_while_there_is_no_room() -> None:
    class Waits(PassOn):
        def process(self, item: Item) -> Items:
            return self._later(item)

        async def _later(self, item: Item) -> AsyncIterator[Item]:
            await asyncio.sleep(0.002)
            yield item

    fast, slow = running(Words), running(Waits)
    await run([fast, slow], "word " * 4 * MAX_QUEUED_ITEMS)
    assert slow.time.busy_s >= 0.002 * 4 * MAX_QUEUED_ITEMS
    assert fast.time.busy_s < slow.time.busy_s / 4


async def test_a_prompt_that_is_longer_than_a_queue_reaches_the_model() -> None:
    long = "word " * MAX_QUEUED_BYTES
    made = await run([running(PassOn), running(Words)], long)
    assert len(made) == MAX_QUEUED_BYTES + 1
    assert made[-1] == End()


async def test_a_stage_that_fails_to_say_what_it_holds_does_not_hang_the_stream() -> None:
    class Confused(Shout):
        def held(self) -> Iterable[Item]:
            raise LookupError("held by nobody")

    with pytest.raises(LookupError):
        await run([running(Words), running(Confused, optional=True)], "one fail")
