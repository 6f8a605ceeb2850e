"""Helpers for endpoints: get the origin pool, and cancel work if the client disconnects."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.ledger.process.tasks import first_of

T = TypeVar("T")
NO_STORE = {"Cache-Control": "no-store"}
"""Headers of a response that caches must not store."""


def link_of(request: Request) -> OriginPool:
    """Return the origin pool of the edge that serves a request."""
    link: OriginPool = request.app.state.link
    return link


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it and raise ClientDisconnect if the client leaves.

    Read the request's body before you call this function, which drops every message of the request.
    """
    return cast(T, await first_of(work, _disconnect(request.receive)))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect
