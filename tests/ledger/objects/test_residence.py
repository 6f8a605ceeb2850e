"""How long an instance stays: eviction, live bodies, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tailrace.ledger.errors import (
    Unavailable,
)
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.object import LiveBody, ObjectLimits, ObjectRequest, ObjectResponse
from tests.ledger.objects.object_world import BASIC, KEY, Scripted, World, step, world_at

pytestmark = pytest.mark.anyio


# ---- eviction, closing ----


async def test_an_idle_object_is_evicted_and_comes_back_as_it_was_stored(world: World) -> None:
    await world.ask("put", b"kept")
    world.made[0].memory["gone"] = True
    await world.runtime.wake_due()
    assert world.runtime.resident == 1
    world.clock.now += 60_000
    await world.runtime.wake_due()
    assert world.runtime.resident == 0
    assert await world.ask("get") == b"kept"
    assert len(world.made) == 2 and world.made[1].memory == {}


async def test_beyond_its_limit_the_runtime_evicts_who_is_idle_longest_and_nobody_busy(
    tmp_path: Path,
) -> None:
    async with world_at(tmp_path, dict(BASIC)) as world:
        world.limits = ObjectLimits(resident=3)
        world.runtime = world.another_runtime()
        signal = asyncio.Event()

        async def wait(target: Scripted, request: ObjectRequest) -> bytes:
            await target.context.outside(signal.wait())
            return b"done"

        world.scripts["wait"] = wait
        await world.ask("get", of=ObjectKey("thing", "busy"))  # the object was idle once
        busy = world.asking("wait", of=ObjectKey("thing", "busy"))
        await step()
        for number in range(5):
            await world.ask("get", of=ObjectKey("thing", str(number)))
        assert world.runtime.resident == 3
        made = len(world.made)
        for name in ("4", "3"):
            await world.ask("get", of=ObjectKey("thing", name))
        assert len(world.made) == made
        await world.ask("get", of=ObjectKey("thing", "2"))  # in the place of 4
        assert len(world.made) == made + 1
        await world.ask("get", of=ObjectKey("thing", "3"))
        assert len(world.made) == made + 1
        signal.set()
        assert await busy == b"done"


async def test_an_object_with_a_live_body_stays_until_the_body_is_closed(world: World) -> None:
    closed: list[bool] = []

    async def live(target: Scripted, request: ObjectRequest) -> ObjectResponse:
        async def body() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"chunk"
            finally:
                closed.append(True)

        return ObjectResponse(200, (), body())

    world.scripts["live"] = live
    answer = await world.runtime.fetch(KEY, ObjectRequest("GET", "live"))
    unread = await world.runtime.fetch(KEY, ObjectRequest("GET", "live"))
    assert not isinstance(answer.body, bytes) and not isinstance(unread.body, bytes)
    assert await anext(answer.body) == b"chunk"
    for body in (answer.body, unread.body):
        world.clock.now += 60_000
        await world.runtime.wake_due()
        assert world.runtime.resident == 1
        assert isinstance(body, LiveBody)
        await body.aclose()
    assert closed == [True]  # the other one had not begun
    world.clock.now += 60_000
    await world.runtime.wake_due()
    assert world.runtime.resident == 0


async def test_a_live_body_of_an_instance_that_was_lost_ends_with_its_error(
    world: World,
) -> None:
    async def live(target: Scripted, request: ObjectRequest) -> ObjectResponse:
        async def body() -> AsyncIterator[bytes]:
            while True:
                yield b"chunk"

        return ObjectResponse(200, (), body())

    world.scripts["live"] = live
    answer = await world.runtime.fetch(KEY, ObjectRequest("GET", "live"))
    assert not isinstance(answer.body, bytes)
    assert await anext(answer.body) == b"chunk"
    await world.store.claim(KEY)
    await world.ask("get")
    with pytest.raises(Unavailable):
        await anext(answer.body)


async def test_close_ends_who_waits_outside_and_stores_what_they_change(world: World) -> None:
    async def wait(target: Scripted, request: ObjectRequest) -> bytes:
        try:
            await target.context.outside(asyncio.Event().wait())
        finally:
            target.context.storage.put("value", b"closed well")
        return b""

    world.scripts["wait"] = wait
    waiting = world.asking("wait")
    await step()
    await world.runtime.close()
    with pytest.raises(Unavailable) as caught:
        await waiting
    assert caught.value.code == "closing"
    with pytest.raises(Unavailable):
        await world.ask("get")
    world.runtime = world.another_runtime()
    assert await world.ask("get") == b"closed well"
    await world.runtime.close()


async def test_close_cuts_what_does_not_end(tmp_path: Path) -> None:
    async def hang(target: Scripted, request: ObjectRequest) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with world_at(tmp_path, {"hang": hang}) as world:
        world.limits = ObjectLimits(close_s=0.01)
        world.runtime = world.another_runtime()
        hanging = world.asking("hang")
        await step()
        await world.runtime.close()
        with pytest.raises(Unavailable):
            await hanging
