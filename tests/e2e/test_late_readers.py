"""Late readers, through real processes: lines cut at every frame, times, and snapshots."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.e2e.conftest import House

pytestmark = pytest.mark.anyio

TOKENS = 24
LINES = {"Accept": "application/x-ndjson"}
REQUEST = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}
PATIENCE_S = 60.0


async def whole_of(client: httpx.AsyncClient, url: str) -> tuple[str, list[dict[str, Any]]]:
    """Start a stream; return its id and all of its lines."""
    got = await client.post(f"{url}/v1/generate", json=REQUEST, headers=LINES)
    lines = [json.loads(line) for line in got.text.splitlines()]
    assert lines[-1]["type"] == "end"
    assert [line["index"] for line in lines] == [*range(len(lines))]
    return got.headers["Tailrace-Stream"], lines


async def test_lines_that_are_cut_behind_any_frame_go_on_with_the_next(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    _, whole = await whole_of(client, one)
    for have in range(len(whole)):
        seen: list[dict[str, Any]] = []
        async with client.stream(
            "POST", f"{one}/v1/generate", json=REQUEST, headers=LINES
        ) as response:
            stream = response.headers["Tailrace-Stream"]
            async for line in response.aiter_lines():
                seen.append(json.loads(line))
                if len(seen) > have:
                    break
        rest = await client.get(
            f"{two}/v1/generate/{stream}", headers=LINES, params={"after": have}
        )
        assert rest.status_code == (204 if have == len(whole) - 1 else 200)
        assert seen + [json.loads(line) for line in rest.text.splitlines()] == whole


async def test_a_time_is_that_of_the_origins_clock(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    begun_ms = time.time_ns() // 1_000_000
    stream, whole = await whole_of(client, url)
    ended_ms = time.time_ns() // 1_000_000
    path = f"{url}/v1/generate/{stream}"
    for since, lines in ((begun_ms - 1000, whole), (ended_ms + 1000, [])):
        got = await client.get(path, headers=LINES, params={"since": since})
        assert [json.loads(line) for line in got.text.splitlines()] == lines
    wrong = await client.get(path, headers=LINES, params={"since": "noon"})
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "since")


async def test_a_person_reads_a_snapshot_and_a_tail_as_json_over_a_websocket(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    stream, whole = await whole_of(client, url)
    resume = {"type": "Resume", "stream": stream, "credit": 1000}
    address = f"{url.replace('http', 'ws', 1)}/v1/ws"
    told: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    async with (
        asyncio.timeout(PATIENCE_S),
        connect(address, subprotocols=["tailrace.json"]) as socket,  # type: ignore[list-item]
    ):
        await socket.send(json.dumps(resume | {"corr": 1, "snapshot": True}))
        await socket.send(json.dumps(resume | {"corr": 2, "tail": 3}))
        while not all(told[corr] and told[corr][-1]["type"] == "StreamEnd" for corr in (1, 2)):
            frame = json.loads(await socket.recv())
            told[frame["corr"]].append(frame)
    opened, snapshot, end = told[1]
    assert opened["first"] == 0
    assert snapshot["type"] == "Snapshot"
    assert (snapshot["first"], snapshot["index"]) == (0, len(whole) - 2)
    assert snapshot["text"] == "".join(line["text"] for line in whole[:-1])
    assert end["index"] == len(whole) - 1
    assert told[2][0]["first"] == len(whole) - 3
    assert [frame["index"] for frame in told[2][1:]] == [line["index"] for line in whole[-3:]]
