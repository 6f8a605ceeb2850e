"""SIGKILL in the middle of a stream, of the runtime and of what is behind it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Edge, Origin
from tests.e2e.sse import SSE, Reading, events, resume
from tests.npm import installed
from tests.runtimes.conftest import Scripts
from tests.runtimes.runtime import Runtime
from tests.runtimes.scripted_producer import Script

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parent / "reads_by_websocket.mjs"
PAGE_TIMEOUT_S = 120.0
KILLED_AT = 20
WORDS, HOLD = 300, 250


async def read_and_kill(
    stage: Runtime, client: httpx.AsyncClient, told: Script, *processes: Origin | Edge
) -> Reading:
    """Read a stream, kill the runtime and the named processes, and return what the reader has."""
    reading = Reading()

    async def read() -> None:
        async with client.stream("POST", "/v1/generate", json=told.body, headers=SSE) as response:
            reading.stream = response.headers["Tailrace-Stream"]
            async for event in events(response):
                reading.events.append(event)
                if event.id == KILLED_AT:
                    await stage.kill()
                    for process in processes:
                        await process.kill()

    with pytest.raises(httpx.TransportError):
        await read()
    assert KILLED_AT < len(reading.events) <= HOLD
    return reading


async def test_the_runtime_is_killed_and_its_successor_goes_on(
    stage: Runtime, client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(WORDS, hold=HOLD, pace_s=0.001)
    reading = await read_and_kill(stage, client, told)
    await stage.start()
    told.go_on()
    await resume(client, "", reading)
    assert (reading.text, reading.indexes) == (told.text, list(range(WORDS + 1)))


async def test_all_are_killed_and_their_successors_go_on(
    stage: Runtime, client: httpx.AsyncClient, script: Scripts
) -> None:
    told = script(WORDS, hold=HOLD, pace_s=0.001)
    reading = await read_and_kill(stage, client, told, *stage.behind)
    await stage.start()
    told.go_on()
    await resume(client, "", reading)
    assert (reading.text, reading.indexes) == (told.text, list(range(WORDS + 1)))


@pytest.mark.parametrize(
    ("standing", "which"),
    [("python", 0), ("workerd", 0), ("workerd", 1)],
    indirect=["standing"],
    scope="session",
    ids=["python, origin", "workerd, edge", "workerd, origin"],
)
async def test_what_is_behind_is_killed_and_the_reader_stays_connected(
    stage: Runtime, client: httpx.AsyncClient, script: Scripts, which: int
) -> None:
    told = script(WORDS, hold=HOLD, pace_s=0.001)
    reading = Reading()
    async with client.stream("POST", "/v1/generate", json=told.body, headers=SSE) as response:
        async for event in events(response):
            reading.events.append(event)
            if event.id == KILLED_AT:
                await stage.behind[which].kill()
                await stage.start()
                told.go_on()
    assert (reading.text, reading.indexes) == (told.text, list(range(WORDS + 1)))


@pytest.mark.parametrize(
    ("standing", "which"),
    [("python", None), ("workerd", None), ("workerd", 0)],
    indirect=["standing"],
    scope="session",
    ids=["python, runtime", "workerd, runtime", "workerd, edge"],
)
async def test_a_page_that_reads_a_websocket_resumes_by_itself(
    stage: Runtime, script: Scripts, which: int | None
) -> None:
    """Kill what the WebSocket ends at, or passes through; the page's client connects again."""
    installed(PAGE.parents[1] / "web")
    told = script(WORDS, hold=HOLD)
    page = await asyncio.create_subprocess_exec(
        *("node", "--experimental-websocket", str(PAGE), stage.url, json.dumps(told.body)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert page.stdout is not None
    said = b""
    async with asyncio.timeout(PAGE_TIMEOUT_S):
        while line := await page.stdout.readline():
            said = line
            if line.strip() == b"%d" % KILLED_AT:
                await (stage.kill() if which is None else stage.behind[which].kill())
                await stage.start()
                told.go_on()
        assert await page.wait() == 0
    read = json.loads(said)
    assert (read["content"], read["indexes"]) == (told.text, list(range(WORDS + 1)))
    assert (read["resumes"], read["transport"]) == (1, "websocket")
