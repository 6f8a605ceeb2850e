"""Letterboxes: who hears of what, and how it comes to be roused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ledger.errors import Unavailable
from ledger.frame import Durability
from ledger.interface import ObjectKey, ObjectWrite
from ledger.objects.object import ObjectRequest, ObjectResponse
from ledger.sqlite.ledger import SqliteLedger
from ledger.streams.settings import Change, StreamEvent
from ledger.subscriptions.news import ENTRY, HEAR, LOOK, VERSION, Letter, News
from ledger.subscriptions.route import INDEX_KEY

pytestmark = pytest.mark.anyio


def entry(pattern: str | None = None, *streams: str, wake: str | None = None) -> bytes:
    return json.dumps({"pattern": pattern, "streams": streams, "wake_stream": wake}).encode()


def appended(path: str, tail: str = "1") -> StreamEvent:
    return StreamEvent(Change.APPENDED, path, tail)


class Roused:
    """Objects that say who was roused, and how."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.errors: list[Exception] = []

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        self.asked.put_nowait((key.name, request.method))
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
async def at_work(news: News, objects: Roused) -> AsyncIterator[None]:
    running = asyncio.create_task(news.run(objects))
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
    news = News(ledger.objects)
    news.enter("globbed", entry("events/*"))
    news.enter("named", entry(None, "events/x"))
    news.enter("waker", entry("**", wake="events/x"))
    news.on_event(appended("events/x"))
    heard = {"events/x": Letter(tail="1")}
    assert news.empty("globbed") == heard
    assert news.empty("named") == heard
    assert news.empty("waker") == {}
    assert news.empty("globbed") == {}  # a letter is read once
    news.leave("named")
    news.on_event(appended("events/x"))
    assert news.empty("named") == {}


async def test_of_several_letters_about_a_stream_the_last_is_kept(ledger: SqliteLedger) -> None:
    news = News(ledger.objects)
    news.enter("a", entry("*"))
    news.on_event(appended("x", "1"))
    news.on_event(appended("x", "2"))
    news.on_event(StreamEvent(Change.DELETED, "y", "9"))
    news.on_event(StreamEvent(Change.CREATED, "y", "0"))
    news.on_event(StreamEvent(Change.CREATED, "z", "0"))
    news.on_event(StreamEvent(Change.DELETED, "z", "0"))
    assert news.empty("a") == {
        "x": Letter(tail="2"),
        "y": Letter(deleted=True, tail="0"),
        "z": Letter(deleted=True),
    }


async def test_who_has_letters_is_roused(ledger: SqliteLedger) -> None:
    news, objects = News(ledger.objects), Roused()
    news.enter("a", entry("*"))
    async with at_work(news, objects):
        news.on_event(appended("x"))
        assert await objects.next() == ("a", HEAR)


async def test_entries_of_other_origins_are_seen_and_asked_to_look(ledger: SqliteLedger) -> None:
    news, objects = News(ledger.objects), Roused()
    await enter(ledger, "before", entry("*"))
    async with at_work(news, objects):
        assert await objects.next() == ("before", LOOK)
        await enter(ledger, "after", entry(None, "x"))
        assert await objects.next() == ("after", LOOK)
        news.on_event(appended("x"))
        assert {await objects.next(), await objects.next()} == {("before", HEAR), ("after", HEAR)}


async def test_who_could_not_hear_is_asked_to_look(ledger: SqliteLedger) -> None:
    news, objects = News(ledger.objects), Roused()
    news.enter("a", entry("*"))
    objects.errors.append(Unavailable("lost"))
    async with at_work(news, objects):
        news.on_event(appended("x"))
        assert await objects.next() == ("a", HEAR)
        assert await objects.next() == ("a", LOOK)
