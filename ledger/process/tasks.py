"""Run several coroutines concurrently, none of which outlives the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait for them; their results and errors are ignored."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


@asynccontextmanager
async def background(
    works: Iterable[Coroutine[Any, Any, T]],
) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Run coroutines in the background for as long as the block runs."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        await cancel(tasks)


async def gather(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run the coroutines and return their results; the first error cancels the other coroutines."""
    async with background(works) as tasks:
        return await asyncio.gather(*tasks)


async def first_of(*works: Awaitable[object]) -> object:
    """Return the result of the coroutine that ends first, or raise its error; cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        await cancel(tasks)
    # If several tasks ended at once, report the error of the task that failed.
    failed = (task for task in ended if not task.cancelled() and task.exception() is not None)
    return next(failed, ended[0]).result()
