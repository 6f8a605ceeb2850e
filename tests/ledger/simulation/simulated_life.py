"""The tools of one life of a simulated process, for all that use its ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tailrace.ledger.sqlite.ledger import SqliteLedger
from tests.ledger.simulation.simulated_loop import SimulatedLoop
from tests.ledger.simulation.simulated_storage import SimulatedStorage
from tests.ledger.simulation.simulated_world import World


class Life:
    """A ledger on the world's disk, and the tasks that use it.

    In a `calm` one nothing fails. Otherwise the disk may refuse a commit, which is final, or
    some reads. `over` is done when every task has ended, or one with an error.
    """

    ledger: SqliteLedger

    def __init__(self, world: World, loop: SimulatedLoop, *, calm: bool) -> None:
        self.world, self.loop, self.calm = world, loop, calm
        self.random = world.random
        faults: dict[str, Any] = {}
        if not calm:
            fails = self.random.random() < 0.3
            faults["fails_at"] = self.random.randint(1, 40) if fails else None
            faults["misread"] = self.random.choice((0.0, 0.0, 0.3))
        self.storage = SimulatedStorage(world.disk, **faults)
        self.over: asyncio.Future[None] = loop.create_future()
        self.owners = 0  # number of owners that the counter has had
        self._running = 0

    async def begin(self) -> None:
        self.ledger = await SqliteLedger.recover(self.storage, self.world.clock)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._running += 1
        task = self.loop.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running -= 1
        error = None if task.cancelled() else task.exception()
        if self.over.done():
            return
        if error is not None:
            self.over.set_exception(error)
        elif self._running == 0:
            self.over.set_result(None)

    async def pause(self, longest_s: float = 1.0) -> None:
        """In virtual time."""
        await asyncio.sleep(self.random.random() * longest_s)
