"""A thread that runs functions for an event loop, one after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class WorkThread:
    """A thread that runs functions in order.

    It is cheaper than an executor of the standard library: functions come through one queue, and
    `call_soon_threadsafe` returns their results.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = name

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in the thread and return a future with its result.

        `work` runs even if the future is cancelled.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        done: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((work, done))
        return done

    async def close(self) -> None:
        """Run all queued functions, then end the thread."""
        if self._thread is not None:
            await self.run(lambda: None)
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            tell: Callable[[Any], None]
            try:
                tell, outcome = done.set_result, work()
            except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
                tell, outcome = done.set_exception, error
            with suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
                self._loop.call_soon_threadsafe(_end, done, tell, outcome)


def _end(done: asyncio.Future[Any], tell: Callable[[Any], None], outcome: object) -> None:
    if not done.done():
        tell(outcome)
