"""Work for a client that may leave: when it has gone, the work stops."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ledger.tasks import first_of

T = TypeVar("T")


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, if the client goes.

    The request's body must have been read: what `receive` still gives is thrown away.
    """
    return cast(T, await first_of(work, _disconnect(receive)))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
