"""Authentication by API key, and the limits of a tenant."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tailrace.edge.access.authenticator import ANONYMOUS, Authenticator, Grant
from tailrace.edge.access.head import Head
from tailrace.edge.access.keys import ApiKey, KeyRing, Limits, digest_of, make_key
from tailrace.ledger.errors import CallerError, Unauthorized
from tailrace.ledger.frame import Caller
from tailrace.ledger.links.rights import Right

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ID, KEY = make_key(lambda count: b"\x07" * count)
STREAM = "0123456789abcdef" * 2


def api_key(**changes: Any) -> ApiKey:
    said = {"id": ID, "name": "web", "tenant": "acme", "rights": ["generate", "read"]}
    return ApiKey.model_validate(said | {"sha256": digest_of(KEY), "created": NOW} | changes)


class House:
    """An authenticator with one key, on a clock that is moved by hand."""

    def __init__(self, limits: Limits | None = None, key: ApiKey | None = None) -> None:
        self.now_s = 0.0
        ring = KeyRing([key or api_key()], {"acme": limits or Limits()})
        self.authenticator = Authenticator(ring, lambda: self.now_s, lambda: NOW)

    def ask(self) -> Caller | None:
        return self.authenticator.admit(
            asked("/v1/generate", ("authorization", f"Bearer {KEY}"))
        ).caller


def asked(path: str, *headers: tuple[str, str], method: str = "POST") -> Head:
    raw = tuple((name.encode(), value.encode()) for name, value in headers)
    return Head(method, path, "http", "127.0.0.1", raw)


def test_without_keys_everybody_is_let_in_as_nobody_in_particular() -> None:
    authenticator = Authenticator(None, lambda: 0.0, lambda: NOW)
    head = asked("/v1/generate", ("authorization", "Bearer of-somebody-else"))
    assert authenticator.admit(head) == Grant(None, head)


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("authorization", f"Bearer {KEY}", ()),
        ("authorization", f"bearer  {KEY} ", ()),
        ("tailrace-key", KEY, ()),
        ("x-api-key", KEY, ()),
        ("sec-websocket-protocol", f"tailrace-key.{KEY}", ()),
        (
            "sec-websocket-protocol",
            f"tailrace, tailrace-key.{KEY}",
            ((b"sec-websocket-protocol", b"tailrace"),),
        ),
    ],
)
def test_a_key_says_who_asks_and_goes_no_further(
    name: str, value: str, left: tuple[tuple[bytes, bytes], ...]
) -> None:
    house = House(Limits(max_unfinished=5, tokens_per_s=100))
    grant = house.authenticator.admit(asked("/v1/ws", ("x", "y"), (name, value)))
    assert grant.caller == Caller("acme", Right.GENERATE | Right.READ, 5, 100, ID)
    assert grant.head.headers == ((b"x", b"y"), *left)


def test_a_bearer_token_that_is_no_key_is_for_the_origin() -> None:
    head = asked("/healthz", ("authorization", "Bearer of-a-subscription"))
    assert House().authenticator.admit(head) == Grant(ANONYMOUS, head)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (KEY[:-1] + ("A" if KEY[-1] != "A" else "B"), api_key()),
        (KEY.replace(ID, "0" * 12), api_key()),
        ("tr_", api_key()),
        ("tr_" + "é" * 40, api_key()),
        (KEY, api_key(revoked=NOW)),
        (KEY[:-1] + ("A" if KEY[-1] != "A" else "B"), api_key(expires=NOW)),
        (KEY, api_key(expires=NOW, revoked=NOW)),
        (KEY, api_key(sha256="0" * 64)),
    ],
)
def test_any_other_key_is_refused_with_one_text(text: str, key: ApiKey) -> None:
    house = House(key=key)
    with pytest.raises(Unauthorized, match="the API key is not valid") as refused:
        house.authenticator.admit(asked("/v1/generate", ("tailrace-key", text)))
    assert (refused.value.status, refused.value.code) == (401, "bad_key")
    assert text not in str(refused.value)


def test_an_expired_key_is_told_the_date_to_whoever_has_all_of_it() -> None:
    house = House(key=api_key(expires=NOW))
    with pytest.raises(Unauthorized, match=f"the API key expired on {NOW:%Y-%m-%d}") as refused:
        house.authenticator.admit(asked("/v1/generate", ("tailrace-key", KEY)))
    assert (refused.value.status, refused.value.code) == (401, "bad_key")


def test_a_key_is_good_until_it_expires() -> None:
    assert House(key=api_key(expires=NOW + timedelta(seconds=1))).ask() is not None


@pytest.mark.parametrize(
    ("path", "token", "is_let_in"),
    [
        ("/healthz", False, True),
        ("/readyz", False, True),
        ("/version", False, True),
        ("/", False, True),
        ("/web/tailrace/index.js", False, True),
        ("/web", False, False),
        ("/v1/ws", False, True),  # each of its frames has a token, or is refused
        ("/v1/generate", True, False),
        (f"/v1/generate/{STREAM}", True, True),
        (f"/v1/generate/{STREAM}", False, False),
        (f"/v1/generate/{STREAM}/cancel", True, True),
        (f"/v1/generate/{STREAM}/steer", True, True),
        (f"/v1/stream/{STREAM}", True, True),
        (f"/v1/stream/{STREAM}", False, False),
        ("/v1/stream/notes", True, False),
        ("/v1/stream/__ds/jwks.json", True, False),
        ("/nothing", True, False),
    ],
)
def test_without_a_key_only_a_resume_token_can_speak(
    path: str, token: bool, is_let_in: bool
) -> None:
    authenticator = House().authenticator
    heads = [(asked(path, *([("tailrace-token", "v1.x")] if token else [])), False)]
    heads += [(asked(path), True)] if token else []
    for head, in_query in heads:
        if is_let_in:
            assert authenticator.admit(head, has_token=in_query).caller == ANONYMOUS
        else:
            with pytest.raises(Unauthorized) as refused:
                authenticator.admit(head, has_token=in_query)
            assert refused.value.code == "no_key"


def test_a_key_is_heard_where_it_opens_more_and_nowhere_else_that_is_open() -> None:
    house, wrong = House(), ("tailrace-key", "tr_wrong")
    key = ("tailrace-key", KEY)
    assert house.authenticator.admit(asked("/readyz", key)).caller == house.ask()
    assert house.authenticator.admit(asked("/healthz", key)).caller == ANONYMOUS
    assert house.authenticator.admit(asked("/healthz", wrong)).caller == ANONYMOUS
    with pytest.raises(Unauthorized):
        house.authenticator.admit(asked("/readyz", wrong))


def test_requests_are_bounded_by_tenant_and_come_again_with_time() -> None:
    house = House(Limits(requests_per_s=2))
    for _ in range(4):  # the tenant's requests for REQUEST_BURST_S
        house.ask()
    with pytest.raises(CallerError) as refused:
        house.ask()
    error = refused.value
    assert (error.status, error.code, error.retryable) == (429, "too_many_requests", True)
    assert error.retry_after_ms is not None and error.retry_after_ms >= 500
    house.now_s = 0.5
    house.ask()


def test_requests_under_way_are_bounded_by_tenant() -> None:
    house = House(Limits(max_concurrent=2))
    first, _ = house.ask(), house.ask()
    with pytest.raises(CallerError, match="this tenant already has 2 requests under way"):
        house.ask()
    house.authenticator.done(first)
    house.ask()
    house.authenticator.done(ANONYMOUS)
    house.authenticator.done(None)


def test_a_key_that_is_made_has_a_secret_that_is_not_kept() -> None:
    drawn = [bytes([n]) * 40 for n in range(4)]
    id_, text = make_key(lambda count: drawn.pop()[:count])
    assert text.startswith(f"tr_{id_}_") and len(text) == 59
    key = api_key(id=id_, rights=["admin"], sha256=digest_of(text))
    assert KeyRing([key], {}).find(text, NOW) == key
    assert text.split("_", 2)[2] not in repr(key)
