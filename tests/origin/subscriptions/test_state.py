"""How many streams a subscription knows, and what it forgets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.objects.object import ObjectRequest
from tailrace.origin.subscriptions import index, object, state
from tailrace.origin.subscriptions.index import SCAN
from tailrace.origin.subscriptions.request import object_of
from tests.origin.subscriptions.subscription_world import SubscriptionWorld, subscriptions_at

pytestmark = pytest.mark.anyio

PULL = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wake/pool"}
BUDGET = 3


@pytest.fixture
async def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SubscriptionWorld]:
    for place in (state, object):
        monkeypatch.setattr(place, "MAX_LINKS", BUDGET)
    async with subscriptions_at(tmp_path) as made:
        yield made


async def pending(world: SubscriptionWorld) -> dict[str, Any]:
    status, claim = await world.ask("POST", "subscriptions/p/claim", {"worker": "w"})
    assert status == 200, claim
    return {link["path"]: link["acked_offset"] for link in claim["streams"] if link["has_pending"]}


async def test_a_stream_without_work_is_forgotten_for_one_that_has(
    world: SubscriptionWorld,
) -> None:
    for number in range(5):
        await world.put(f"events/{number}", b"[1]")
    await world.subscribe("p", **PULL)
    assert len(await world.acked("p")) == BUDGET
    before = await world.tail("events/4")
    await world.append("events/4")
    await world.append("events/4")
    assert await pending(world) == {"events/4": before}, "only what is new since it is told"
    assert len(await world.acked("p")) == BUDGET


async def test_work_beyond_the_budget_waits_for_the_streams_next_change(
    world: SubscriptionWorld,
) -> None:
    await world.subscribe("p", **PULL)
    for number in range(5):
        await world.put(f"events/{number}", b"[1]")
    assert await pending(world) == dict.fromkeys(("events/0", "events/1", "events/2"), "-1")


async def test_an_origin_that_starts_takes_no_forgotten_stream_for_a_new_one(
    world: SubscriptionWorld,
) -> None:
    for number in range(5):
        await world.put(f"events/{number}", b"[1]")
    await world.subscribe("p", **PULL)
    scan = ObjectRequest.internal(SCAN)
    assert (await world.runtime.fetch(object_of("subscriptions/p"), scan)).status == 204
    status, said = await world.ask("POST", "subscriptions/p/claim", {"worker": "w"})
    assert (status, said["error"]["code"]) == (409, "NO_PENDING_WORK")


async def test_no_more_streams_are_named_than_the_budget(world: SubscriptionWorld) -> None:
    await world.subscribe("p", **PULL | {"streams": ["a", "b"]})
    status, said = await world.ask("POST", "subscriptions/p/streams", {"streams": ["b", "c", "d"]})
    assert (status, said["error"]["code"]) == (429, "too_many_links")
    assert (await world.ask("POST", "subscriptions/p/streams", {"streams": ["b", "c"]}))[0] == 204


async def test_what_all_subscriptions_name_has_a_budget_of_bytes(
    world: SubscriptionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "MAX_ENTRY_BYTES", 300)
    await world.subscribe("a", **PULL | {"streams": ["x" * 100]})
    more = PULL | {"streams": ["y" * 100]}
    status, said = await world.ask("PUT", "subscriptions/b", more)
    assert (status, said["error"]["code"]) == (429, "too_many_subscriptions")
    await world.ask("DELETE", "subscriptions/a")
    await world.subscribe("b", **more)
