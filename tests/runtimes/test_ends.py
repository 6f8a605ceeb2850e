"""How a stream ends, and how it does not: nobody loses what came before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Origin, running
from tests.e2e.sse import SSE, TIMEOUT, Reading, events, start
from tests.runtimes.conftest import PRODUCER, Scripts, started
from tests.runtimes.runtime import RUNTIMES
from tests.runtimes.scripted_producer import Script

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
FIRST_WAIT_S = 0.2
RETENTION_S = 1.0


async def until(client: httpx.AsyncClient, path: str, **wanted: Any) -> dict[str, Any]:
    """Return the JSON document of a stream, once it says what is wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            document: dict[str, Any] = (await client.get(path)).json()
            if wanted.items() <= document.items():
                return document


async def test_a_stream_that_everybody_has_left_runs_on_to_its_end(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(12, hold=5)
    left = await start(client, "", told.body, stop_after=5)
    told.go_on()
    document = await until(client, f"/v1/generate/{left.stream}", state="ended")
    assert (document["text"], document["finish_reason"]) == (told.text, "stop")


async def test_a_cancel_ends_a_stream_for_all_who_read_it_with_what_they_have(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(12, hold=5)
    readings = [Reading(), Reading()]

    async def read(reading: Reading, method: str, path: str, has_all: asyncio.Event) -> None:
        body = told.body if method == "POST" else None
        async with client.stream(method, path, json=body, headers=SSE) as response:
            reading.stream = response.headers["Tailrace-Stream"]
            reading.token = response.headers["Tailrace-Token"]
            async for event in events(response):
                reading.events.append(event)
                if event.id == 4:
                    has_all.set()

    async with asyncio.TaskGroup() as readers:
        first, second = readings
        has_all = asyncio.Event()
        readers.create_task(read(first, "POST", "/v1/generate", has_all))
        await has_all.wait()
        path = f"/v1/generate/{first.stream}"
        has_all.clear()
        readers.create_task(read(second, "GET", path, has_all))
        await has_all.wait()
        cancelled = await client.post(f"{path}/cancel", headers={"Tailrace-Token": second.token})
        assert (cancelled.status_code, cancelled.json()["id"]) == (200, first.stream)
    for reading in readings:
        assert reading.indexes == list(range(6))
        assert reading.text == "".join(told.texts[:5])
        assert reading.end["finish_reason"] == "cancelled"
    again = await client.post(f"{path}/cancel")
    assert again.json() == {"id": first.stream, "state": "ended", "next_index": 6}


async def test_what_came_before_a_failure_is_there_for_who_was_there_and_who_comes_later(
    client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(9, fails=True)
    reading = await start(client, "", told.body)
    assert (reading.text, reading.end["finish_reason"]) == (told.text, "failed")
    path = f"/v1/generate/{reading.stream}"
    later = [event async for event in events(await client.get(path, headers=SSE))]
    assert later == reading.events
    document = (await client.get(path)).json()
    assert (document["text"], document["finish_reason"]) == (told.text, "failed")


@pytest.mark.parametrize("name", list(RUNTIMES))
async def test_a_stream_that_nobody_has_used_for_long_is_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_LEDGER_RETENTION_S", str(RETENTION_S))
    monkeypatch.setenv("TAILRACE_LEDGER_SWEEP_S", "0.1")
    origin = Origin(tmp_path / "origin", producer=PRODUCER)
    async with (
        running(origin),
        started(name, origin, tmp_path / "edge", retention_s=RETENTION_S) as runtime,
        httpx.AsyncClient(base_url=runtime.url, timeout=TIMEOUT) as client,
    ):
        reading = await start(client, "", Script(4).body)
        answer = await once_unused(client, f"/v1/generate/{reading.stream}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unknown_stream")
    assert error["message"] == f"no stream {reading.stream}"


async def once_unused(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """Wait for the first answer other than 200.

    Each look counts as a use of the stream, so looks become rarer.
    """
    wait_s = FIRST_WAIT_S
    async with asyncio.timeout(PATIENCE_S):
        while (answer := await client.get(path, headers=SSE)).status_code == 200:
            await asyncio.sleep(wait_s)
            wait_s *= 2
    return answer
