"""Updates: which subscription is notified of which change, and how."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tailrace.ledger.errors import Unavailable
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import ObjectKey, ObjectWrite
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.streams.events import Change, StreamEvent
from tailrace.origin.subscriptions.index import ENTRY, SCAN, UPDATE, VERSION, Update, Updates
from tailrace.origin.subscriptions.request import INDEX_KEY

pytestmark = pytest.mark.anyio


def entry(pattern: str | None = None, *streams: str, wake: str | None = None) -> bytes:
    return json.dumps({"pattern": pattern, "streams": streams, "wake_stream": wake}).encode()


def appended(path: str, tail: str = "1") -> StreamEvent:
    return StreamEvent(Change.APPENDED, path, tail)


class Notified:
    """Objects that record their notifications."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.errors: list[Exception] = []

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        self.asked.put_nowait((key.name, request.operation or ""))
        if self.errors:
            raise self.errors.pop()
        return ObjectResponse(204)

    async def next(self) -> tuple[str, str]:
        return await asyncio.wait_for(self.asked.get(), 20)


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    made = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 1000)
    yield made
    await made.close()


@asynccontextmanager
async def at_work(updates: Updates, objects: Notified) -> AsyncIterator[None]:
    running = asyncio.create_task(updates.run(objects))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def enter(ledger: SqliteLedger, name: str, value: bytes) -> None:
    """Make an entry as an index on another origin does."""
    epoch = (await ledger.objects.claim(INDEX_KEY)).epoch
    puts = {ENTRY + name: value, VERSION: name.encode()}
    await ledger.objects.write(ObjectWrite(INDEX_KEY, epoch, puts, durability=Durability.PROCESS))


async def test_those_hear_who_want_to_know(ledger: SqliteLedger) -> None:
    updates = Updates(ledger.objects)
    updates.enter("globbed", entry("events/*"))
    updates.enter("named", entry(None, "events/x"))
    updates.enter("waker", entry("**", wake="events/x"))
    updates.on_event(appended("events/x"))
    heard = {"events/x": Update(tail="1")}
    assert updates.take("globbed") == heard
    assert updates.take("named") == heard
    assert updates.take("waker") == {}
    assert updates.take("globbed") == {}  # an update is taken once
    updates.leave("named")
    updates.on_event(appended("events/x"))
    assert updates.take("named") == {}


async def test_of_several_updates_of_a_stream_the_last_is_kept(ledger: SqliteLedger) -> None:
    updates = Updates(ledger.objects)
    updates.enter("a", entry("*"))
    updates.on_event(appended("x", "1"))
    updates.on_event(appended("x", "2"))
    updates.on_event(StreamEvent(Change.DELETED, "y", "9"))
    updates.on_event(StreamEvent(Change.CREATED, "y", "0"))
    updates.on_event(StreamEvent(Change.CREATED, "z", "0"))
    updates.on_event(StreamEvent(Change.DELETED, "z", "0"))
    assert updates.take("a") == {
        "x": Update(tail="2"),
        "y": Update(deleted=True, tail="0"),
        "z": Update(deleted=True),
    }


async def test_who_has_updates_is_notified(ledger: SqliteLedger) -> None:
    updates, objects = Updates(ledger.objects), Notified()
    updates.enter("a", entry("*"))
    async with at_work(updates, objects):
        updates.on_event(appended("x"))
        assert await objects.next() == ("a", UPDATE)


async def test_entries_of_other_origins_are_seen_and_asked_to_look(ledger: SqliteLedger) -> None:
    updates, objects = Updates(ledger.objects), Notified()
    await enter(ledger, "before", entry("*"))
    async with at_work(updates, objects):
        assert await objects.next() == ("before", SCAN)
        await enter(ledger, "after", entry(None, "x"))
        assert await objects.next() == ("after", SCAN)
        updates.on_event(appended("x"))
        assert {await objects.next(), await objects.next()} == {
            ("before", UPDATE),
            ("after", UPDATE),
        }


async def test_who_could_not_hear_is_asked_to_look(ledger: SqliteLedger) -> None:
    updates, objects = Updates(ledger.objects), Notified()
    updates.enter("a", entry("*"))
    objects.errors.append(Unavailable("lost"))
    async with at_work(updates, objects):
        updates.on_event(appended("x"))
        assert await objects.next() == ("a", UPDATE)
        assert await objects.next() == ("a", SCAN)
