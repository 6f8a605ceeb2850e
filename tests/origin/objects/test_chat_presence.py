"""The presence of chats at two origins of one PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from structlog.testing import capture_logs

from tailrace.ledger.process.tasks import cancel
from tailrace.origin.core import chat_presence
from tailrace.origin.objects.chat_presence import Presence
from tests.ledger.backends import A, PostgresBackend, new, tokens
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0


async def test_many_followers_that_come_at_once_are_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.origin.objects.chat_presence.REPORT_INTERVAL_S", 0.05)
    presence, told = Presence(None), Counter[int]()
    last = asyncio.Event()

    def hear(number: int) -> None:
        told[number] += 1
        if told.total() > 100:
            last.set()

    followers = [partial(hear, number) for number in range(100)]
    for follower in followers:
        presence.join(A, follower)
    assert told == {0: 1}  # when it came; the others know the number as they come
    assert presence.count(A) == 100
    async with asyncio.timeout(PATIENCE_S):
        await last.wait()
    assert told == {number: 1 + (number == 0) for number in range(100)}
    for follower in followers:
        presence.leave(A, follower)
    assert (presence.total, presence.count(A)) == (0, 0)


class Follower:
    """A client that follows the chat A at one origin, and knows the newest number of followers."""

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self._changed = asyncio.Event()
        presence.join(A, self._changed.set)

    async def sees(self, number: int) -> None:
        """Wait until it is told of this number."""
        async with asyncio.timeout(PATIENCE_S):
            while self.presence.count(A) != number:
                self._changed.clear()
                await self._changed.wait()

    def leave(self) -> None:
        self.presence.leave(A, self._changed.set)


@asynccontextmanager
async def running(*presences: Presence) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each.run()) for each in presences]
    try:
        yield
    finally:
        assert not any(task.done() for task in tasks)
        await cancel(tasks)


async def test_a_ledger_that_refuses_presence_delays_it_and_nothing_else(
    database: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_presence, "RECHECK_INTERVAL_S", 0.05)
    backend = PostgresBackend(database)
    ledgers = [await backend.open(), await backend.open()]
    one, two = (Presence(ledger.presence) for ledger in ledgers)
    async with running(one, two):
        first, second = Follower(one), Follower(two)
        await first.sees(2)
        await second.sees(2)
        postgres.execute("ALTER TABLE tailrace.presence RENAME TO moved", database)
        third = Follower(one)
        await ledgers[0].create(new())
        with capture_logs() as logs:
            async with asyncio.timeout(PATIENCE_S):
                for index in itertools.count():
                    assert await ledgers[0].append(tokens(A, [index])) == []
                    if any(entry["event"] == "chat.presence_delayed" for entry in logs):
                        break
        await first.sees(3)  # its own followers count all the time
        postgres.execute("ALTER TABLE tailrace.moved RENAME TO presence", database)
        await second.sees(3)
        third.leave()
        first.leave()
        await second.sees(1)
        assert await one.read(A) == 1
        second.leave()
    assert (one.total, two.total) == (0, 0)
    for ledger in ledgers:
        await ledger.close()
