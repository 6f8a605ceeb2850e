"""Output gates on a real ledger: only durable writes of the current owner become visible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tailrace.ledger.errors import (
    Conflict,
    LedgerFailed,
    StaleEpoch,
    Unavailable,
    WrongIndex,
)
from tailrace.ledger.frame import Durability, Token, encode
from tailrace.ledger.interface import NewStream, Record, StreamKind
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tests.ledger.objects.object_world import (
    KEY,
    OTHER,
    Scripted,
    World,
    put,
    step,
)

pytestmark = pytest.mark.anyio


# ---- the output gate ----


async def test_a_response_leaves_only_when_what_was_written_is_durable(held: World) -> None:
    asked = held.asking("put", b"1")
    await held.store.seen.wait()
    await step()
    assert not asked.done()
    held.store.open.set()
    assert await asked == b"put"


async def test_a_response_that_tells_of_another_events_write_waits_for_it_too(
    held: World,
) -> None:
    first = held.asking("put", b"1")
    second = held.asking("get")
    await held.store.seen.wait()
    await step()
    assert not second.done()  # it has read b"1" from the buffer, which must not become visible yet
    held.store.open.set()
    assert await second == b"1"
    assert await first == b"put"


async def test_an_exception_leaves_only_when_what_was_written_is_durable(held: World) -> None:
    async def fail(target: Scripted, request: ObjectRequest) -> bytes:
        target.context.storage.put("value", b"kept")
        raise Conflict("no")

    held.scripts["fail"] = fail
    asked = held.asking("fail")
    await held.store.seen.wait()
    await step()
    assert not asked.done()
    held.store.open.set()
    with pytest.raises(Conflict, match="no"):
        await asked
    assert await held.ask("get") == b"kept"  # like Durable Objects


async def test_a_call_and_what_is_awaited_outside_begin_when_all_before_is_durable(
    held: World,
) -> None:
    begun: list[str] = []

    async def outgoing() -> None:
        begun.append("outside")

    async def called(target: Scripted, request: ObjectRequest) -> bytes:
        begun.append("called")
        return b""

    async def visit(target: Scripted, request: ObjectRequest) -> bytes:
        target.context.storage.put("value", request.url.encode())
        if request.body == b"call":
            await target.context.call(OTHER, ObjectRequest("GET", "called"))
        else:
            await target.context.outside(outgoing())
        return b""

    held.scripts.update(visit=visit, called=called)
    visits = [held.asking("visit", how) for how in (b"call", b"")]
    await held.store.seen.wait()
    await step()
    assert begun == []
    held.store.open.set()
    await asyncio.gather(*visits)
    assert sorted(begun) == ["called", "outside"]


async def test_a_chunk_of_a_live_body_leaves_only_when_what_it_may_tell_is_durable(
    held: World,
) -> None:
    async def live(target: Scripted, request: ObjectRequest) -> ObjectResponse:
        async def body() -> AsyncIterator[bytes]:
            yield b"value is "
            yield bytes(str(target.memory["value"]), "ascii")

        return ObjectResponse(200, (), body())

    async def put_too(target: Scripted, request: ObjectRequest) -> bytes:
        target.memory["value"] = "1"
        return await put(target, request)

    held.scripts.update(live=live, put_too=put_too)
    answer = await held.runtime.fetch(KEY, ObjectRequest("GET", "live"))
    assert not isinstance(answer.body, bytes)
    assert await anext(answer.body) == b"value is "
    asked = held.asking("put_too", b"1")
    await held.store.seen.wait()
    chunk = asyncio.ensure_future(anext(answer.body))
    await step()
    assert not chunk.done()
    held.store.open.set()
    assert await chunk == b"1"
    assert await asked == b"put"
    assert [chunk async for chunk in answer.body] == []


# ---- failures ----


async def test_a_failed_write_fails_all_pending_events_and_the_next_one_sees_what_was_stored(
    held: World,
) -> None:
    held.store.failure = LedgerFailed("disk full")
    waiting = asyncio.Event()

    async def wait(target: Scripted, request: ObjectRequest) -> bytes:
        await target.context.outside(waiting.wait())
        return b""

    held.scripts["wait"] = wait
    pending = [held.asking("wait"), held.asking("put", b"lost"), held.asking("get")]
    await held.store.seen.wait()
    await step()
    held.store.open.set()
    outcomes = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LedgerFailed] * 3
    held.store.failure = None
    assert await held.ask("get") == b""
    assert len(held.made) == 2


async def test_a_write_of_a_fenced_owner_is_a_retryable_error(held: World) -> None:
    asked = held.asking("put", b"lost")
    await held.store.seen.wait()
    await held.store.claim(KEY)
    held.store.open.set()
    with pytest.raises(Unavailable) as caught:
        await asked
    assert caught.value.retryable and caught.value.code == "object_reset"
    assert isinstance(caught.value.__cause__, StaleEpoch)
    assert await held.ask("get") == b""


async def test_two_owners_in_turn_see_each_others_values(world: World) -> None:
    here, there = world.runtime, world.another_runtime()
    for number in range(1, 7):
        world.runtime = here if number % 2 else there
        assert await world.ask("increment") == str(number).encode()
    assert len(world.made) == 6  # each one found its instance out of date
    await there.close()
    world.runtime = here


async def test_an_event_that_comes_back_to_a_lost_instance_ends(world: World) -> None:
    signal = asyncio.Event()

    async def wait(target: Scripted, request: ObjectRequest) -> bytes:
        await target.context.outside(signal.wait())
        return b"never"

    world.scripts["wait"] = wait
    waiting = world.asking("wait")
    await step()
    await world.store.claim(KEY)
    signal.set()
    with pytest.raises(Unavailable, match="another owner"):
        await waiting


async def test_an_append_that_its_stream_refuses_stores_nothing_of_its_write(
    world: World,
) -> None:
    stream = bytes(range(16))

    async def append(target: Scripted, request: ObjectRequest) -> bytes:
        storage, index = target.context.storage, int(request.body)
        if "created" not in target.memory:
            target.memory["created"] = True
            if not await storage.get("value"):
                storage.create_stream(
                    NewStream(stream, "", Durability.PROCESS, 60.0, kind=StreamKind.OBJECT)
                )
        frame = encode(Token("x", index))
        storage.append(stream, 1, index, Record(frame, ()))
        storage.put("value", request.body)
        return b""

    world.scripts["append"] = append
    await world.ask("append", b"0")
    await world.ask("append", b"1")
    with pytest.raises(Unavailable) as caught:
        await world.ask("append", b"3")
    assert isinstance(caught.value.__cause__, WrongIndex)
    assert await world.ask("get") == b"1"
    await world.ask("append", b"2")
    assert len(await world.ledger.frames(stream, 0, 10)) == 3
