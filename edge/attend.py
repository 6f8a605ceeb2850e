"""Work for a client that may leave: when it has gone, the work stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, if the client goes.

    The request's body must have been read: what `receive` still gives is thrown away.
    """
    working = asyncio.create_task(work)
    await until_first(working, asyncio.create_task(_disconnect(receive)))
    if working.cancelled():
        raise ClientDisconnect
    return working.result()


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """The results of all of them; the first error ends the others, and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_first(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one of the tasks is done, however it ends, and cancel the others."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
