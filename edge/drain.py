"""How an edge goes away: known before it is done, with time for what is under way.

1. /readyz is 503 at once, so that load balancers send nobody new. For `lame_duck_s` all else is
   as it was: some ask only every few seconds.
2. New requests are refused, and connections told to end: GOAWAY, `Connection: close`, idle ones
   closed. What is under way may come to its end, for `drain_s` at most.
3. What is left is handed over: every stream ends with an error that says to resume it elsewhere,
   not at the same moment for all.

A second signal ends all that at once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from edge.origins.link import Link
from edge.quic.listen import QuicListener
from edge.server.wire import Shared
from ledger.errors import Unavailable
from ledger.process import Stop
from ledger.tasks import first_of

GRACEFUL_TIMEOUT_S = 2.0
"""For answers that say that streams are to be resumed elsewhere to leave."""
LOOK_S = 0.05
"""How late it may be noticed that nothing is under way any more."""
RETRY_AFTER_MS = 1_000
"""What those are told to wait at least who are refused, or handed over; not all the same."""

log = structlog.get_logger("tailrace.edge")


def shutting_down() -> Unavailable:
    return Unavailable(
        "this edge is shutting down",
        hint="resume on another, or here again",
        retry_after_ms=RETRY_AFTER_MS,
    )


async def go_away(shared: Shared, quic: QuicListener | None, stop: Stop) -> None:
    """From the first signal to the end of the last connection; `stop.at_once` cuts it short."""
    config = shared.config
    log.info("draining", lame_duck_s=config.lame_duck_s, drain_s=config.drain_s)
    await first_of(stop.at_once.wait(), asyncio.sleep(config.lame_duck_s))
    log.info("shutting down", streams=shared.link.route_count)
    patience_s = 0.0 if stop.at_once.is_set() else config.drain_s + GRACEFUL_TIMEOUT_S
    ending = asyncio.create_task(quic.stop(patience_s)) if quic is not None else None
    shared.link.refuse_new(shutting_down())
    shared.connections.draining = True
    for connection in shared.connections.all():
        connection.speaker.drain()
    shared.turn.flush()
    with suppress(TimeoutError):
        async with asyncio.timeout(config.drain_s):
            await first_of(stop.at_once.wait(), _nothing_under_way(shared.link))
    shared.link.refuse_all(shutting_down())
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACEFUL_TIMEOUT_S):
            await first_of(stop.at_once.wait(), _closed(shared))
    for connection in shared.connections.all():
        connection.abort()
    if ending is not None and not stop.at_once.is_set():
        await ending


async def _closed(shared: Shared) -> None:
    """Until every connection has been closed; those without a request under way are told again."""
    for connection in shared.connections.all():
        connection.speaker.drain()
    shared.turn.flush()
    await shared.connections.none.wait()


async def _nothing_under_way(link: Link) -> None:
    while link.route_count:  # noqa: ASYNC110  (a route ends in many ways; nobody else asks)
        await asyncio.sleep(LOOK_S)
