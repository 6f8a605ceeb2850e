"""`/v1/admin/…` over real links to origins that say what the test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import httpx
import pytest

from tailrace.edge.access.authenticator import Authenticator
from tailrace.edge.access.keys import ApiKey, KeyRing, digest_of, make_key
from tailrace.edge.admin.routes import WARM_ORDERS
from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig, access_rules
from tailrace.ledger.errors import NotFound
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.frame import Answer, Body, BodyEnd, Call, error_frame
from tailrace.ledger.links.rights import ALL_RIGHTS, DEFAULT_TENANT, OF_A_STREAM, Right
from tests.edge.scripted_origin import ScriptedOrigin, linked, until

pytestmark = pytest.mark.anyio

ID = "ab" * 16


def says(origin: ScriptedOrigin, document: Any, status: int = 200) -> None:
    """To whatever it is asked from now on."""
    body = json.dumps(document).encode()
    origin.answers = (Answer(status, ()), Body(body), BodyEnd())


def page(origin: int, *rows: dict[str, Any], ended: tuple[dict[str, Any], ...] = ()) -> Any:
    return {
        "now_ms": 1000 + origin,
        "live": 5,
        "paused": 1,
        "states": {"running": 4, "waiting": origin},
        "found": 5,
        "streams": rows,
        "ended": ended,
        "cursor": f"c{origin}.7",
    }


def asked(origin: ScriptedOrigin) -> list[tuple[str, str]]:
    return [
        (call.method, call.url.removeprefix("http://operator/"))
        for call in origin.received
        if isinstance(call, Call)
    ]


class House:
    """An edge's application with several origins, and a client for it."""

    def __init__(self, *origins: ScriptedOrigin) -> None:
        self.origins = origins
        self.client: httpx.AsyncClient

    @asynccontextmanager
    async def open(
        self, config: EdgeConfig, authenticator: Authenticator | None = None
    ) -> AsyncIterator[httpx.AsyncClient]:
        async with AsyncExitStack() as stack:
            for origin in self.origins:
                await stack.enter_async_context(origin.listening())
            link = await stack.enter_async_context(linked(*self.origins, backoff=Backoff(0, 0)))
            self.app = create_app(link, config, access_rules(config, authenticator))
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/v1/admin")
            self.link = link
            yield await stack.enter_async_context(client)

    def address(self, number: int) -> str:
        return f"127.0.0.1:{self.origins[number].port}"


LOOPBACK = EdgeConfig(http=("127.0.0.1:0",), operator_without_key=True)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House(ScriptedOrigin(0), ScriptedOrigin(0))
    async with house.open(LOOPBACK) as house.client:
        yield house


async def test_every_origin_answers_for_itself_and_one_that_is_gone_has_an_error(
    house: House,
) -> None:
    first, second = house.origins
    says(first, {"room": 1})
    says(second, {"room": 2})
    told = (await house.client.get("/pool")).json()
    assert told["origins"] == [
        {"origin": house.address(0), "room": 1},
        {"origin": house.address(1), "room": 2},
    ]
    second.stop()
    await until(lambda: not house.link.origins[1].usable)
    one, gone = (await house.client.get("/pool")).json()["origins"]
    assert one["room"] == 1 and gone["error"]["code"] == "origin_unreachable"
    health = (await house.client.get("/health")).json()
    assert [origin["up"] for origin in health["origins"]] == [True, False]
    assert health["edge"]["ready"]


async def test_a_change_goes_to_every_origin_or_to_the_one_that_is_named(house: House) -> None:
    for origin in house.origins:
        says(origin, {"pinned": True})
    told = await house.client.post("/warm/pin", json={"model": "a"})
    assert [one["pinned"] for one in told.json()["origins"]] == [True, True]
    await house.client.post(f"/warm/prewarm?origin={house.address(1)}", json={"model": "a"})
    first, second = (asked(origin) for origin in house.origins)
    assert first == [("POST", "warm/pin?")]
    assert second == [("POST", "warm/pin?"), ("POST", "warm/prewarm?")]
    assert (await house.client.get("/warm/pin")).status_code == 405
    says(house.origins[0], {"models": []})
    await house.client.get(f"/warm/explain?model=a&origin={house.address(0)}")
    assert asked(house.origins[0])[-1] == ("GET", "warm/explain?model=a")


