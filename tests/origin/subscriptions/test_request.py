"""Paths and URLs of the subscription API."""

from __future__ import annotations

import pytest

from tailrace.ledger.errors import CallerError, NotFound
from tailrace.ledger.interface import ObjectKey
from tailrace.origin.subscriptions.request import (
    INDEX_KEY,
    MAX_ID_CHARS,
    Action,
    Route,
    base_of,
    object_of,
    parse_route,
    route_of,
    url_of,
)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("subscriptions/a", Route("a", Action.ITSELF)),
        ("subscriptions/a%2Fb%20c", Route("a/b c", Action.ITSELF)),
        ("subscriptions/a/streams", Route("a", Action.STREAMS)),
        ("subscriptions/a/streams/x%2Fy", Route("a", Action.STREAM, "x/y")),
        ("subscriptions/a/streams/x/y", Route("a", Action.STREAM, "x/y")),
        ("subscriptions/a/callback", Route("a", Action.CALLBACK)),
        ("subscriptions/a/claim", Route("a", Action.CLAIM)),
        ("subscriptions/a/ack", Route("a", Action.ACK)),
        ("subscriptions/a/release", Route("a", Action.RELEASE)),
    ],
)
def test_a_path_names_a_subscription_and_what_is_asked_of_it(path: str, route: Route) -> None:
    assert parse_route(path) == route
    assert object_of(path) == ObjectKey("subscription", route.id)
    assert route_of(f"http://edge/v1/stream/__ds/{path}?x=1") == route


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "subscriptions",
        "subscriptions/",
        "subscriptions//claim",
        "subscriptions/a/",
        "subscriptions/a/steal",
        "subscriptions/a/claim/b",
        "subscriptions/a/stream",
        "subscriptions/%ff",
        "index",
        "jwks.json/x",
    ],
)
def test_whatever_else_is_nothing(path: str) -> None:
    with pytest.raises(NotFound) as caught:
        object_of(path)
    assert caught.value.code == "SUBSCRIPTION_NOT_FOUND"


@pytest.mark.parametrize("name", ["x" * (MAX_ID_CHARS + 1), "a%00", "a%0Ab", "%E2%80%AE"])
def test_an_id_has_a_longest_length_and_can_be_printed(name: str) -> None:
    assert object_of("subscriptions/" + "é" * MAX_ID_CHARS).name == "é" * MAX_ID_CHARS
    with pytest.raises(CallerError, match="the id of the subscription is not valid"):
        object_of(f"subscriptions/{name}")


def test_the_keys_are_the_indexs() -> None:
    assert object_of("jwks.json") == INDEX_KEY


def test_a_url_of_an_action_leads_back_to_it() -> None:
    base = base_of("https://edge.example:81/v1/stream/__ds/x?y=1")
    url = url_of(base, "a/b é", Action.CALLBACK)
    assert url.startswith("https://edge.example:81/v1/stream/__ds/subscriptions/a%2Fb")
    assert route_of(url) == Route("a/b é", Action.CALLBACK)
