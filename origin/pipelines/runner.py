"""Runs the stages of one stream: each in a task of its own, with bounded queues between them.

Streams do not wait for each other, and the order of items within a stream is kept. If the stream is
read slowly, its queues fill up, and each stage waits for the next one.

If a required stage fails, the stream ends with a message that names the stage. An optional stage
that fails or takes too long is skipped from that item on, and a Notice in the stream says so, with
the number of the item. A worker that continues the stream later skips the stage at the same item,
whether it fails again or not: otherwise its frames would differ from those in the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import FinishReason
from tailrace.ledger.process.tasks import background
from tailrace.origin.generations.stream_log import STAGE_SKIPPED, skip_message
from tailrace.origin.pipelines.order_pipe import StageProcessLost
from tailrace.origin.pipelines.queue import ItemQueue
from tailrace.origin.pipelines.stage import AnyStage, Item, Items, Prompt
from tailrace.origin.producer import Data, End, Output, Remark, RunFate, TimedStage

MAX_REASON_CHARS = 200
"""Maximum number of characters of the reason in a Notice or in the message of a stream's end."""

log = structlog.get_logger("pipeline")


@dataclass(frozen=True, slots=True)
class RunningStage:
    """A stage of one stream; `limit_s` is its time limit for each item, None if it has none."""

    name: str
    stage: AnyStage
    optional: bool = False
    limit_s: float | None = None
    time: TimedStage = field(default_factory=lambda: TimedStage(""))
    """Counts the time of the stage."""


async def outputs(
    stages: Sequence[RunningStage],
    prompt: Prompt,
    skipped: Mapping[str, int],
    fate: RunFate,
    data: AsyncIterable[bytes] | None = None,
) -> AsyncGenerator[Output, None]:
    """Yield the outputs of the last stage; the last of them is an End.

    Args:
        stages: the stages in their order.
        prompt: the input of the first stage.
        skipped: the number of the first item that a stage skips, by the name of the stage.
        fate: tells if the stream has ended, in case the generator is closed early.
        data: the bytes of the stream's input, which the first stage gets after the prompt. An error
            that it raises ends the stream as failed.

    Raises:
        StageProcessLost: The process of a stage has ended. The stages must run again.
    """
    queues = [ItemQueue() for _ in range(len(stages) + 1)]
    works = [
        _StageRun(each, queues[at], queues[at + 1], skipped.get(each.name)).run(queues[-1])
        for at, each in enumerate(stages)
    ]
    works.append(_feed(queues[0], prompt, data))
    end: End | None = None
    try:
        async with background(works):
            while end is None:
                item = await queues[-1].get()
                if isinstance(item, Prompt):
                    message = f"the stage {stages[-1].name} gave a prompt, and no model follows it"
                    item = End(FinishReason.FAILED, message=message)
                if isinstance(item, End):
                    end = item
                else:
                    yield item
    finally:
        for each in stages:
            each.stage.close(end is not None or fate.is_over)
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
        self, running: RunningStage, source: ItemQueue, sink: ItemQueue, skip_at: int | None
    ) -> None:
        self._running = running
        self._stage = running.stage
        self._source = source
        self._sink = sink
        self._skip_at = skip_at
        self._count = 0  # items that the stage has processed

    async def run(self, last: ItemQueue) -> None:
        """Run the stage; the reader of `last`, the last queue, gets an error that it raises."""
        try:
            await self._process_all()
        except Exception as error:  # noqa: BLE001  (raised again by the reader of the queue)
            last.fail(error)

    async def _process_all(self) -> None:
        """Process items until the stage returns an End, fails or is skipped, or the input ends.

        Raises:
            StageProcessLost: The process of the stage has ended.
        """
        timed = self._running.time
        while True:
            item = await self._source.get()
            if self._count == self._skip_at:
                await self._skip(item, "it was skipped before")
                return
            timed.start(time.perf_counter())
            try:
                ended = await self._process(item)
            except StageProcessLost:
                raise
            except Exception as error:  # noqa: BLE001  (a stage may raise anything)
                timed.stop(time.perf_counter())
                reason = _reason(error, self._running.limit_s)
                if self._running.optional:
                    log.warning("stage.skipped", stage=self._running.name, error=reason)
                    await self._skip(item, reason)
                else:
                    await self._sink.put(self._failed(error, reason))
                return
            finally:
                timed.stop(time.perf_counter())
                timed.items += 1
            if ended:
                return
            self._count += 1

    async def _process(self, item: Item) -> bool:
        """Pass on the stage's items for one item; return True if the stream ends with them."""
        if not isinstance(item, End):
            return await self._send(self._stage.process(item))
        if not await self._send(self._stage.finish(item)):
            await self._sink.put(item)
        return True

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

    async def _skip(self, item: Item, reason: str) -> None:
        """Pass on what the stage holds, a notice, the item itself and the rest of the input."""
        for held in self._stage.held():
            await self._sink.put(held)
        message = skip_message(self._running.name, self._count, reason)
        await self._sink.put(Remark(STAGE_SKIPPED, message))
        await self._sink.put(item)
        while not isinstance(item, End):
            item = await self._source.get()
            await self._sink.put(item)

    def _failed(self, error: Exception, reason: str) -> End:
        log.error("stage.failed", stage=self._running.name, exc_info=error)
        retryable = isinstance(error, TailraceError) and error.retryable
        message = f"the stage {self._running.name} failed: {reason}"
        return End(FinishReason.FAILED, message=message, retryable=retryable)


def _reason(error: Exception, limit_s: float | None) -> str:
    if isinstance(error, TimeoutError):
        return f"it took more than {limit_s:g} s for an item" if limit_s else "it took too long"
    text = error.message if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"
    return text[:MAX_REASON_CHARS]
