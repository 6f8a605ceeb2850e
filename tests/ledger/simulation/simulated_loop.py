"""An event loop whose clock is a number and whose order is drawn from a seed.

No selector, no thread, no real time: of the callbacks that are ready it runs any one, and
when none is ready its clock jumps to the next timer. Two runs with equal seeds make equal
steps, so an interleaving that breaks something can be had again from its seed alone.

A crash is a loop that is stepped no further: `abandon` takes apart what was running on it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import events
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import Context, copy_context
from random import Random
from typing import Any, TypeVarTuple

Arguments = TypeVarTuple("Arguments")


class Stuck(AssertionError):
    """Deadlock: nothing is ready or due, and the work is not done."""


class Callback(asyncio.Handle):
    """A callback that is ready; the base class's constructor does the same, but slower."""

    __slots__ = ()

    def __init__(
        self,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: Context | None = None,
    ) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = self._repr = None


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs coroutines of the standard library's asyncio; `time()` is in virtual seconds."""

    def __init__(self, random: Random, start_s: float = 0.0) -> None:
        super().__init__()
        self._random = random
        self._now_s = start_s
        self._callbacks: list[asyncio.Handle | asyncio.Future[None]] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle | asyncio.Future[None]]] = []
        """Handles, and the futures of sleeps."""
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[Any]] = []
        self._gone = False
        self.steps = 0
        self.errors: list[dict[str, Any]] = []
        """Exceptions that nothing has caught, as asyncio gives them to an exception handler."""

    # ---- running ----

    def run(self, main: Coroutine[Any, Any, None], steps: int) -> bool:
        """Run `main` to its end or for a number of steps; return True if it has ended."""
        task: asyncio.Task[None] = self.create_task(main)
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            self._step_until(task, steps)
        finally:
            events._set_running_loop(outer)
        if not task.done():
            return False
        task.result()
        return True

    def _step_until(self, task: asyncio.Task[None], steps: int) -> None:
        ready, random, future_type = self._callbacks, self._random.random, asyncio.Future
        while not task.done() and self.steps < steps:
            if not ready:
                self._pass_time()
            at = int(random() * len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
            handle = ready.pop()
            self.steps += 1
            if isinstance(handle, future_type):
                if not handle.done():
                    handle.set_result(None)
            elif not handle.cancelled():
                handle._run()

    def _pass_time(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise Stuck(f"for ever waiting: {[t.get_name() for t in self._tasks if not t.done()]}")
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            self._callbacks.append(heapq.heappop(timers)[2])

    def abandon(self) -> None:
        """Cancel and drop everything that has not ended, as the end of a process does."""
        self._gone = True
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coroutine = task.get_coro()
                assert coroutine is not None
                coroutine.close()
        self._callbacks.clear()
        self._timers.clear()
        self._tasks.clear()

    # ---- what asyncio asks of a loop ----

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = Callback(callback, args, self, context)
        if not self._gone:
            self._callbacks.append(handle)
        return handle

    def sleep(self, delay_s: float) -> asyncio.Future[None]:
        """Return a future that ends `delay_s` from now: `asyncio.sleep` in less real time."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        if not self._gone:
            heapq.heappush(self._timers, (self._now_s + delay_s, next(self._numbers), future))
        return future

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._gone:
            heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        # Named by us: asyncio numbers its tasks by a counter that other loops move on.
        named = str(name or getattr(coro, "__qualname__", coro))
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=named, context=context)
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._gone:
            self.errors.append(context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: the handle is skipped when its time comes."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return self._gone


def sleep(delay_s: float) -> asyncio.Future[None]:
    """Return a future that ends `delay_s` from now, on the `SimulatedLoop` that is running."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop.sleep(delay_s)
