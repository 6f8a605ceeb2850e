"""Callers of objects that go away at any moment or send invalid requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.ledger.errors import (
    CallerError,
    NotFound,
    Unavailable,
)
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.object import DurableObject, ObjectRequest
from tests.ledger.objects.object_world import (
    OTHER,
    Scripted,
    World,
    increment,
    step,
    world_at,
)

pytestmark = pytest.mark.anyio


# ---- callers that go away ----


async def test_a_caller_that_goes_away_does_not_stop_what_is_in_the_object(held: World) -> None:
    async def slow(target: Scripted, request: ObjectRequest) -> bytes:
        target.context.storage.put("value", b"half")
        await target.context.storage.sync()
        target.context.storage.put("value", b"whole")
        return b""

    held.scripts["slow"] = slow
    asked = held.asking("slow")
    await held.store.seen.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    held.store.open.set()
    assert await held.ask("get") == b"whole"


async def test_a_caller_that_goes_away_ends_what_its_event_awaits_outside(world: World) -> None:
    ended: list[bool] = []

    async def wait(target: Scripted, request: ObjectRequest) -> bytes:
        try:
            await target.context.outside(asyncio.Event().wait())
        finally:
            target.context.storage.put("value", b"unwound inside")
            ended.append(True)
        return b""

    world.scripts["wait"] = wait
    waiting = world.asking("wait")
    await step()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await world.ask("get") == b"unwound inside"
    assert ended == [True]


async def test_a_caller_that_goes_away_in_the_queue_leaves_no_trace(world: World) -> None:
    first, second, third = (world.asking("increment") for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    assert (await first, await third) == (b"1", b"2")
    assert second.cancelled()


async def test_a_timeout_around_outside_leaves_the_event_inside(world: World) -> None:
    async def wait(target: Scripted, request: ObjectRequest) -> bytes:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await target.context.outside(asyncio.Event().wait())
        return await increment(target, request)

    world.scripts["wait"] = wait
    answers = await asyncio.gather(*(world.ask("wait") for _ in range(10)))
    assert sorted(map(int, answers)) == list(range(1, 11))


async def test_an_event_that_is_cancelled_on_its_way_back_unwinds_inside(world: World) -> None:
    trace: list[str] = []
    signal, tasks = asyncio.Event(), list[asyncio.Task[object]]()

    async def wait(target: Scripted, request: ObjectRequest) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        try:
            await target.context.outside(signal.wait())
        except asyncio.CancelledError:
            trace.append("cancelled")
            target.context.storage.put("value", b"unwound inside")
        return b""

    async def wake(target: Scripted, request: ObjectRequest) -> bytes:
        signal.set()
        await target.context.storage.get("not in the cache")
        tasks[0].cancel()
        await target.context.storage.get("nor this one")
        trace.append("woke")
        return b""

    world.scripts.update(wait=wait, wake=wake)
    waiting = world.asking("wait")
    await step()
    await world.ask("wake")
    await waiting
    assert trace == ["woke", "cancelled"]
    assert await world.ask("get") == b"unwound inside"


async def test_an_await_that_is_cancelled_by_somebody_else_is_a_retryable_error(
    world: World,
) -> None:
    async def wait(target: Scripted, request: ObjectRequest) -> bytes:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await target.context.outside(future)
        return b""

    world.scripts["wait"] = wait
    with pytest.raises(Unavailable):
        await world.ask("wait")
    assert await world.ask("increment") == b"1"


# ---- what is refused ----


async def test_only_the_event_in_the_object_can_touch_its_storage(world: World) -> None:
    async def stray(target: Scripted, request: ObjectRequest) -> bytes:
        async def read() -> bytes | None:
            return await target.context.storage.get("value")

        async def wander() -> None:
            await target.context.outside(asyncio.sleep(0))

        for work in (read(), wander()):
            with pytest.raises(RuntimeError):
                await target.context.outside(asyncio.create_task(work))
        return b"fine"

    world.scripts["stray"] = stray
    assert await world.ask("stray") == b"fine"
    with pytest.raises(RuntimeError):
        world.made[0].context.storage.put("value", b"from nowhere")
    with pytest.raises(RuntimeError):
        await world.made[0].context.block_concurrency_while(lambda: asyncio.sleep(0))


async def test_nothing_goes_outside_from_a_transaction(world: World) -> None:
    async def visit(target: Scripted, request: ObjectRequest) -> bytes:
        context = target.context
        async with context.storage.transaction():
            with pytest.raises(RuntimeError):
                await context.outside(asyncio.sleep(0))
            with pytest.raises(RuntimeError):
                await context.call(OTHER, ObjectRequest("GET", "get"))
            with pytest.raises(RuntimeError):
                await context.storage.sync()
            with pytest.raises(RuntimeError):
                async with context.storage.transaction():
                    pass
        return b"fine"

    world.scripts["visit"] = visit
    assert await world.ask("visit") == b"fine"


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (ObjectKey("thing", ""), CallerError),
        (ObjectKey("thing", "x" * 513), CallerError),
        (ObjectKey("thing", "\ud800"), CallerError),
        (ObjectKey("", "one"), CallerError),
        (ObjectKey("nothing", "one"), NotFound),
    ],
)
async def test_an_address_that_cannot_be_is_refused(
    world: World, key: ObjectKey, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await world.ask("get", of=key)
    assert world.runtime.resident == 0


async def test_an_address_of_512_characters_is_taken(world: World) -> None:
    key = ObjectKey("thing", "é" * 512)
    await world.ask("put", b"1", of=key)
    assert await world.runtime.ledger.objects.names("thing") == [key.name]


async def test_an_object_without_fetch_is_not_found(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        world.make = DurableObject  # type: ignore[assignment,method-assign]
        world.runtime = world.another_runtime()
        with pytest.raises(NotFound):
            await world.ask("get")
