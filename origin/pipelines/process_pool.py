"""Processes for the stages of kind `cpu`, whose work would block the event loop of their worker.

A stage object stays in one process until its stream ends. If the process dies, its stage objects
are lost: each stream that has one there runs all of its stages again (`StageProcessLost`), on the
same input, and skips the outputs that it has given before.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import structlog

from tailrace.ledger.errors import TailraceError, Unavailable
from tailrace.origin.pipelines.stage import AnyStage, Item, Items, Stage, StageContext, StageOptions
from tailrace.origin.pipelines.stage_orders import (
    LENGTH_BYTES,
    Begin,
    Forget,
    Order,
    Process,
    Reply,
    packed,
)
from tailrace.origin.producer import End

COMMAND = (sys.executable, "-m", "tailrace.origin.pipelines.stage_process")

log = structlog.get_logger("pipeline")


class StageProcessLost(Unavailable):
    """The process of a stage has ended, and its stage objects with it."""


class StageFailed(TailraceError, code="stage_failed"):
    """A stage of kind `cpu` has raised an error, or took too long."""


class StageProcess:
    """One process for stage objects; it is started when one is made, and again if it has ended."""

    def __init__(self) -> None:
        """Begin without a process."""
        self.objects = 0  # number of stage objects in this process
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._keys = itertools.count()
        self._forgetting: set[asyncio.Task[Reply]] = set()

    async def begin(
        self, kind: type[AnyStage], options: StageOptions, context: StageContext
    ) -> tuple[asyncio.subprocess.Process, int]:
        """Make a stage object; return the process that has it, and its key there."""
        async with self._turn:
            if self._process is None or self._process.returncode is not None:
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    *COMMAND, stdin=pipe, stdout=pipe
                )
            process, key = self._process, next(self._keys)
        recipe = context.recipe.model_dump_json()
        order = Begin(key, kind, options, context.name, context.stream, recipe)
        await self.ask(process, order, None)
        return process, key

    def forget(self, process: asyncio.subprocess.Process, key: int, has_ended: bool) -> None:
        """Drop a stage object, unless its process has ended."""
        if process.returncode is None:
            forgetting = asyncio.ensure_future(self._ask(process, Forget(key, has_ended), None))
            self._forgetting.add(forgetting)
            forgetting.add_done_callback(self._forgetting.discard)
            forgetting.add_done_callback(_ignore)

    async def ask(
        self, process: asyncio.subprocess.Process, order: Order, limit_s: float | None
    ) -> Reply:
        """Send an order, and return its reply.

        Raises:
            StageProcessLost: The process has ended.
            StageFailed: The stage failed, or took longer than `limit_s` seconds. The process is
                then killed.
        """
        asked = asyncio.ensure_future(self._ask(process, order, limit_s))
        try:
            # Shielded, because the reply must be read even if the stream of the order has ended.
            reply = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(_ignore)
            raise
        if reply.failure is not None:
            raise StageFailed(reply.failure)
        return reply

    async def _ask(
        self, process: asyncio.subprocess.Process, order: Order, limit_s: float | None
    ) -> Reply:
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._turn:
            try:
                async with asyncio.timeout(limit_s):
                    process.stdin.write(packed(order))
                    await process.stdin.drain()
                    head = await process.stdout.readexactly(LENGTH_BYTES)
                    data = await process.stdout.readexactly(int.from_bytes(head, "little"))
            except TimeoutError:
                await _killed(process)
                raise StageFailed(f"it took more than {limit_s:g} s for an item") from None
            except (OSError, asyncio.IncompleteReadError):
                status = await _killed(process)
                log.warning("stage.process_lost", pid=process.pid, status=status)
                raise StageProcessLost("the process of the stage was lost") from None
        reply: Reply = pickle.loads(data)
        return reply

    async def close(self) -> None:
        """End the process; orders to drop objects need not be carried out any more."""
        forgetting = list(self._forgetting)
        for order in forgetting:
            order.cancel()
        await asyncio.gather(*forgetting, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await _killed(self._process)


async def _killed(process: asyncio.subprocess.Process) -> int:
    """Kill a process, which may have ended before, and return its exit status."""
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


def _ignore(asked: asyncio.Future[Reply]) -> None:
    if not asked.cancelled():
        asked.exception()


class ProcessPool:
    """The processes of one stage of a pipeline, among which the stage objects are divided."""

    def __init__(self, processes: int) -> None:
        """Prepare a number of processes."""
        self._processes = [StageProcess() for _ in range(processes)]

    def least_loaded(self) -> StageProcess:
        """Return the process with the fewest stage objects."""
        return min(self._processes, key=lambda process: process.objects)

    async def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            await process.close()


class RemoteStage(Stage[StageOptions]):
    """A stage whose object is in a process of a pool."""

    def __init__(
        self,
        kind: type[AnyStage],
        options: StageOptions,
        context: StageContext,
        pool: ProcessPool,
        limit_s: float | None,
    ) -> None:
        """Choose a process; the object is made there when the first item comes."""
        super().__init__(options, context)
        self._kind = kind
        self._limit_s = limit_s
        self._home = pool.least_loaded()
        self._home.objects += 1
        self._place: tuple[asyncio.subprocess.Process, int] | None = None
        self._held: tuple[Item, ...] = ()

    def process(self, item: Item) -> Items:
        """Return the items that the object in the other process makes of `item`."""
        return self._asked(item)

    def finish(self, end: End) -> Items:
        """Return the last items of the object in the other process."""
        return self._asked(end)

    def held(self) -> tuple[Item, ...]:
        """Return the items that the object held back when it last replied."""
        return self._held

    def close(self, has_ended: bool) -> None:
        """Let the other process forget the object."""
        self._home.objects -= 1
        if self._place is not None:
            self._home.forget(*self._place, has_ended)

    async def _asked(self, item: Item) -> AsyncIterator[Item]:
        if self._place is None:
            self._place = await self._home.begin(self._kind, self.options, self.context)
        process, key = self._place
        reply = await self._home.ask(process, Process(key, item), self._limit_s)
        self._held = reply.held
        for each in reply.items:
            yield each
