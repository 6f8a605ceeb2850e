"""Options of a request beyond text: several streams, scores, output formats, and steering."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import HeldHouse, House
from tests.e2e.sse import SSE, Reading, events, resume, start

pytestmark = pytest.mark.anyio

REQUEST = {"model": "demo", "prompt": "Once upon a time", "temperature": 0.8, "seed": 7}
STEER = " BUT THE WOLF"
TOKENS = 300
AHEAD = 40
"""Characters by which a stream may be ahead of its reader while a steer can still take effect."""


async def generate(client: httpx.AsyncClient, house: House, **more: Any) -> dict[str, Any]:
    answer = await client.post(f"{house.edges[0].url}/v1/generate", json=REQUEST | more)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


async def test_streams_of_one_request_are_those_of_their_seeds(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    together = await generate(client, standing_house, n=3, max_tokens=12)
    alone = [await generate(client, standing_house, seed=seed, max_tokens=12) for seed in (7, 8, 9)]
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [document["text"] for document in alone]
    assert len({choice["id"] for choice in together["choices"]}) == 3


async def test_scores_are_of_the_text_that_they_come_with(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    document = await generate(client, standing_house, logprobs=2, max_tokens=12)
    scores = document["logprobs"]
    assert "".join(score["token"] for score in scores) == document["text"]
    assert all(score["logprob"] <= 0 and len(score["top"]) == 2 for score in scores)
    plain = await generate(client, standing_house, max_tokens=12)
    assert plain["text"] == document["text"]


async def test_a_format_is_kept_to(standing_house: House, client: httpx.AsyncClient) -> None:
    pattern = "[a-c ]{5,9}"
    document = await generate(client, standing_house, format={"regex": pattern}, max_tokens=30)
    assert re.fullmatch(pattern, document["text"])
    assert document["finish_reason"] == "stop"


@pytest.mark.parametrize("dies", [False, True])
async def test_a_steer_is_in_the_text_once_even_if_the_worker_dies(
    house: HeldHouse, client: httpx.AsyncClient, dies: bool
) -> None:
    body = REQUEST | {"max_tokens": TOKENS, "ignore_eos": True}
    reading = Reading()
    url = house.edges[0].url
    asked: list[asyncio.Task[httpx.Response]] = []
    house.origin.hold(AHEAD)
    async with client.stream("POST", f"{url}/v1/generate", json=body, headers=SSE) as response:
        token = {"Tailrace-Token": response.headers["Tailrace-Token"]}
        stream = response.headers["Tailrace-Stream"]
        async for event in events(response):
            reading.events.append(event)
            house.origin.hold(len(reading.text) + AHEAD)
            if len(reading.events) == 3:
                if dies:
                    await house.origin.kill_worker()
                steer = client.post(
                    f"{house.edges[1].url}/v1/generate/{stream}/steer",
                    json={"text": STEER},
                    headers=token,
                )
                asked.append(asyncio.create_task(steer))
    answer = await asked[0]
    assert answer.status_code == 200, answer.text
    assert reading.text.count(STEER) == 1
    assert reading.end["total_tokens"] == TOKENS
    before = "".join(e.data["text"] for e in reading.events[: answer.json()["next_index"]])
    assert STEER in before
    again = (await client.get(f"{url}/v1/generate/{stream}")).json()
    assert (again["text"], again["state"]) == (reading.text, "ended")


async def test_a_stream_is_cut_at_every_index_and_goes_on_at_another_edge(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    body = REQUEST | {"max_tokens": 60, "ignore_eos": True}
    whole = await start(client, one, body)
    reading = await start(client, one, body, stop_after=1)
    while reading.events[-1].name != "end":
        await resume(client, (one, two)[len(reading.events) % 2], reading, stop_after=1)
    assert reading.events == whole.events
