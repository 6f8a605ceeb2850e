"""Input gates on a real ledger: one event at a time in an object, and eviction."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.ledger.errors import (
    Conflict,
    Overloaded,
    Unavailable,
)
from tailrace.ledger.objects.object import (
    DurableObject,
    ObjectLimits,
    ObjectRequest,
    ObjectResponse,
)
from tests.ledger.objects.object_world import BASIC, KEY, OTHER, Scripted, World, step, world_at

pytestmark = pytest.mark.anyio


# ---- the input gate ----


async def test_a_hundred_concurrent_increments_give_a_hundred(world: World) -> None:
    counts = await asyncio.gather(*(world.ask("increment") for _ in range(100)))
    assert sorted(int(count) for count in counts) == list(range(1, 101))
    assert len(world.made) == 1


async def test_increments_that_wait_for_storage_before_they_write_lose_nothing(
    world: World,
) -> None:
    async def slow(target: Scripted, request: ObjectRequest) -> bytes:
        storage = target.context.storage
        count = int(await storage.get("count") or b"0")
        await storage.get(f"not in the cache: {request.body.decode()}")
        await storage.list(limit=1)
        await storage.sync()
        storage.put("count", str(count + 1).encode())
        return b""

    world.scripts["slow"] = slow
    await asyncio.gather(*(world.ask("slow", str(number).encode()) for number in range(100)))
    assert world.store.reads >= 100
    assert await world.ask("increment") == b"101"


async def test_no_event_comes_in_while_storage_is_read_or_synced(world: World) -> None:
    trace: list[str] = []

    async def visit(target: Scripted, request: ObjectRequest) -> bytes:
        name = request.body.decode()
        for number in range(3):
            trace.append(name)
            await target.context.storage.get(f"{name} {number}")
            target.context.storage.put(f"{name} {number}", b"")
            await target.context.storage.sync()
        return b""

    world.scripts["visit"] = visit
    await asyncio.gather(*(world.ask("visit", name) for name in (b"a", b"b", b"c")))
    assert trace == list("aaabbbccc")


async def test_others_come_in_while_an_event_is_outside_and_it_comes_back_in_turn(
    world: World,
) -> None:
    trace: list[str] = []
    signal = asyncio.Event()

    async def wait(target: Scripted, request: ObjectRequest) -> bytes:
        trace.append("wait")
        await target.context.outside(signal.wait())
        trace.append("back")
        return b""

    async def wake(target: Scripted, request: ObjectRequest) -> bytes:
        signal.set()
        await target.context.storage.get("not in the cache")
        trace.append("woke")
        return b""

    world.scripts.update(wait=wait, wake=wake)
    waiting = world.asking("wait")
    await step()
    await world.ask("wake")
    await waiting
    assert trace == ["wait", "woke", "back"]


async def test_an_object_that_is_called_back_by_the_one_it_calls_does_not_deadlock(
    world: World,
) -> None:
    async def there(target: Scripted, request: ObjectRequest) -> bytes:
        target.context.storage.put("value", b"from there")
        answer = await target.context.call(OTHER, ObjectRequest("GET", "back"))
        assert isinstance(answer.body, bytes)
        return answer.body

    async def back(target: Scripted, request: ObjectRequest) -> ObjectResponse:
        return await target.context.call(KEY, ObjectRequest("GET", "get"))

    world.scripts.update(there=there, back=back)
    assert await world.ask("there") == b"from there"


async def test_objects_that_call_in_a_circle_are_stopped(world: World) -> None:
    async def circle(target: Scripted, request: ObjectRequest) -> ObjectResponse:
        return await target.context.call(KEY, ObjectRequest("GET", "circle"))

    world.scripts["circle"] = circle
    with pytest.raises(Conflict) as caught:
        await world.ask("circle")
    assert caught.value.code == "call_depth"


async def test_more_events_than_may_wait_are_refused(tmp_path: Path) -> None:
    async with world_at(tmp_path, dict(BASIC)) as world:
        world.limits = ObjectLimits(waiting=2)
        world.runtime = world.another_runtime()
        waits = [world.asking("increment") for _ in range(4)]
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert outcomes[:3] == [b"1", b"2", b"3"]
        assert isinstance(outcomes[3], Overloaded)


# ---- the constructor's first event ----


async def test_nothing_comes_in_during_block_concurrency_while(world: World) -> None:
    trace: list[str] = []
    signal = asyncio.Event()

    async def visit(target: Scripted, request: ObjectRequest) -> bytes:
        async def load() -> None:
            await target.context.outside(signal.wait())
            target.memory["loaded"] = True
            trace.append("loaded")

        if "loaded" not in target.memory:
            await target.context.block_concurrency_while(load)
        trace.append(request.body.decode())
        return b""

    world.scripts["visit"] = visit
    visits = [world.asking("visit", name) for name in (b"a", b"b")]
    await step()
    assert trace == []
    signal.set()
    await asyncio.gather(*visits)
    assert trace == ["loaded", "a", "b"]


async def test_a_failed_initialisation_reaches_its_caller_and_discards_the_instance(
    world: World,
) -> None:
    async def visit(target: Scripted, request: ObjectRequest) -> bytes:
        async def load() -> None:
            if len(world.made) == 1:
                raise ValueError("no luck")

        await target.context.block_concurrency_while(load)
        return b"loaded"

    world.scripts["visit"] = visit
    outcomes = await asyncio.gather(world.ask("visit"), world.ask("visit"), return_exceptions=True)
    assert isinstance(outcomes[0], ValueError)
    assert outcomes[1] == b"loaded"  # this event had not begun, so it runs on the next instance
    assert len(world.made) == 2


async def test_an_initialisation_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    async def visit(target: Scripted, request: ObjectRequest) -> bytes:
        async def load() -> None:
            await asyncio.Event().wait()

        await target.context.block_concurrency_while(load)
        return b""

    async with world_at(tmp_path, {"visit": visit}) as world:
        world.limits = ObjectLimits(block_s=0)
        world.runtime = world.another_runtime()
        with pytest.raises(Unavailable, match="took too long"):
            await world.ask("visit")
        assert world.runtime.resident == 0


async def test_an_initialisation_that_would_wait_for_its_own_object_is_refused(
    world: World,
) -> None:
    async def visit(target: Scripted, request: ObjectRequest) -> bytes:
        async def load() -> None:
            await target.context.call(OTHER, ObjectRequest("GET", "back"))

        await target.context.block_concurrency_while(load)
        return b""

    async def back(target: Scripted, request: ObjectRequest) -> ObjectResponse:
        return await target.context.call(KEY, ObjectRequest("GET", "get"))

    world.scripts.update(visit=visit, back=back)
    with pytest.raises(Conflict) as caught:
        await world.ask("visit")
    assert caught.value.code == "call_deadlock"


async def test_a_constructor_that_fails_leaves_no_instance(tmp_path: Path) -> None:
    async with world_at(tmp_path, dict(BASIC)) as world:
        make, failing = world.make, [True]

        def sometimes(context: object) -> DurableObject:
            if failing:
                raise KeyError(failing.pop())
            return make(context)  # type: ignore[arg-type]

        world.make = sometimes  # type: ignore[assignment,method-assign]
        world.runtime = world.another_runtime()
        with pytest.raises(KeyError):
            await world.ask("get")
        assert world.runtime.resident == 0
        assert await world.ask("get") == b""