@pytest.mark.parametrize("order", WARM_ORDERS)
async def test_an_order_that_no_origin_has_carried_out_is_an_error(
    house: House, order: str
) -> None:
    first, second = house.origins
    second.stop()
    await until(lambda: not house.link.origins[1].usable)
    says(first, {"pinned": True})
    answer = await house.client.post(f"/{order}", json={"model": "a"})
    done, gone = answer.json()["origins"]
    assert (answer.status_code, done["pinned"]) == (200, True)
    assert gone["error"]["code"] == "origin_unreachable"
    says(first, {"error": {"message": "no model is called 'a'", "code": "invalid_request"}}, 400)
    answer = await house.client.post(f"/{order}", json={"model": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    first.stop()
    await until(lambda: not house.link.origins[0].usable)
    answer = await house.client.post(f"/{order}", json={"model": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "origin_unreachable")


async def test_streams_of_several_origins_are_one_sorted_page(house: House) -> None:
    first, second = house.origins
    says(first, page(0, {"id": "a", "tokens": 9}, {"id": "b", "tokens": 3}))
    says(
        second,
        page(
            1,
            {"id": "c", "tokens": 8},
            {"id": "d", "tokens": None},
            ended=({"id": "e", "ended_ms": 4},),
        ),
    )
    got = await house.client.get("/streams?sort=tokens&offset=1&limit=2&since=c0.1,c1.1")
    told = got.json()
    assert [(row["id"], row["origin"]) for row in told["streams"]] == [
        ("c", house.address(1)),
        ("b", house.address(0)),
    ]
    assert (told["live"], told["found"], told["paused"]) == (10, 10, 2)
    assert told["states"] == {"running": 8, "waiting": 1}
    assert told["cursor"] == "c0.7,c1.7" and told["now_ms"] == 1001
    assert [one["id"] for one in told["ended"]] == ["e"]
    for origin in house.origins:  # both from the first row: the edge cuts the merged list
        assert asked(origin) == [("GET", "streams?sort=tokens&offset=0&limit=3&since=c0.1%2Cc1.1")]
    far = await house.client.get("/streams?offset=950&limit=51")
    assert far.status_code == 400 and "origin=ADDRESS" in far.json()["error"]["hint"]


async def test_of_one_origin_any_page_can_be_had(house: House) -> None:
    says(house.origins[0], page(0, {"id": "a", "began_ms": 1}))
    where = house.address(0)
    got = await house.client.get("/streams", params={"offset": "9000", "origin": where})
    assert [row["id"] for row in got.json()["streams"]] == ["a"]
    assert asked(house.origins[0]) == [("GET", "streams?offset=9000")]
    assert asked(house.origins[1]) == []
    unknown = await house.client.get("/pool?origin=elsewhere:1")
    assert unknown.status_code == 404 and where in unknown.json()["error"]["hint"]


async def test_one_stream_is_that_of_the_origin_that_has_it_now(house: House) -> None:
    first, second = house.origins
    says(first, {"id": ID, "live": None, "lately": None})  # both origins share the ledger
    says(second, {"id": ID, "live": {"state": "running"}, "lately": None})
    told = (await house.client.get(f"/streams/{ID}?text=1")).json()
    assert told["origin"] == house.address(1)
    assert asked(second) == [("GET", f"streams/{ID}?text=1")]
    cancelled = await house.client.post(f"/streams/{ID}/cancel")
    assert cancelled.status_code == 200
    # Only the origin that has the stream gets the POST; the other gets a GET.
    assert asked(second)[-2:] == [("GET", f"streams/{ID}?"), ("POST", f"streams/{ID}/cancel?")]
    assert [method for method, _ in asked(first)] == ["GET", "GET"]


async def test_what_all_origins_refuse_is_refused(house: House) -> None:
    refusal = {"code": "unknown_stream", "message": "none", "retryable": False}
    for origin in house.origins:
        says(origin, {"error": refusal}, 404)
    got = await house.client.get(f"/streams/{ID}")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "unknown_stream")
    for origin in house.origins:  # like an origin of an older version
        origin.answers = (error_frame(NotFound("no objects of class 'operator'")),)
    got = await house.client.get("/pool")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "not_found")
    assert (await house.client.get("/streams/xyz")).status_code == 404
    assert (await house.client.get("/nothing")).status_code == 404
    assert (await house.client.get("/streams?limit=x")).status_code == 400
    assert (await house.client.post("/pool")).status_code == 405


# ---- who is an operator ----


def authenticator_with(
    *rights: Right, tenant: str = DEFAULT_TENANT
) -> tuple[Authenticator, list[str]]:
    """Return a authenticator with a key for each of these rights."""
    keys, texts = [], []
    for number, one in enumerate(rights):
        id_, text = make_key(lambda size, number=number: bytes([number]) * size)  # type: ignore[misc]
        said = {"id": id_, "name": f"key{number}", "tenant": tenant, "sha256": digest_of(text)}
        keys.append(ApiKey.model_validate(said | {"rights": one, "created": datetime.now(UTC)}))
        texts.append(text)
    return Authenticator(KeyRing(keys, {}), monotonic, lambda: datetime.now(UTC)), texts


async def test_where_there_are_keys_only_those_of_operators_open_this() -> None:
    authenticator, (user, operator) = authenticator_with(OF_A_STREAM | Right.GENERATE, ALL_RIGHTS)
    house = House(ScriptedOrigin(0))
    says(house.origins[0], {"room": 1})
    async with house.open(EdgeConfig(http=("0.0.0.0:0",)), authenticator) as client:
        codes = []
        for headers in ({}, {"Authorization": f"Bearer {user}"}):
            got = await client.get("/pool", headers=headers)
            codes.append((got.status_code, got.json()["error"]["code"]))
        assert codes == [(401, "no_key"), (403, "missing_right")]
        token = await client.get(f"/streams/{ID}?token=v1.x", headers={"Tailrace-Token": "v1.x"})
        assert token.status_code == 401
        assert asked(house.origins[0]) == []
        got = await client.get("/pool", headers={"Authorization": f"Bearer {operator}"})
        assert got.json()["origins"][0]["room"] == 1
        [call] = [frame for frame in house.origins[0].received if isinstance(frame, Call)]
        assert call.caller is not None and Right.ADMIN in Right(call.caller.rights)


LOCAL = {"http": ("127.0.0.1:0",), "operator_without_key": True}


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        (LOCAL, {}, 200),
        (LOCAL, {"Origin": "http://127.0.0.1"}, 200),
        (LOCAL, {"Host": "localhost:8080"}, 200),
        (LOCAL, {"Host": "[::1]:8080"}, 200),
        (LOCAL | {"allowed_origins": ("*",)}, {"Origin": "http://b.org"}, 403),
        (LOCAL, {"Host": "rebound.example"}, 421),
        (LOCAL, {"Host": "203.0.113.5"}, 403),
        (LOCAL | {"hosts": ("edge.example",)}, {"Host": "edge.example"}, 403),
        (LOCAL, {"Via": "1.1 proxy"}, 403),
        (LOCAL, {"Forwarded": "for=203.0.113.5"}, 403),
        (LOCAL, {"X-Forwarded-For": "127.0.0.1"}, 403),
        (LOCAL, {"X-Forwarded-Proto": "https"}, 403),
        (LOCAL, {"X-Real-IP": "127.0.0.1"}, 403),
        ({"http": ("127.0.0.1:0",)}, {}, 403),
        ({"http": ("127.0.0.1:0",), "trusted_proxies": ("127.0.0.1",)}, {}, 403),
        ({"http": ("0.0.0.0:0",), "allow_public_without_keys": True}, {}, 403),
    ],
)
async def test_without_keys_only_this_machine_operates_an_edge_and_only_where_that_is_set(
    settings: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    house = House(ScriptedOrigin(0))
    says(house.origins[0], {"room": 1})
    async with house.open(EdgeConfig(**settings)) as client:
        assert (await client.get("/pool", headers=headers)).status_code == status
        assert len(asked(house.origins[0])) == (status == 200)


async def test_http_1_0_counts_as_a_proxy() -> None:
    """A request over HTTP/1.0, as nginx makes it by default, may have any client behind it."""
    house = House(ScriptedOrigin(0))
    says(house.origins[0], {"room": 1})
    async with house.open(LOOPBACK) as client:
        app = house.app

        async def as_1_0(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "http_version": "1.0"}, receive, send)

        transport = httpx.ASGITransport(as_1_0)
        async with httpx.AsyncClient(transport=transport, base_url=client.base_url) as old:
            answer = await old.get("/pool")
        assert (answer.status_code, asked(house.origins[0])) == (403, [])


async def test_a_key_of_one_tenant_is_no_operators_whatever_its_file_says() -> None:
    authenticator, (operator,) = authenticator_with(ALL_RIGHTS, tenant="acme")
    house = House(ScriptedOrigin(0))
    says(house.origins[0], {"room": 1})
    async with house.open(EdgeConfig(http=("0.0.0.0:0",)), authenticator) as client:
        headers = {"Authorization": f"Bearer {operator}"}
        for path in ("/pool", "/streams", f"/streams/{ID}?text=1", f"/streams/{ID}/frames"):
            got = await client.get(path, headers=headers)
            assert (got.status_code, got.json()["error"]["code"]) == (403, "missing_right")
        got = await client.post(f"/streams/{ID}/cancel", headers=headers)
        assert got.status_code == 403
        assert asked(house.origins[0]) == []
