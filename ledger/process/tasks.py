"""Several pieces of work at once, none of which outlives the wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """And wait until they are over, however that is."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)


@asynccontextmanager
async def beside(works: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """They run while the block does."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        await cancel(tasks)


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all of them; the first error ends the others, and is raised."""
    async with beside(works) as tasks:
        return await asyncio.gather(*tasks)


async def first_of(*works: Awaitable[object]) -> object:
    """What the first to end returns or raises; the others are cancelled, and waited for."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        await cancel(tasks)
    # Of several that have ended at once, one that failed says why.
    failed = (task for task in ended if not task.cancelled() and task.exception() is not None)
    return next(failed, ended[0]).result()
