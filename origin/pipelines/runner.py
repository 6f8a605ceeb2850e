"""Runs the stages of one stream: each in a task of its own, with bounded queues between them.

Streams do not wait for each other, and the order of items within a stream is kept. If the stream is
read slowly, its queues fill up, and each stage waits for the next one.

If a required stage fails, the stream ends with a message that names the stage. An optional stage
that fails or takes too long is skipped from that item on, and one can be switched off and on by a
client; a Notice in the stream says so, with the number of the item (`switches`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import FinishReason
from tailrace.ledger.process.tasks import background
from tailrace.origin.pipelines.order_pipe import StageLost
from tailrace.origin.pipelines.queue import Barrier, ItemQueue
from tailrace.origin.pipelines.stage import AnyStage, Item, Items, Prompt
from tailrace.origin.pipelines.switches import Change, Switches
from tailrace.origin.producer import Data, End, Output, Remark, RunFate, TimedStage

MAX_REASON_CHARS = 200
"""Maximum number of characters of the reason in a Notice or in the message of a stream's end."""
STAGE_SKIPPED = "stage_skipped"
"""Code of the Notice that an optional stage has failed, and is skipped from an item on."""
STAGE_SWITCHED = "stage_switched"
"""Code of the Notice that a client has switched a stage on or off."""

log = structlog.get_logger("pipeline")


@dataclass(slots=True)
class RunningStage:
    """A stage of one stream.

    `make` returns a stage object whose first item has the given number. `limit_s` is the time limit
    for each item, None if there is none. `time` counts the time of the stage. `made` has all
    objects that were made, and `stage` is the one in use, None while the stage is off.
    """

    name: str
    make: Callable[[int], AnyStage]
    optional: bool = False
    limit_s: float | None = None
    time: TimedStage = field(default_factory=lambda: TimedStage(""))
    made: list[AnyStage] = field(default_factory=list)
    stage: AnyStage | None = None

    def begin(self, item: int) -> None:
        """Make a stage object, which gets the items from number `item` on."""
        self.stage = self.make(item)
        self.made.append(self.stage)

    def close(self, has_ended: bool) -> None:
        """Close the stage object in use, if any; see `Stage.close`."""
        if self.stage is not None:
            self.stage.close(has_ended)
            self.stage = None


async def outputs(
    stages: Sequence[RunningStage],
    prompt: Prompt,
    switches: Switches,
    fate: RunFate,
    data: AsyncIterable[bytes] | None = None,
) -> AsyncGenerator[Output, None]:
    """Yield the outputs of the last stage; the last of them is an End.

    Args:
        stages: the stages in their order.
        prompt: the input of the first stage.
        switches: decides when optional stages are switched.
        fate: tells if the stream has ended, in case the generator is closed early.
        data: the bytes of the stream's input, which the first stage gets after the prompt. An error
            that it raises ends the stream as failed.

    Raises:
        StageLost: The process of a stage has ended. The stages must run again.
    """
    queues = [ItemQueue() for _ in range(len(stages) + 1)]
    works = [
        _StageRun(each, queues[at], queues[at + 1], switches).run(queues[-1])
        for at, each in enumerate(stages)
    ]
    works.append(_feed(queues[0], prompt, data))
    end: End | None = None
    try:
        async with background(works):
            while end is None:
                item = await queues[-1].get()
                if isinstance(item, Barrier):
                    item.arrived.set()
                    continue
                if isinstance(item, Prompt):
                    message = f"the stage {stages[-1].name} gave a prompt, and no model follows it"
                    item = End(FinishReason.FAILED, message=message)
                if isinstance(item, End):
                    end = item
                else:
                    yield item
    finally:
        for each in stages:
            each.close(end is not None or fate.is_over)
    yield end


async def _feed(first: ItemQueue, prompt: Prompt, data: AsyncIterable[bytes] | None) -> None:
    """Put the prompt and the bytes of the input into the queue of the first stage."""
    await first.put(prompt)
    end = End()
    if data is not None:
        try:
            async for piece in data:
                await first.put(Data(piece))
        except TailraceError as error:
            message = f"the input failed: {error.message}"
            end = End(FinishReason.FAILED, message=message, retryable=error.retryable)
    await first.put(end)


