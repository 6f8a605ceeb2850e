"""The headers that tell a tenant its limits."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tailrace.edge.access.authenticator import OverLimit
from tailrace.edge.access.head import Head
from tailrace.edge.access.keys import Limits
from tailrace.edge.access.page_origins import EXPOSED_HEADERS
from tailrace.edge.errors import go_duration
from tests.edge.access.test_authenticator import KEY, House, api_key, asked

NATIVE, CHAT = "/v1/generate", "/v1/chat/completions"


def head(path: str) -> Head:
    return asked(path, ("authorization", f"Bearer {KEY}"))


def told(house: House, path: str = NATIVE) -> Mapping[str, str]:
    return house.authenticator.admit(head(path)).headers


def test_a_tenant_without_limits_is_told_nothing() -> None:
    assert told(House()) == {} == told(House(Limits()), CHAT)


def test_a_tenant_is_told_what_is_left_of_its_requests_until_it_is_refused() -> None:
    house = House(Limits(requests_per_s=2))
    policy = '"requests";q=4;w=2'
    for left, full_in_s in ((3, 1), (2, 1), (1, 2), (0, 2)):
        state = f'"requests";r={left};t={full_in_s}'
        assert told(house) == {"RateLimit-Policy": policy, "RateLimit": state}
    with pytest.raises(OverLimit) as refused:
        house.ask()
    after_ms = refused.value.retry_after_ms
    assert after_ms is not None
    # Retry-After and `t` are the same time.
    state = f'"requests";r=0;t={-(-after_ms // 1000)}'
    assert refused.value.headers == {"RateLimit-Policy": policy, "RateLimit": state}
    house.now_s = 100.0
    assert told(house)["RateLimit"] == '"requests";r=3;t=1'


def test_the_routes_of_openai_have_the_headers_of_its_api_as_well() -> None:
    house = House(Limits(requests_per_s=0.5, tokens_per_s=100))
    headers = told(house, CHAT)
    assert headers == {
        "RateLimit-Policy": '"requests";q=1;w=2, "tokens";q=6000;qu="tokens";w=60',
        "RateLimit": '"requests";r=0;t=2',
        "X-RateLimit-Limit-Requests": "1",
        "X-RateLimit-Remaining-Requests": "0",
        "X-RateLimit-Reset-Requests": "2s",
        "X-RateLimit-Limit-Tokens": "6000",
    }
    with pytest.raises(OverLimit) as refused:
        house.authenticator.admit(head(CHAT))
    assert refused.value.headers["X-RateLimit-Remaining-Requests"] == "0"
    assert {*headers} <= {*EXPOSED_HEADERS.split(", ")}


def test_requests_under_way_and_the_limits_of_origins_are_told() -> None:
    house = House(Limits(max_concurrent=2, max_unfinished=32))
    policy = '"concurrent";q=2;qu="concurrent-requests", "unfinished";q=32;qu="streams"'
    assert told(house) == {"RateLimit-Policy": policy, "RateLimit": '"concurrent";r=1'}
    assert told(house)["RateLimit"] == '"concurrent";r=0'
    with pytest.raises(OverLimit) as refused:
        house.ask()
    assert refused.value.headers["RateLimit"].startswith('"concurrent";r=0;t=')
    assert "X-RateLimit-Limit-Requests" not in told(House(Limits(max_concurrent=2)), CHAT)


@pytest.mark.parametrize("rate", [5e-324, 1e-9, 1e300])
def test_numbers_fit_a_structured_field(rate: float) -> None:
    house = House(Limits(requests_per_s=rate, tokens_per_s=10**18))
    assert all(len(value) < 120 for value in told(house, CHAT).values())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (8.2, "9s"), (59.5, "1m0s"), (360, "6m0s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


def test_a_key_is_told_its_budgets_also_if_its_tenant_has_no_limits() -> None:
    key = api_key(tokens_per_day=200, tokens_per_month=3000)
    day, month = '"tokens-day";q=200;qu="tokens";w=86400', '"tokens-month";q=3000;qu="tokens"'
    assert told(House(key=key)) == {"RateLimit-Policy": f"{day}, {month}"}
    assert told(House(key=key), CHAT) == {"RateLimit-Policy": f"{day}, {month}"}
    limited = told(House(Limits(tokens_per_s=1), key=key))
    assert limited["RateLimit-Policy"] == f'{day}, {month}, "tokens";q=60;qu="tokens";w=60'
