"""Usage and budgets over real processes: exact through cuts, cancels and SIGKILL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from typer.testing import CliRunner

from tailrace.cli import app
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.usage_campaign import Campaign, bill

pytestmark = pytest.mark.anyio

STREAMS = 60
BODY = {"model": "demo", "prompt": "Once", "max_tokens": 6, "seed": 1, "ignore_eos": True}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


async def test_what_is_counted_is_what_the_log_holds(tmp_path: Path) -> None:
    origin = Origin(tmp_path)
    edge = Edge(origin)
    async with running(origin, edge):
        campaign = Campaign(origin, edge, STREAMS, seed=1, kill_every=10)
        await campaign.run()
        assert campaign.kills >= 5
        found = await bill(tmp_path / "ledger.db")
        assert found.errors == 0
        assert found.total.streams == len(set(campaign.opened)) == STREAMS
        async with httpx.AsyncClient() as client:
            told = (await client.get(f"{edge.url}/v1/admin/usage?by=")).json()
        assert told["usage"][0]["output_tokens"] == found.total.output_tokens
        assert told["missing"] == {} and len(told["ledgers"]) == 1
    assert (await bill(tmp_path / "ledger.db")).errors == 0, "after a clean stop too"


class House(NamedTuple):
    """An origin and an edge with a file of API keys."""

    origin: Origin
    edge: Edge
    keys: Path

    async def added(self, name: str, *options: object) -> tuple[str, dict[str, str]]:
        """Return the id of a new key, and the header with it, which the running edge has read."""
        before = self.edge.count("reloaded")
        words = ["key", "add", name, "--keys", self.keys, *options, "--json"]
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        made = json.loads(result.stdout)
        await self.edge.saw("reloaded", before + 1)
        return made["id"], {"Authorization": f"Bearer {made['key']}"}


@pytest.fixture(scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("usage")
    origin = Origin(folder)
    house = House(origin, Edge(origin), folder / "api-keys.json")
    words = ["key", "add", "first", "--keys", str(house.keys)]
    assert CliRunner().invoke(app, words).exit_code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILRACE_EDGE_API_KEYS", str(house.keys))
        async with running(origin, house.edge):
            yield house


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=house.edge.url, timeout=60.0) as made:
        yield made


def counts(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["streams"], row["prompt_tokens"], row["output_tokens"]


async def test_a_key_sees_its_own_usage_and_an_operator_all(
    house: House, client: httpx.AsyncClient
) -> None:
    id_, key = await house.added("one", "--tenant", "acme", "--tokens-per-day", 1000)
    _, other = await house.added("two", "--tenant", "acme")
    _, admin = await house.added("ops", "--rights", "admin")
    for headers in (key, key, other):
        made = await client.post("/v1/generate", json=BODY, headers=headers)
        assert made.status_code == 200
    told = (await client.get("/v1/usage?by=model,class", headers=key)).json()
    prompt = made.json()["prompt_tokens"]
    assert told["key"] == id_
    assert told["by"] == ["model", "class"]
    assert [counts(row) for row in told["usage"]] == [(2, 2 * prompt, 12)]
    assert told["total"]["unread_tokens"] == 0
    [budget] = told["budgets"]
    assert (budget["period"], budget["tokens"]) == ("day", 1000)
    assert budget["used"] == 2 * prompt + 12 == 1000 - budget["remaining"]
    everything = await client.get(f"/v1/admin/usage?by=tenant,key&key={id_}", headers=admin)
    assert [(row["tenant"], row["key"]) for row in everything.json()["usage"]] == [("acme", id_)]
    refused = await client.get("/v1/admin/usage", headers=key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_right")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("by=weather", "by"),
        ("by=tenant", "by"),
        ("by=day,day", "by"),
        ("from=yesterday", "from"),
        ("from=2026-02-30", "from"),
        ("from=2999-01-01", "from"),
        ("from=2026-02-02&to=2026-02-01", "to"),
        ("tenant=acme", "tenant"),
        ("from=2026-01-01&from=2026-01-02", "query"),
    ],
)
async def test_a_query_that_makes_no_sense_is_refused(
    house: House, client: httpx.AsyncClient, query: str, field: str
) -> None:
    _, key = await house.added("asks")
    refused = await client.get(f"/v1/usage?{query}", headers=key)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["field"]) == (400, "invalid_request", field)
    assert (await client.get("/v1/usage")).status_code == 401


async def test_a_budget_that_is_spent_is_refused_in_every_dialect(
    house: House, client: httpx.AsyncClient
) -> None:
    budgets = ("--tokens-per-day", 5, "--tokens-per-month", 1000)
    _, key = await house.added("poor", "--tenant", "poor", *budgets)
    first = await client.post("/v1/generate", json=BODY, headers=key)
    assert first.status_code == 200, "a request is admitted while anything is left"
    policy = first.headers["RateLimit-Policy"]
    assert policy == ('"tokens-day";q=5;qu="tokens";w=86400, "tokens-month";q=1000;qu="tokens"')
    native = await client.post("/v1/generate", json=BODY, headers=key)
    error = native.json()["error"]
    assert (native.status_code, error["code"]) == (429, "day_budget_spent")
    assert error["retryable"] is False
    wait_s = int(native.headers["Retry-After"])
    assert 0 < wait_s <= 86_400
    assert native.headers["RateLimit"] == f'"tokens-day";r=0;t={wait_s}'
    assert native.headers["RateLimit-Policy"] == policy
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "demo", "prompt": "Once", "max_tokens": 4}),
        ("/v1/responses", {"model": "demo", "input": "Hi", "max_output_tokens": 4}),
    ):
        refused = await client.post(path, json=body, headers=key)
        told = refused.json()["error"]
        assert (refused.status_code, told["code"]) == (429, "insufficient_quota"), path
        assert told["type"] == "rate_limit_error"
        assert refused.headers["X-Should-Retry"] == "false"
    version = key | {"anthropic-version": "2023-06-01"}
    messages = await client.post("/v1/messages", json=CHAT, headers=version)
    assert (messages.status_code, messages.json()["type"]) == (429, "error")
    assert messages.json()["error"]["type"] == "rate_limit_error"
    parts = [{"type": "text", "text": "Hi"}]
    chat = {"id": "c", "messages": [{"id": "m", "role": "user", "parts": parts}]}
    sdk = await client.post("/api/chat", json=chat, headers=key)
    assert sdk.status_code == 429
    assert sdk.text.startswith("this API key has used")
    events = await client.post(
        "/v1/generate", json=BODY, headers=key | {"Accept": "text/event-stream"}
    )
    assert (events.status_code, events.json()["error"]["code"]) == (429, "day_budget_spent")
    stream = first.headers["Tailrace-Stream"]
    assert (await client.get(f"/v1/generate/{stream}", headers=key)).status_code == 200


async def when_ready(client: httpx.AsyncClient, key: dict[str, str]) -> httpx.Response:
    """Return the answer to a request as soon as the edge has found its origin again."""
    async with asyncio.timeout(60):
        while True:
            answer = await client.post("/v1/generate", json=BODY, headers=key)
            if answer.status_code != 503:
                return answer
            await asyncio.sleep(0.1)


async def test_a_budget_is_still_spent_when_its_origin_begins_anew(
    house: House, client: httpx.AsyncClient
) -> None:
    _, key = await house.added("again", "--tenant", "again", "--tokens-per-month", 5)
    assert (await client.post("/v1/generate", json=BODY, headers=key)).status_code == 200
    await house.origin.kill()
    await house.origin.ready()
    refused = await when_ready(client, key)
    assert refused.json()["error"]["code"] == "month_budget_spent"
    told = (await client.get("/v1/usage?by=", headers=key)).json()
    assert told["usage"][0]["streams"] == 1
