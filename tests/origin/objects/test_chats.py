"""Chats as objects of an origin: turns that are listed once, in order, and can be followed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.errors import BeyondEnd, CallerError, NotFound
from tailrace.ledger.interface import ObjectKey, StreamInfo
from tailrace.ledger.objects.object import ObjectRequest
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.config import StreamsConfig
from tailrace.origin.generations.service import CHAT
from tailrace.origin.objects.chat_reads import MAX_LISTED_TURNS
from tailrace.origin.objects.chats import KEPT_MS
from tailrace.origin.objects.object_host import OriginObjects
from tailrace.origin.steady_clock import now_ms

pytestmark = pytest.mark.anyio

KEY = ObjectKey(CHAT, "c1")


class House:
    """The objects of one origin, whose clock may be ahead by `late_ms`."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self.late_ms = 0
        self.ledger = ledger
        self.begun = 0
        self.objects = OriginObjects(ledger, StreamsConfig(), lambda: now_ms() + self.late_ms)
        self.objects.chats.begun = self._count

    def _count(self) -> None:
        self.begun += 1

    async def put(self, body: bytes = b"") -> None:
        assert (await self.objects.fetch(KEY, ObjectRequest("PUT", "", body=body))).status == 204

    async def get(self, query: str = "") -> dict[str, Any]:
        answer = await self.objects.fetch(KEY, ObjectRequest("GET", f"?{query}"))
        assert isinstance(answer.body, bytes)
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def follow(self, query: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """Yield the lines of a subscription."""
        request = ObjectRequest("GET", f"?follow=1&{query}")
        body = (await self.objects.fetch(KEY, request)).body
        assert isinstance(body, AsyncGenerator)
        try:
            async for piece in body:
                for line in piece.splitlines():
                    yield json.loads(line)
        finally:
            await body.aclose()

    async def close(self) -> None:
        await self.objects.close()
        await self.ledger.close()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(await SqliteLedger.open(tmp_path / "ledger.db", now_ms))
    yield made
    await made.close()


def stream(number: int) -> bytes:
    return number.to_bytes(16, "big")


def streams(turns: list[dict[str, Any]]) -> list[bytes]:
    return [bytes.fromhex(turn["stream"]) for turn in turns]


async def test_a_chat_lists_each_stream_once_in_order(house: House) -> None:
    with pytest.raises(NotFound) as caught:
        await house.get()
    assert caught.value.code == "unknown_chat"
    await house.put()
    assert await house.get() == {"turns": [], "next_turn": 0, "readers": 0}
    for number in (7, 3, 7, 5):
        await house.put(stream(number))
    found = await house.get()
    assert streams(found["turns"]) == [stream(7), stream(3), stream(5)]
    assert [turn["turn"] for turn in found["turns"]] == [0, 1, 2]
    assert [turn["state"] for turn in found["turns"]] == ["gone"] * 3
    assert (found["next_turn"], house.begun) == (3, 3)
    assert streams((await house.get("tail=1"))["turns"]) == [stream(5)]
    assert streams((await house.get("after=0"))["turns"]) == [stream(3), stream(5)]
    assert streams((await house.get("at=1"))["turns"]) == [stream(3), stream(5)]
    assert (await house.get("running=1"))["turns"] == []


async def test_a_document_has_the_newest_turns_up_to_the_limit(house: House) -> None:
    for number in range(MAX_LISTED_TURNS + 5):
        await house.put(stream(number))
    found = await house.get()
    assert [turn["turn"] for turn in found["turns"]] == [*range(5, MAX_LISTED_TURNS + 5)]
    found = await house.get("after=1")
    assert [turn["turn"] for turn in found["turns"]] == [*range(2, MAX_LISTED_TURNS + 2)]


async def test_a_reader_gets_the_turns_there_are_and_each_that_begins(house: House) -> None:
    for number in range(3):
        await house.put(stream(number))
    reading = house.follow("at=1")
    lines = [await anext(reading) for _ in range(3)]
    assert streams(lines[:2]) == [stream(1), stream(2)] and lines[2] == {"readers": 1}
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    assert not waiting.done()
    await house.put(stream(9))
    assert (await waiting)["turn"] == 3
    await reading.aclose()
    assert house.objects.chats.presence.total == 0


async def test_readers_are_told_how_many_they_are(house: House) -> None:
    await house.put()
    one, two = house.follow(), house.follow()
    assert await anext(one) == {"readers": 1}
    assert await anext(two) == {"readers": 2}
    assert await anext(one) == {"readers": 2}
    assert (await house.get())["readers"] == house.objects.chats.presence.total == 2
    await two.aclose()
    assert await anext(one) == {"readers": 1}
    await one.aclose()
    assert (await house.get())["readers"] == 0


async def test_a_follower_that_is_woken_does_not_look_the_chat_up(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared ledger that would be a query for each follower of a chat."""
    await house.put(stream(0))
    one = house.follow()
    assert streams([await anext(one)]) == [stream(0)]
    assert await anext(one) == {"readers": 1}
    looked_up = list[bytes]()
    info = house.ledger.info

    async def counted(wanted: bytes) -> StreamInfo:
        looked_up.append(wanted)
        return await info(wanted)

    monkeypatch.setattr(house.ledger, "info", counted)
    two = house.follow("tail=1")
    assert streams([await anext(two)]) == [stream(0)]
    begun = len(looked_up)  # by the second one, as it came
    assert await anext(two) == {"readers": 2}
    assert await anext(one) == {"readers": 2}
    await house.put(stream(1))
    for reading in (one, two):
        assert streams([await anext(reading)]) == [stream(1)]
        await reading.aclose()
    assert len(looked_up) == begun == 2


async def test_a_chat_outlives_its_origin(tmp_path: Path) -> None:
    for number in range(3):
        house = House(await SqliteLedger.open(tmp_path / "ledger.db", now_ms))
        await house.put(stream(number))
        await house.put(stream(0))
        found = await house.get()
        assert streams(found["turns"]) == [stream(each) for each in range(number + 1)]
        await house.close()


async def test_a_chat_is_forgotten_long_after_its_latest_turn(house: House) -> None:
    await house.put(stream(0))
    reading = house.follow("after=0")
    assert await anext(reading) == {"readers": 1}
    house.late_ms = KEPT_MS - 1000
    await house.put(stream(1))
    await anext(reading)
    house.late_ms = KEPT_MS + 1000
    await house.objects.runtime.wake_due()
    await house.objects.runtime.alarms_ended()
    assert (await house.get())["next_turn"] == 2
    house.late_ms = 2 * KEPT_MS + 1000
    await house.objects.runtime.wake_due()
    await house.objects.runtime.alarms_ended()
    with pytest.raises(NotFound):
        await house.get()
    assert await house.ledger.objects.names(CHAT) == []
    await house.put(stream(1))
    assert streams((await house.get())["turns"]) == [stream(1)]
    await reading.aclose()


async def test_what_a_chat_refuses(house: House) -> None:
    await house.put(stream(0))
    for query in ("at=1", "after=1", "follow=1&at=7"):
        with pytest.raises(BeyondEnd, match="beyond the chat's last, 0"):
            await house.get(query)
    for query in ("tail=x", "follow=2", "other=1", "at=-1"):
        with pytest.raises(CallerError):
            await house.get(query)
    for method, body in (("PUT", b"short"), ("DELETE", b""), ("POST", b"")):
        with pytest.raises(CallerError):
            await house.objects.fetch(KEY, ObjectRequest(method, "", body=body))
    assert (await house.get())["next_turn"] == 1
