"""Requests that are answered from the ledger, through real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import House
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import SSE, Reading, resume, start

pytestmark = pytest.mark.anyio

REQUEST: dict[str, Any] = {
    "model": "demo",
    "prompt": "The old mill",
    "max_tokens": 40,
    "temperature": 0.9,
    "seed": 11,
    "ignore_eos": True,
    "cache": "exact",
}
CACHED = {"code": "cached"}


@pytest.fixture(scope="module")
async def caching(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    """Yield the edge of an origin whose operator allows answers from the ledger."""
    folder = tmp_path_factory.mktemp("caching")
    settings = folder / "tailrace.toml"
    settings.write_text('[origin]\ncache = "exact"\n')
    origin = Origin(folder / "data", config=settings)
    edge = Edge(origin)
    async with running(origin, edge):
        yield edge


def is_cached(reading: Reading) -> bool:
    """Return True if the events say that the answer is from the ledger."""
    notices = [event for event in reading.events if event.name == "notice"]
    return [event.data["code"] for event in notices] == ["cached"]


async def test_an_identical_request_gets_the_same_tokens_from_the_ledger(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    one, two = (edge.url for edge in standing_house.edges)
    first = await start(client, one, REQUEST)
    assert not is_cached(first)
    second = await start(client, two, REQUEST)
    third = await start(client, one, REQUEST)
    for known in (second, third):
        assert is_cached(known)
        assert known.stream != first.stream
        assert known.text == first.text
        assert known.events[: len(first.events) - 1] == first.events[:-1]
        assert known.end == first.end | {"index": first.end["index"] + 1}
        assert known.indexes == list(range(len(known.events)))
    document = (await client.get(f"{one}/v1/generate/{third.stream}")).json()
    assert (document["state"], document["text"]) == ("ended", first.text)
    assert [notice["code"] for notice in document["notices"]] == ["cached"]
    # It is a stream of its own: it is resumed at any index, and outlives the first.
    cut = await start(client, one, REQUEST, stop_after=7)
    await resume(client, two, cut)
    assert cut.events == third.events


@pytest.mark.parametrize(
    "changed",
    [
        {"cache": None},
        {"cache": "none"},
        {"seed": 12},
        {"seed": None},
        {"temperature": 0.8},
        {"prompt": "The old mil"},
        {"max_tokens": 39},
        {"stop": "zzz"},
        {"n": 1, "logprobs": 1},
    ],
)
async def test_another_request_is_generated(
    standing_house: House, client: httpx.AsyncClient, changed: dict[str, Any]
) -> None:
    url = standing_house.edges[0].url
    await start(client, url, REQUEST)
    assert not is_cached(await start(client, url, REQUEST | changed))


async def test_a_greedy_request_needs_no_seed(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    greedy = {name: REQUEST[name] for name in REQUEST if name != "seed"} | {"temperature": 0}
    first = await start(client, url, greedy)
    for again in (greedy, greedy | {"seed": 5}):
        known = await start(client, url, again)
        assert is_cached(known)
        assert known.text == first.text


async def test_an_answer_that_was_cut_short_is_not_given_again(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    body = REQUEST | {"prompt": "A cancelled story", "max_tokens": 900}
    cut = await start(client, url, body, stop_after=3)
    await client.post(f"{url}/v1/generate/{cut.stream}/cancel")
    short = await start(client, url, body, stop_after=3)
    assert short.stream != cut.stream
    await client.post(f"{url}/v1/generate/{short.stream}/cancel")
    await resume(client, url, short)
    assert not is_cached(short)


async def test_the_operator_may_allow_it_for_every_request(
    caching: Edge, client: httpx.AsyncClient
) -> None:
    body = {name: REQUEST[name] for name in REQUEST if name != "cache"}
    first = await start(client, caching.url, body)
    assert is_cached(await start(client, caching.url, body))
    assert not is_cached(await start(client, caching.url, body | {"cache": "none"}))
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    answers = [
        (await client.post(f"{caching.url}/v1/chat/completions", json=chat)).json()
        for _ in range(2)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert first.text


async def test_it_is_refused_where_it_cannot_be(
    standing_house: House, client: httpx.AsyncClient
) -> None:
    url = standing_house.edges[0].url
    whole = await start(client, url, REQUEST)
    for path, body, message in (
        ("/v1/generate", REQUEST | {"cache": "maybe"}, "unknown Cache 'maybe'"),
        (
            "/v1/generate",
            REQUEST | {"n": 2},
            "`exact` is not possible for a request that begins several streams",
        ),
        (
            f"/v1/generate/{whole.stream}/branch",
            {"index": 1, "cache": "exact"},
            "`exact` is not possible for a request that begins a branch",
        ),
    ):
        answer = await client.post(f"{url}{path}", json=body, headers=SSE)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["field"], error["message"]) == ("cache", message)