class _StageRun:
    """Runs one stage of a stream: takes items from `source` and puts the results into `sink`."""

    def __init__(
        self, running: RunningStage, source: ItemQueue, sink: ItemQueue, switches: Switches
    ) -> None:
        self._running = running
        self._source = source
        self._sink = sink
        self._switches = switches
        self._count = 0  # items that were taken

    async def run(self, last: ItemQueue) -> None:
        """Run the stage; the reader of `last`, the last queue, gets an error that it raises."""
        try:
            await self._process_all()
        except Exception as error:  # noqa: BLE001  (raised again by the reader of the queue)
            last.fail(error)

    async def _process_all(self) -> None:
        """Process items until the stage returns an End or fails, or the input ends.

        Raises:
            StageLost: The process of the stage has ended, or the stage failed at a repeated item.
        """
        running = self._running
        if self._switches.is_on_first(running.name):
            running.begin(0)
        has_ended = False
        while not has_ended:
            item = await self._source.get()
            if isinstance(item, Barrier):
                await self._sink.put(item)
                continue
            if running.optional:
                await self._switch()
            if running.stage is None:
                await self._sink.put(item)
                has_ended = isinstance(item, End)
            else:
                has_ended = await self._process(running.stage, item)
            self._count += 1

    async def _process(self, stage: AnyStage, item: Item) -> bool:
        """Pass on the stage's items for one item; return True if the stream ends with them."""
        timed = self._running.time
        timed.start(time.perf_counter())
        try:
            if not isinstance(item, End):
                return await self._send(stage.process(item))
            if not await self._send(stage.finish(item)):
                await self._sink.put(item)
            return True
        except StageLost:
            raise
        except Exception as error:
            timed.stop(time.perf_counter())
            reason = _reason(error, self._running.limit_s)
            if not self._running.optional:
                await self._sink.put(self._failed(error, reason))
                return True
            barrier = Barrier()
            await self._sink.put(barrier)
            await barrier.arrived.wait()
            name = self._running.name
            if not await self._switches.may_skip(name):
                message = (
                    f"the stage {name} has failed at an item that it processed before: {reason}"
                )
                raise StageLost(message) from error
            log.warning("stage.skipped", stage=name, error=reason)
            await self._apply(self._switches.failed(name, self._count, reason))
            await self._sink.put(item)
            return isinstance(item, End)
        finally:
            timed.stop(time.perf_counter())
            timed.items += 1

    async def _switch(self) -> None:
        """Carry out the changes of the stage before it processes the next item."""
        while change := self._switches.due(self._running.name, self._count):
            await self._apply(change)

    async def _apply(self, change: Change) -> None:
        """Store a change, pass on what the stage holds and a notice, and switch the stage."""
        await self._switches.carry_out(change)
        running, held = self._running, list[Item]()
        if running.stage is not None:
            held += running.stage.held()
            running.close(has_ended=True)
        if change.on:
            # Nothing else may run before: other stages must see that this one may repeat its log.
            running.begin(self._count)
        for item in (*held, _notice(change)):
            await self._sink.put(item)

    async def _put(self, item: Item) -> None:
        """Pass on one item, as soon as there is room."""
        if self._sink.is_full:
            timed = self._running.time
            timed.stop(time.perf_counter())
            await self._sink.put(item)
            timed.start(time.perf_counter())
        else:
            await self._sink.put(item)

    async def _send(self, items: Items) -> bool:
        """Pass on items of the stage; return True if one of them is an End.

        The items of an optional stage are passed on only after it has made all of them. So if it
        fails, none of them was passed on.
        """
        if isinstance(items, AsyncIterable):
            if not self._running.optional:
                return await self._send_as_they_come(items)
            async with asyncio.timeout(self._running.limit_s):
                items = [item async for item in items]
        for item in list(items) if self._running.optional else items:
            await self._put(item)
            if isinstance(item, End):
                return True
        return False

    async def _send_as_they_come(self, items: AsyncIterable[Item]) -> bool:
        iterator = aiter(items)
        try:
            while True:
                try:
                    # The limit is for the stage's own time, not for waiting until there is room.
                    async with asyncio.timeout(self._running.limit_s):
                        item = await anext(iterator)
                except StopAsyncIteration:
                    return False
                await self._put(item)
                if isinstance(item, End):
                    return True
        finally:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()

    def _failed(self, error: Exception, reason: str) -> End:
        log.error("stage.failed", stage=self._running.name, exc_info=error)
        retryable = isinstance(error, TailraceError) and error.retryable
        message = f"the stage {self._running.name} failed: {reason}"
        return End(FinishReason.FAILED, message=message, retryable=retryable)


def _notice(change: Change) -> Remark:
    """Return the notice about a change."""
    if change.reason:
        message = f"{change.stage} is skipped from item {change.item} on: {change.reason}"
        return Remark(STAGE_SKIPPED, message)
    state = "on" if change.on else "off"
    return Remark(STAGE_SWITCHED, f"{change.stage} is {state} from item {change.item} on")


def _reason(error: Exception, limit_s: float | None) -> str:
    if isinstance(error, TimeoutError):
        return f"it took more than {limit_s:g} s for an item" if limit_s else "it took too long"
    text = error.message if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"
    return text[:MAX_REASON_CHARS]
