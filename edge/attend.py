"""Work for a client that may leave: when it has gone, the work stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, if the client goes.

    The request's body must have been read: what `receive` still gives is thrown away.
    """
    return cast(T, await first_of(work, _disconnect(receive)))


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all of them; the first error ends the others, and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(*works: Coroutine[Any, Any, object]) -> object:
    """What the first to end returns or raises; the others are cancelled, and waited for."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next(task for task in tasks if task in done).result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
