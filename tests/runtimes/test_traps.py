"""Where resumption goes wrong elsewhere: what is sent twice, too early, or not at all."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.e2e.sse import SSE, Reading, events, resume, start
from tests.runtimes.conftest import Scripts

pytestmark = pytest.mark.anyio


async def test_who_was_cut_before_the_first_word_gets_all_of_them(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(6, hold=0)
    cut = await start(client, "", told.body, stop_after=0)
    path = f"/v1/generate/{cut.stream}"
    assert (await client.get(path)).json()["next_index"] == 0
    async with client.stream("GET", path, headers=SSE) as response:
        assert response.status_code == 200
        told.go_on()
        cut.events = [event async for event in events(response)]
    assert (cut.text, cut.indexes) == (told.text, list(range(7)))


async def test_who_has_all_there_is_waits_for_what_comes(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(12, hold=6)
    cut = await start(client, "", told.body, stop_after=6)
    headers = SSE | {"Last-Event-ID": "5"}
    async with client.stream("GET", f"/v1/generate/{cut.stream}", headers=headers) as response:
        assert response.status_code == 200
        told.go_on()
        cut.events += [event async for event in events(response)]
    assert (cut.text, cut.indexes) == (told.text, list(range(13)))


async def test_nothing_is_sent_twice_to_who_comes_back_while_still_connected(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(60, pace_s=0.005)
    async with client.stream("POST", "/v1/generate", json=told.body, headers=SSE) as response:
        first = Reading(response.headers["Tailrace-Stream"])
        others: list[asyncio.Task[Reading]] = []
        async for event in events(response):
            first.events.append(event)
            if event.id % 10 == 4:
                back = Reading(first.stream, events=list(first.events))
                others.append(asyncio.create_task(resume(client, "", back)))
    assert first.indexes == list(range(61))
    assert len(others) == 6
    for other in await asyncio.gather(*others):
        assert other.events == first.events
