"""Shared parts of the streams' tests: a real ledger, a clock moved by hand, requests as objects."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tailrace.ledger.interface import Ledger, ObjectKey
from tailrace.ledger.objects.object import ObjectFactory, ObjectRequest, ObjectResponse
from tailrace.ledger.objects.runtime import ObjectRuntime
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.origin.streams.events import StreamEvent
from tailrace.origin.streams.object import stream_class
from tailrace.origin.streams.settings import StreamSettings
from tests.ledger.objects.object_world import HandClock

ROOT = "http://host/v1/stream/"
TIMEOUT_S = 20.0
"""Only a test that fails waits so long."""
ZERO = "0000000000000000_0000000000000000"

T = TypeVar("T")


def done(steps: Generator[None, None, T]) -> T:
    """Return what comes of work that is done in steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@dataclass
class StreamWorld:
    """A ledger and the streams in it. `events` are the changes that were told of."""

    ledger: SqliteLedger
    runtime: ObjectRuntime
    clock: HandClock
    events: list[StreamEvent] = field(default_factory=list)

    async def ask(
        self, method: str, name: str, body: bytes = b"", *, query: str = "", **headers: str
    ) -> ObjectResponse:
        """Header names are written with underscores."""
        fields = tuple((key.replace("_", "-"), value) for key, value in headers.items())
        request = ObjectRequest(method, f"{ROOT}{name}{query}", fields, body)
        async with asyncio.timeout(TIMEOUT_S):
            return await self.runtime.fetch(ObjectKey("stream", name), request)

    async def put(self, name: str, body: bytes = b"", **headers: str) -> ObjectResponse:
        headers.setdefault("content_type", "text/plain")
        return await self.ask("PUT", name, body, **headers)

    async def post(self, name: str, body: bytes = b"", **headers: str) -> ObjectResponse:
        headers.setdefault("content_type", "text/plain")
        return await self.ask("POST", name, body, **headers)

    async def text(self, name: str, query: str = "") -> bytes:
        """Return what a GET shows."""
        response = await self.ask("GET", name, query=query)
        assert response.status == 200 and isinstance(response.body, bytes)
        return response.body

    async def status(self, name: str, method: str = "HEAD") -> int:
        return (await self.ask(method, name)).status

    async def becomes(self, name: str, status: int) -> None:
        """Wait until HEAD says so: what alarms do is done in their own time."""
        async with asyncio.timeout(TIMEOUT_S):
            while await self.status(name) != status:
                await self.clock.parks.get()

    async def is_empty(self) -> None:
        """Wait until nothing is stored of any object, not even an alarm."""
        async with asyncio.timeout(TIMEOUT_S):
            while await self.runtime.ledger.objects.names("stream"):
                await self.clock.parks.get()


@asynccontextmanager
async def streams_at(
    folder: Path,
    *,
    now_ms: int | None = None,
    settings: StreamSettings | None = None,
    factory: Callable[[StreamSettings], ObjectFactory] = stream_class,
    seen_as: Callable[[SqliteLedger], Ledger] = lambda ledger: ledger,
    retention: RetentionSettings = RetentionSettings(),
) -> AsyncIterator[StreamWorld]:
    """Streams on the ledger in `folder`, which may be there already; their alarms ring.

    `seen_as` is the ledger that the streams see in its place.
    """
    clock, events = HandClock(), list[StreamEvent]()
    clock.now = clock.now if now_ms is None else now_ms
    # No test waits for nothing: a long poll in vain is over at once.
    settings = settings or StreamSettings(long_poll_s=0.0)
    settings = replace(settings, on_event=events.append)
    ledger = await SqliteLedger.open(folder / "ledger.db", clock.now_ms, retention=retention)
    runtime = ObjectRuntime(
        seen_as(ledger), {"stream": factory(settings)}, clock.now_ms, os.urandom, timer=clock
    )
    alarms = asyncio.create_task(runtime.run())
    try:
        yield StreamWorld(ledger, runtime, clock, events)
    finally:
        alarms.cancel()
        await asyncio.wait([alarms])
        await runtime.close()
        await ledger.close()
