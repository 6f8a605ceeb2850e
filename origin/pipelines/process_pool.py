"""Processes for stages of kind `cpu` and `gpu`: their work would block the worker's event loop.

A stage object stays in one process until its stream ends. If the process dies, its stage objects
are lost: each stream that has one there runs all of its stages again (`StageLost`), on the
same input, and skips the outputs that it has given before.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator

import structlog

from tailrace.ledger.errors import TailraceError
from tailrace.origin.pipelines.order_pipe import OrderPipe
from tailrace.origin.pipelines.stage import AnyStage, Item, Items, Stage, StageContext, StageOptions
from tailrace.origin.pipelines.stage_orders import Begin, Forget, Load, Process
from tailrace.origin.producer import End

log = structlog.get_logger("pipeline")

COMMAND = (sys.executable, "-m", "tailrace.origin.pipelines.stage_process")


class StageProcess:
    """One process for stage objects; it is started when one is made, and again if it has ended.

    A process that loads something is started again as soon as it has ended, so that no stream waits
    for the load. One that has ended before its first stage object is left until the next one.
    """

    def __init__(self, load: Load | None) -> None:
        """Begin without a process; `load` is the first order to it, if any."""
        self.objects = 0  # number of stage objects in this process
        self._load = load
        self._device = ""
        self._is_used = False  # the process has had a stage object
        self._pipe: OrderPipe | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._keys = itertools.count()

    async def begin(
        self, kind: type[AnyStage], options: StageOptions, context: StageContext
    ) -> tuple[OrderPipe, int]:
        """Make a stage object; return the pipe to its process, and its key there.

        Raises:
            StageLost: The process has ended.
            StageFailed: The object cannot be made.
        """
        pipe, key = await self._running(), next(self._keys)
        self._is_used = True
        recipe = context.recipe.model_dump_json()
        order = Begin(key, kind, options, context.name, context.stream, recipe, context.begin)
        await pipe.ask(order, None)
        return pipe, key

    async def load(self) -> str:
        """Start the process now, and return the device that it uses.

        Raises:
            StageLost: The process has ended.
            StageFailed: What its stage objects share cannot be loaded.
        """
        await self._running()
        return self._device

    async def _running(self) -> OrderPipe:
        """Return the pipe to the process; start it, and let it load, if there is none."""
        async with self._starting:
            if self._pipe is None or self._pipe.is_lost:
                pipe = OrderPipe(
                    await asyncio.create_subprocess_exec(
                        *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
                    ),
                    self._on_lost,
                )
                self._is_used = False
                if self._load is not None:
                    try:
                        self._device = (await pipe.ask(self._load, None)).device
                    except BaseException:
                        await pipe.close()
                        raise
                self._pipe = pipe
            return self._pipe

    def _on_lost(self) -> None:
        if self._load is not None and self._is_used:
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        try:
            await self._running()
        except TailraceError as error:  # the next stage object tries again
            log.warning("stage.process_not_restarted", error=str(error))

    async def close(self) -> None:
        """End the process; orders to drop objects need not be carried out any more."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        if self._pipe is not None:
            await self._pipe.close()


class ProcessPool:
    """The processes of one stage of a pipeline, among which the stage objects are divided."""

    def __init__(self, processes: int, load: Load | None = None) -> None:
        """Prepare a number of processes; `load` is the first order to each, if any."""
        self._processes = [StageProcess(load) for _ in range(processes)]

    async def load(self) -> str:
        """Start all processes now, and return the device that they use.

        Raises:
            StageLost: A process has ended.
            StageFailed: What the stage objects share cannot be loaded.
        """
        devices = [await process.load() for process in self._processes]
        return devices[0]

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
        self._place: tuple[OrderPipe, int] | None = None
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
            pipe, key = self._place
            pipe.send(Forget(key, has_ended))

    async def _asked(self, item: Item) -> AsyncIterator[Item]:
        if self._place is None:
            self._place = await self._home.begin(self._kind, self.options, self.context)
        pipe, key = self._place
        reply = await pipe.ask(Process(key, item), self._limit_s)
        self._held = reply.held
        for each in reply.items:
            yield each
