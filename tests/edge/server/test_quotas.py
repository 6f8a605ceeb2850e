"""Headers about a tenant's limits, whoever answers: a route or the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tailrace.edge.access.keys import KeyRing, Limits
from tailrace.edge.errors import is_openai_path
from tailrace.ledger.errors import CallerError
from tests.edge.access.test_authenticator import KEY, api_key
from tests.edge.scripted_origin import ScriptedOrigin
from tests.edge.server.serving import serving

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "Once"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": MESSAGES}
EVENTS = {"Accept": "text/event-stream"}
ANSWERS: dict[str, tuple[str, str, dict[str, str], dict[str, Any] | None]] = {
    "events": ("POST", "/v1/generate", EVENTS, {"model": "demo", "prompt": "Once"}),
    "document": ("POST", "/v1/generate", {}, {"model": "demo", "prompt": "Once"}),
    "chat, streamed": ("POST", "/v1/chat/completions", {}, CHAT | {"stream": True}),
    "chat, whole": ("POST", "/v1/chat/completions", {}, CHAT),
    "response, streamed": (
        "POST",
        "/v1/responses",
        {},
        {"model": "demo", "input": "Once", "stream": True},
    ),
    "message, streamed": (
        "POST",
        "/v1/messages",
        {"Anthropic-Version": "2023-06-01"},
        CHAT | {"max_tokens": 8, "stream": True},
    ),
    "models": ("GET", "/v1/models", {}, None),
}
POLICY = '"requests";q=1;w=2, "tokens";q=600;qu="tokens";w=60'


@asynccontextmanager
async def limited(limits: Limits, origin: ScriptedOrigin) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a tenant with limits; the edge's clock stands still."""
    async with origin.listening(), serving(origin, allowed_origins=("*",)) as served:
        authenticator = served.context.rules.authenticator
        authenticator.ring = KeyRing([api_key()], {"acme": limits})
        authenticator.clock = lambda: 0.0
        key = {"Authorization": f"Bearer {KEY}", "Origin": "https://page.example"}
        url = f"http://127.0.0.1:{served.port}"
        async with httpx.AsyncClient(base_url=url, headers=key, timeout=60) as client:
            yield client


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_and_a_refusal_tell_the_limits(name: str) -> None:
    method, path, headers, body = ANSWERS[name]
    async with limited(Limits(requests_per_s=0.5, tokens_per_s=10), ScriptedOrigin(3)) as client:
        answer = await client.request(method, path, headers=headers, json=body)
        refused = await client.request(method, path, headers=headers, json=body)
    assert (answer.status_code, refused.status_code) == (200, 429)
    assert answer.headers["RateLimit"] == '"requests";r=0;t=2'
    assert refused.headers["RateLimit"] == f'"requests";r=0;t={refused.headers["Retry-After"]}'
    exposed = {each.lower() for each in answer.headers["access-control-expose-headers"].split(", ")}
    for each in (answer, refused):
        assert each.headers["RateLimit-Policy"] == POLICY
        of_openai = {key: value for key, value in each.headers.items() if "x-ratelimit" in key}
        if not is_openai_path(path):
            assert of_openai == {}
        else:
            assert of_openai["x-ratelimit-limit-requests"] == "1"
            assert of_openai["x-ratelimit-remaining-requests"] == "0"
            assert of_openai["x-ratelimit-limit-tokens"] == "600"
        assert {*of_openai, "ratelimit", "ratelimit-policy"} <= exposed


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "models"])
async def test_a_refusal_for_tokens_tells_that_there_are_none(name: str) -> None:
    method, path, headers, body = ANSWERS[name]
    origin = ScriptedOrigin(3)
    origin.refusal = CallerError(
        "too many", code="too_many_tokens", status=429, retryable=True, retry_after_ms=7_200
    )
    async with limited(Limits(requests_per_s=1, tokens_per_s=10), origin) as client:
        refused = await client.request(method, path, headers=headers, json=body)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "8")
    items = set(refused.headers["RateLimit"].split(", "))
    assert items == {'"requests";r=1;t=1', '"tokens";r=0;t=8'}
    if is_openai_path(path):
        assert refused.headers["x-ratelimit-limit-tokens"] == "600"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert refused.headers["x-ratelimit-reset-tokens"] == "8s"


async def test_without_limits_nothing_is_told() -> None:
    method, path, headers, body = ANSWERS["chat, streamed"]
    async with limited(Limits(), ScriptedOrigin(3)) as client:
        answer = await client.request(method, path, headers=headers, json=body)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if "ratelimit" in name]
