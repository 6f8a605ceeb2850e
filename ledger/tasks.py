"""Several pieces of work at once, none of which outlives the wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all of them; the first error ends the others, and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*works: Awaitable[object]) -> object:
    """What the first to end returns or raises; the others are cancelled, and waited for."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # Of several that have ended at once, one that failed says why.
    failed = (task for task in ended if not task.cancelled() and task.exception() is not None)
    return next(failed, ended[0]).result()
