"""Subscriptions over real streams and a real ledger; the clock is the test's."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tailrace.origin.subscriptions.webhook import SIGNATURE
from tests.ledger.objects.object_world import crashed
from tests.origin.subscriptions.subscription_world import (
    BASE,
    MAX_SUBSCRIPTIONS,
    Post,
    Receiver,
    SubscriptionWorld,
    subscriptions_at,
)

pytestmark = pytest.mark.anyio

ZERO = "0000000000000000_0000000000000000"
PULL = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wake/pool"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[SubscriptionWorld]:
    async with subscriptions_at(tmp_path) as made:
        yield made


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    async with made.listening():
        yield made


def hook(receiver: Receiver, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "webhook", "pattern": "events/*", "webhook": {"url": receiver.url}}
    return wanted | {"lease_ttl_ms": 5000} | fields


def ack_of(post: Post, *, done: bool = True, **more: Any) -> dict[str, Any]:
    """Return the answer of a receiver that has handled everything that it was notified of."""
    said = post.json
    acks = [{"stream": s["path"], "offset": s["tail_offset"]} for s in said["streams"]]
    return {"wake_id": said["wake_id"], "generation": said["generation"], "acks": acks} | {
        "done": done,
        **more,
    }


async def call_back(world: SubscriptionWorld, post: Post, **more: Any) -> tuple[int, Any]:
    path = post.json["callback_url"].removeprefix(f"{BASE}/v1/stream/__ds/")
    return await world.ask("POST", path, ack_of(post, **more), post.json["callback_token"])


# ---- making, showing, ending ----


async def test_a_subscription_is_made_once_and_confirmed_by_the_same_request(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    wanted = hook(receiver, description="mine")
    made = await world.subscribe("a", **wanted)
    assert await world.ask("PUT", "subscriptions/a", wanted) == (200, made)
    assert made == await world.get("a")
    assert made["id"] == made["subscription_id"] == "a"
    assert (made["type"], made["pattern"], made["status"]) == ("webhook", "events/*", "active")
    assert made["webhook"]["signing"]["jwks_url"] == f"{BASE}/v1/stream/__ds/jwks.json"
    assert "secret" not in json.dumps(made)
    for other in ({"description": "other"}, {"lease_ttl_ms": 6000}, {"streams": ["x"]}):
        status, said = await world.ask("PUT", "subscriptions/a", wanted | other)
        assert (status, said["error"]["code"]) == (409, "SUBSCRIPTION_ALREADY_EXISTS")


async def test_a_deleted_subscription_is_as_if_it_had_never_been(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.subscribe("a", **hook(receiver))
    assert (await world.ask("DELETE", "subscriptions/a"))[0] == 204
    assert (await world.ask("DELETE", "subscriptions/a"))[0] == 204
    for method, path in (("GET", ""), ("POST", "/claim"), ("POST", "/callback")):
        status, said = await world.ask(method, f"subscriptions/a{path}", {"worker": "w"})
        assert (status, said["error"]["code"]) == (404, "SUBSCRIPTION_NOT_FOUND")
    await world.put("events/x")
    other = await world.subscribe("a", **hook(receiver, description="anew"))
    assert other["streams"] == [
        {"path": "events/x", "link_type": "glob", "acked_offset": await world.tail("events/x")}
    ]
    assert receiver.posts == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "type"),
        ({"type": "carrier pigeon"}, "type"),
        ({"type": "webhook", "webhook": {"url": "https://a.example"}}, None),
        ({"type": "webhook", "pattern": "a"}, None),
        ({"type": "webhook", "pattern": "a", "webhook": {}}, "webhook.url"),
        ({"type": "pull-wake", "pattern": "a"}, None),
        (PULL | {"pattern": "/"}, "pattern"),
        (PULL | {"lease_ttl_ms": 999}, "lease_ttl_ms"),
        (PULL | {"lease_ttl_ms": 600_001}, "lease_ttl_ms"),
        (PULL | {"lease_ttl_ms": "1000"}, "lease_ttl_ms"),
        (PULL | {"streams": [1]}, "streams[0]"),
        (PULL | {"streams": ["a/../b"]}, "streams[0]"),
        (PULL | {"streams": ["__ds/x"]}, "streams[0]"),
        (PULL | {"wake_stream": "a//b"}, "wake_stream"),
        (PULL | {"streams": ["a"] * 1001}, "streams"),
        ([], None),
    ],
)
async def test_a_bad_request_names_the_field(
    world: SubscriptionWorld, fields: Any, field: str | None
) -> None:
    status, said = await world.ask("PUT", "subscriptions/a", fields)
    assert (status, said["error"]["code"]) == (400, "INVALID_REQUEST")
    assert said["error"].get("field") == field


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1/hook", "https://169.254.169.254/", "http://localhost/", "x", ""]
)
async def test_an_unsafe_webhook_is_refused_before_anything_is_kept(
    world: SubscriptionWorld, url: str
) -> None:
    wanted = {"type": "webhook", "pattern": "a", "webhook": {"url": url}}
    status, said = await world.ask("PUT", "subscriptions/a", wanted)
    assert status == 400
    assert said["error"]["code"] in ("WEBHOOK_URL_REJECTED", "INVALID_REQUEST")
    assert (await world.ask("GET", "subscriptions/a"))[0] == 404


async def test_there_is_room_for_so_many_subscriptions_and_no_more(
    world: SubscriptionWorld,
) -> None:
    for number in range(MAX_SUBSCRIPTIONS):
        await world.subscribe(f"s{number}", **PULL)
    status, said = await world.ask("PUT", "subscriptions/more", PULL)
    assert (status, said["error"]["code"]) == (429, "too_many_subscriptions")
    assert (await world.ask("PUT", "subscriptions/s0", PULL))[0] == 200
    await world.ask("DELETE", "subscriptions/s0")
    await world.subscribe("more", **PULL)


async def test_a_method_that_a_path_does_not_have_is_refused(world: SubscriptionWorld) -> None:
    for method, path in (("POST", "a"), ("GET", "a/claim"), ("PUT", "a/streams")):
        status, _ = await world.ask(method, f"subscriptions/{path}")
        assert status == 405
    assert (await world.ask("GET", "jwks.json"))[0] == 200


# ---- webhooks ----


async def test_a_webhook_is_told_of_a_new_stream_and_its_body_is_signed(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    post = await receiver.post()
    assert post.json["subscription_id"] == "a"
    assert post.json["callback_url"] == f"{BASE}/v1/stream/__ds/subscriptions/a/callback"
    assert post.json["streams"] == [
        {
            "path": "events/x",
            "link_type": "glob",
            "acked_offset": "-1",
            "tail_offset": await world.tail("events/x"),
            "has_pending": True,
        }
    ]
    _, jwks = await world.ask("GET", "jwks.json")
    [jwk] = jwks["keys"]
    time, kid, signature = (part.partition("=")[2] for part in post.headers[SIGNATURE].split(","))
    assert (kid, jwk["kty"], jwk["crv"], jwk["alg"]) == (jwk["kid"], "OKP", "Ed25519", "EdDSA")
    key = Ed25519PublicKey.from_public_bytes(from_base64url(jwk["x"]))
    key.verify(from_base64url(signature), time.encode() + b"." + post.body)
    with pytest.raises(InvalidSignature):
        key.verify(from_base64url(signature), time.encode() + b"." + post.body + b" ")


def from_base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


async def test_what_was_there_before_wakes_nobody(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.put("events/old", b'{"n":1}')
    await world.put("named", b'{"n":1}')
    made = await world.subscribe("a", **hook(receiver, streams=["named", "absent"]))
    links = {link["path"]: (link["link_type"], link["acked_offset"]) for link in made["streams"]}
    assert links == {
        "events/old": ("glob", await world.tail("events/old")),
        "named": ("explicit", await world.tail("named")),
        "absent": ("explicit", ZERO),
    }
    await world.put("absent", b"[]")  # the stream exists now, and is empty
    await world.append("named")
    post = await receiver.post()
    pending = [stream["path"] for stream in post.json["streams"] if stream["has_pending"]]
    assert pending == ["named"]


async def test_an_answer_that_says_done_acknowledges_what_was_told_and_no_more(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    receiver.answer = b'{"done":true}'
    receiver.open.clear()
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    first = await receiver.post()
    await world.append("events/x")  # while the webhook works
    receiver.open.set()
    second = await receiver.post(2)
    assert second.json["generation"] == first.json["generation"] + 1
    assert second.json["streams"][0]["acked_offset"] == first.json["streams"][0]["tail_offset"]
    await world.until("a", "streams", [link(second.json["streams"][0])])


def link(stream: dict[str, Any]) -> dict[str, Any]:
    """Return how a stream of a notification is listed once all of it is acknowledged."""
    return {"path": stream["path"], "link_type": "glob", "acked_offset": stream["tail_offset"]}


async def test_a_callback_acknowledges_once_and_is_fenced_then(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    post = await receiver.post()
    assert await call_back(world, post) == (200, {"ok": True, "next_wake": False})
    assert await world.acked("a") == {"events/x": await world.tail("events/x")}
    status, said = await call_back(world, post)
    assert (status, said["error"]["code"]) == (409, "FENCED")
    assert len(receiver.posts) == 1


async def test_a_webhook_may_call_back_before_it_answers(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    receiver.open.clear()
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    post = await receiver.post()
    assert (await call_back(world, post))[0] == 200
    await world.append("events/x")
    receiver.status = 500  # its answers now concern a wake that is over
    receiver.open.set()
    again = await receiver.post(2)
    assert again.json["generation"] == 2


async def test_what_comes_while_somebody_works_waits_for_the_end_of_the_work(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    post = await receiver.post()
    for _ in range(5):
        await world.append("events/x")
    assert await call_back(world, post) == (200, {"ok": True, "next_wake": True})
    again = await receiver.post(2)
    assert again.json["streams"][0]["tail_offset"] == await world.tail("events/x")
    assert await call_back(world, again) == (200, {"ok": True, "next_wake": False})
    assert len(receiver.posts) == 2


async def test_a_webhook_that_fails_is_tried_again_with_the_same_wake(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    receiver.status = 503
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    first = await receiver.post()
    for count, delay_ms in ((2, 1000), (3, 2000), (4, 4000)):
        at_ms = await world.next_alarm_ms()
        assert abs(at_ms - world.clock.now - delay_ms) <= 0.2 * delay_ms
        assert (await world.get("a"))["status"] == "failed"
        assert len(receiver.posts) == count - 1
        if count == 4:
            receiver.status = 200
        world.clock.move_to(at_ms)
        last = await receiver.post(count)
    await world.until("a", "status", "active")
    assert last.json["wake_id"] == first.json["wake_id"]
    assert (await call_back(world, last))[0] == 200


async def test_a_lease_that_ends_wakes_anew_and_fences_the_one_before(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    post = await receiver.post()
    assert (await call_back(world, post, done=False, acks=[]))[0] == 200  # still at work
    world.clock.move_to(world.clock.now + 4_999)
    assert (await call_back(world, post, done=False, acks=[]))[0] == 200  # for 5 s more
    world.clock.move_to(world.clock.now + 4_999)
    assert len(receiver.posts) == 1
    world.clock.move_to(world.clock.now + 1)
    again = await receiver.post(2)
    assert again.json["generation"] == 2
    status, said = await call_back(world, post)
    assert (status, said["error"]["code"]) == (409, "FENCED")
    assert (await call_back(world, again))[0] == 200


@pytest.mark.parametrize("token", [None, "", "x", "1.x", "1", "1." + "A" * 43, "9" * 500])
async def test_a_forged_token_is_refused(
    world: SubscriptionWorld, receiver: Receiver, token: str | None
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    said = ack_of(await receiver.post())
    status, answer = await world.ask("POST", "subscriptions/a/callback", said, token)
    assert (status, answer["error"]["code"]) == (401, "TOKEN_INVALID")
    assert await world.acked("a") == {"events/x": "-1"}


async def test_a_token_of_another_subscription_is_no_token(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    post = await receiver.post()
    await world.subscribe("b", **hook(receiver))
    said = ack_of(post)
    token = post.json["callback_token"]
    status, _ = await world.ask("POST", "subscriptions/b/callback", said, token)
    assert status == 401


@pytest.mark.parametrize(
    "ack",
    [
        {"stream": "events/unknown", "offset": ZERO},
        {"stream": "events/x", "offset": "-1"},
        {"stream": "events/x", "offset": "now"},
        {"stream": "events/x", "offset": "zzz"},
        {"stream": "events/x", "offset": "9999999999999999_0000000000000000"},
        {"offset": ZERO},
    ],
)
async def test_an_offset_that_cannot_be_acknowledged_refuses_all(
    world: SubscriptionWorld, receiver: Receiver, ack: dict[str, str]
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    post = await receiver.post()
    good = {"stream": "events/x", "offset": await world.tail("events/x")}
    status, said = await call_back(world, post, acks=[good, ack])
    assert (status, said["error"]["code"]) == (409, "INVALID_OFFSET")
    assert await world.acked("a") == {"events/x": "-1"}
    assert (await call_back(world, post))[0] == 200  # the wake is still its own


async def test_an_acknowledgement_never_goes_back(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.put("events/x", b'{"n":1}')
    post = await receiver.post()
    assert (await call_back(world, post, done=False))[0] == 200
    back = [{"stream": "events/x", "offset": ZERO}]
    status, said = await call_back(world, post, acks=back)
    assert (status, said["error"]["code"]) == (409, "INVALID_OFFSET")


# ---- streams come and go ----


async def test_streams_are_added_and_taken_away_by_name(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.put("manual/b", b'{"n":1}')
    await world.subscribe("a", **hook(receiver, streams=["manual/a"]))
    added = {"streams": ["manual/b", "/events/c/"]}
    assert (await world.ask("POST", "subscriptions/a/streams", added))[0] == 204
    assert await world.acked("a") == {
        "manual/a": ZERO,
        "manual/b": await world.tail("manual/b"),
        "events/c": ZERO,
    }
    for path in ("manual%2Fb", "events/c", "never"):
        assert (await world.ask("DELETE", f"subscriptions/a/streams/{path}"))[0] == 204
    await world.append("manual/b")
    await world.put("events/c", b'{"n":1}')  # matched by the pattern still
    post = await receiver.post()
    assert {stream["path"] for stream in post.json["streams"]} == {"manual/a", "events/c"}
    bad: dict[str, Any]
    for bad in ({}, {"streams": []}, {"streams": [""]}, {"streams": "x"}):
        assert (await world.ask("POST", "subscriptions/a/streams", bad))[0] == 400


async def test_a_deleted_stream_is_forgotten_and_one_of_its_name_is_new(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    receiver.answer = b'{"done":true}'
    await world.subscribe("a", **hook(receiver, streams=["named"]))
    await world.put("events/x", b"[1,2,3]")
    await world.put("named", b"[1,2,3]")
    async with asyncio.timeout(20):
        while set((await world.acked("a")).values()) != {await world.tail("named")}:
            await world.clock.parks.get()
    await world.delete_stream("events/x")
    await world.delete_stream("named")
    assert await world.acked("a") == {"named": ZERO}
    count = len(receiver.posts)
    await world.put("events/x", b"[4]")
    post = await receiver.post(count + 1)
    [told] = [stream for stream in post.json["streams"] if stream["path"] == "events/x"]
    assert (told["acked_offset"], told["has_pending"]) == ("-1", True)


# ---- workers that pull ----


async def claimed(world: SubscriptionWorld, worker: str = "w1") -> Any:
    status, said = await world.ask("POST", "subscriptions/p/claim", {"worker": worker})
    assert status == 200, said
    return said


def holder(claim: Any, **more: Any) -> dict[str, Any]:
    return {"wake_id": claim["wake_id"], "generation": claim["generation"], **more}


async def wakes(world: SubscriptionWorld, count: int) -> list[Any]:
    """Return the first events in the wake stream."""
    async with asyncio.timeout(20):
        while len(items := await world.items("wake/pool")) < count:
            await world.clock.parks.get()
    return items


async def test_a_worker_is_told_by_a_stream_claims_acknowledges_and_is_fenced(
    world: SubscriptionWorld,
) -> None:
    await world.put("wake/pool")
    await world.subscribe("p", **PULL)
    await world.put("events/x", b'{"n":1}')
    [wake] = await wakes(world, 1)
    assert (wake["type"], wake["subscription_id"], wake["stream"]) == ("wake", "p", "events/x")
    claim = await claimed(world)
    assert wake["generation"] == claim["generation"] == 1
    status, said = await world.ask("POST", "subscriptions/p/claim", {"worker": "w2"})
    assert (status, said["error"]["code"]) == (409, "ALREADY_CLAIMED")
    assert (said["error"]["current_holder"], said["error"]["generation"]) == ("w1", 1)
    acks = [{"path": "events/x", "offset": await world.tail("events/x")}]
    said = holder(claim, acks=acks, done=True)
    answer = await world.ask("POST", "subscriptions/p/ack", said, claim["token"])
    assert answer == (200, {"ok": True, "next_wake": False})
    for action in ("ack", "release"):
        status, answer = await world.ask("POST", f"subscriptions/p/{action}", said, claim["token"])
        assert (status, answer["error"]["code"]) == (409, "FENCED")


async def test_a_claim_right_after_an_append_finds_it(world: SubscriptionWorld) -> None:
    await world.subscribe("p", **PULL)
    await world.put("events/x", b'{"n":1}')
    claim = await claimed(world)
    assert claim["streams"][0]["tail_offset"] == await world.tail("events/x")
    done = holder(claim, acks=[{"stream": "events/x", "offset": await world.tail("events/x")}])
    await world.ask("POST", "subscriptions/p/ack", done | {"done": True}, claim["token"])
    status, said = await world.ask("POST", "subscriptions/p/claim", {"worker": "w"})
    assert (status, said["error"]["code"]) == (409, "NO_PENDING_WORK")
    await world.append("events/x")
    assert (await claimed(world))["generation"] == 2


async def test_work_that_is_released_wakes_the_next(world: SubscriptionWorld) -> None:
    await world.put("wake/pool")
    await world.subscribe("p", **PULL)
    await world.put("events/x", b'{"n":1}')
    claim = await claimed(world)
    answer = await world.ask("POST", "subscriptions/p/release", holder(claim), claim["token"])
    assert answer == (204, None)
    events = await wakes(world, 1)
    assert events[-1]["generation"] == 2
    assert (await claimed(world, "w2"))["generation"] == 2


async def test_a_worker_that_dies_loses_its_lease(world: SubscriptionWorld) -> None:
    await world.put("wake/pool")
    await world.subscribe("p", **PULL, lease_ttl_ms=1000)
    await world.put("events/x", b'{"n":1}')
    await wakes(world, 1)
    dead = await claimed(world)
    world.clock.move_to(world.clock.now + 1000)
    assert [event["generation"] for event in await wakes(world, 2)] == [1, 2]
    await claimed(world, "w2")
    status, _ = await world.ask("POST", "subscriptions/p/ack", holder(dead), dead["token"])
    assert status == 409


async def test_what_a_worker_reads_ahead_it_may_acknowledge(world: SubscriptionWorld) -> None:
    await world.subscribe("p", **PULL)
    await world.put("events/x", b'{"n":1}')
    claim = await claimed(world)
    world.deaf = True  # the stream is on another origin
    await world.append("events/x")
    acks = [{"stream": "events/x", "offset": await world.tail("events/x")}]
    said = holder(claim, acks=acks, done=True)
    answer = await world.ask("POST", "subscriptions/p/ack", said, claim["token"])
    assert answer == (200, {"ok": True, "next_wake": False})


async def test_the_wake_stream_wakes_nobody_even_if_the_pattern_matches_it(
    world: SubscriptionWorld,
) -> None:
    await world.put("wake/pool")
    await world.subscribe("p", type="pull-wake", pattern="**", wake_stream="wake/pool")
    await world.put("events/x", b'{"n":1}')
    await wakes(world, 1)
    claim = await claimed(world)
    assert [stream["path"] for stream in claim["streams"]] == ["events/x"]


async def test_without_its_wake_stream_a_subscription_can_be_claimed_all_the_same(
    world: SubscriptionWorld,
) -> None:
    await world.subscribe("p", **PULL)
    await world.put("events/x", b'{"n":1}')
    assert (await claimed(world))["generation"] == 1


async def test_what_is_a_webhooks_is_not_a_workers_nor_the_other_way_round(
    world: SubscriptionWorld, receiver: Receiver
) -> None:
    await world.subscribe("a", **hook(receiver))
    await world.subscribe("p", **PULL)
    for path in ("a/claim", "a/ack", "a/release", "p/callback"):
        status, said = await world.ask("POST", f"subscriptions/{path}", {"worker": "w"}, "t")
        assert (status, said["error"]["code"]) == (400, "INVALID_REQUEST")


# ---- what survives ----


async def test_a_wake_that_was_not_told_is_told_after_a_crash(
    tmp_path: Path, receiver: Receiver
) -> None:
    (tmp_path / "one").mkdir()
    async with subscriptions_at(tmp_path / "one", rings=False) as world:
        await world.subscribe("a", **hook(receiver))
        await world.put("events/x", b'{"n":1}')
        await world.get("a")  # the subscription has heard of it, but sends no wake
        crashed(tmp_path / "one", tmp_path / "two")
    assert receiver.posts == []
    async with subscriptions_at(tmp_path / "two") as world:
        post = await receiver.post()
        assert (await call_back(world, post))[0] == 200


async def test_a_lease_ends_after_a_crash_too(tmp_path: Path, receiver: Receiver) -> None:
    (tmp_path / "one").mkdir()
    async with subscriptions_at(tmp_path / "one") as world:
        await world.subscribe("a", **hook(receiver))
        await world.put("events/x", b'{"n":1}')
        first = await receiver.post()
        assert (await call_back(world, first, done=False, acks=[]))[0] == 200
        now_ms = world.clock.now
        crashed(tmp_path / "one", tmp_path / "two")
    async with subscriptions_at(tmp_path / "two", now_ms=now_ms + 5_000) as world:
        post = await receiver.post(2)
        assert post.json["generation"] == 2
        _, jwks = await world.ask("GET", "jwks.json")
        kid = jwks["keys"][0]["kid"]
        assert f"kid={kid}," in first.headers[SIGNATURE]  # the key is the same


async def test_what_was_missed_is_found_when_the_next_origin_starts(
    tmp_path: Path, receiver: Receiver
) -> None:
    (tmp_path / "one").mkdir()
    async with subscriptions_at(tmp_path / "one") as world:
        await world.put("events/old", b'{"n":1}')
        await world.put("events/gone", b'{"n":1}')
        await world.subscribe("a", **hook(receiver))
        world.deaf = True  # the process dies between the write and the notification
        await world.append("events/old")
        await world.put("events/new", b'{"n":1}')
        await world.delete_stream("events/gone")
        crashed(tmp_path / "one", tmp_path / "two")
    async with subscriptions_at(tmp_path / "two"):
        post = await receiver.post()
        told = {stream["path"]: stream["has_pending"] for stream in post.json["streams"]}
        assert told == {"events/old": True, "events/new": True}
