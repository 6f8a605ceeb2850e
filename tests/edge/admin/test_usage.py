"""`/v1/admin/usage` and `/v1/usage` over real links to origins that say what the test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tailrace.edge.access.authenticator import Authenticator
from tailrace.edge.access.keys import ApiKey, KeyRing, digest_of, make_key
from tailrace.edge.config import EdgeConfig
from tailrace.ledger.frame import Call
from tailrace.ledger.usage import Usage, UsageQuery, UsageSums
from tailrace.ledger.usage_report import usage_document
from tests.edge.admin.test_routes import LOOPBACK, House, asked, says
from tests.edge.scripted_origin import ScriptedOrigin, until

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ID, KEY = make_key(lambda count: b"\x07" * count)
ENDS_MS = {"day": 86_400_000, "month": 2_678_400_000}


def document(ledger: str, *tokens: int, spent: int = 0) -> dict[str, Any]:
    """Return what an origin says, whose ledger has streams with these numbers of tokens."""
    query = UsageQuery(("model",))
    sums = UsageSums(query)
    for number, output in enumerate(tokens):
        stream = number.to_bytes(16, "big")
        sums.add_usage(Usage(stream, 0, "", "", "demo", "batch", "stop", 5, 1, output, 0, 2))
    told = {"spent": {"day": spent, "month": 2 * spent}, "ends_ms": ENDS_MS}
    return {"ledger": ledger, **usage_document(query, sums), **told}


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House(ScriptedOrigin(0), ScriptedOrigin(0))
    async with house.open(LOOPBACK) as house.client:
        yield house


@pytest.fixture
async def keyed() -> AsyncIterator[House]:
    """Yield an edge with one key, which has a budget."""
    said = {"id": ID, "name": "web", "tenant": "acme", "rights": ["read"], "tokens_per_day": 100}
    key = ApiKey.model_validate(said | {"sha256": digest_of(KEY), "created": NOW})
    authenticator = Authenticator(KeyRing([key], {}), lambda: 0.0, lambda: NOW)
    house = House(ScriptedOrigin(0), ScriptedOrigin(0))
    async with house.open(EdgeConfig(http=("127.0.0.1:0",)), authenticator) as house.client:
        house.client.base_url = httpx.URL("http://127.0.0.1/v1")
        house.client.headers["Authorization"] = f"Bearer {KEY}"
        yield house


async def test_origins_of_one_ledger_are_counted_once(house: House) -> None:
    for origin in house.origins:
        says(origin, document("postgresql:1", 7, 9))
    told = (await house.client.get("/usage?by=model")).json()
    assert (told["total"]["streams"], told["total"]["output_tokens"]) == (2, 16)
    assert told["ledgers"] == ["postgresql:1"]
    assert asked(house.origins[0]) == [("GET", "usage?by=model")]


async def test_ledgers_are_added_up(house: House) -> None:
    says(house.origins[0], document("file:1", 7))
    says(house.origins[1], document("file:2", 9, 11))
    told = (await house.client.get("/usage?by=model")).json()
    [row] = told["usage"]
    assert row["model"] == "demo"
    assert (row["streams"], row["output_tokens"], row["delivered_tokens"]) == (3, 27, 6)
    assert told["ledgers"] == ["file:1", "file:2"]


async def test_operators_are_told_which_origin_is_missing(house: House) -> None:
    first, second = house.origins
    says(first, document("file:1", 7))
    second.stop()
    await until(lambda: not house.link.origins[1].usable)
    told = (await house.client.get("/usage?by=model")).json()
    assert told["total"]["streams"] == 1
    assert list(told["missing"]) == [house.address(1)]


async def test_a_query_that_makes_no_sense_reaches_no_origin(house: House) -> None:
    refused = await house.client.get("/usage?by=weather")
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "by")
    assert asked(house.origins[0]) == []


async def test_a_key_is_told_its_usage_and_what_is_left(keyed: House) -> None:
    says(keyed.origins[0], document("file:1", 7, spent=30))
    says(keyed.origins[1], document("file:2", 9, spent=90))
    told = (await keyed.client.get("/usage?by=model")).json()
    assert told["key"] == ID
    assert told["total"]["output_tokens"] == 16
    budget = {"period": "day", "tokens": 100, "used": 120, "remaining": 0}
    assert told["budgets"] == [budget | {"ends_ms": ENDS_MS["day"]}]
    [call] = [one for one in keyed.origins[0].received if isinstance(one, Call)]
    assert call.caller is not None
    assert (call.object, call.caller.key, call.caller.tokens_per_day) == ("usage", ID, 100)


async def test_a_bill_is_whole_or_refused(keyed: House) -> None:
    first, second = keyed.origins
    says(first, document("file:1", 7))
    second.stop()
    await until(lambda: not keyed.link.origins[1].usable)
    refused = await keyed.client.get("/usage?by=model")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "origin_unreachable")


async def test_an_edge_without_keys_has_no_usage_of_a_key(house: House) -> None:
    house.client.base_url = httpx.URL("http://127.0.0.1/v1")
    refused = await house.client.get("/usage")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
