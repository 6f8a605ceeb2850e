"""A crash at any moment keeps whole writes only, and every acknowledged one.

A crash is a copy of the ledger's files while the process goes on: the same bytes that a
`kill -9` would leave there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from tailrace.ledger.frame import Durability, Token, encode
from tailrace.ledger.interface import NewStream, Record, StreamKind
from tailrace.ledger.objects.object import ObjectRequest
from tests.ledger.next_alarm import next_alarm_ms
from tests.ledger.objects.object_world import KEY, Script, Scripted, World, crashed, world_at

pytestmark = pytest.mark.anyio

STREAM = bytes(range(16))
CRASHES = 12


async def append(target: Scripted, request: ObjectRequest) -> bytes:
    """Change two values, a stream and the alarm together, between awaits that wait."""
    storage = target.context.storage
    count = int(await storage.get("a") or b"0")
    await storage.get(f"not in the cache {count}")
    if count == 0:
        new = NewStream(STREAM, "", Durability.PROCESS, 60.0, kind=StreamKind.OBJECT)
        storage.create_stream(new)
    storage.put("a", str(count + 1).encode())
    storage.append(STREAM, 1, count, Record(encode(Token("x", count)), ()))
    storage.set_alarm(10_000_000 + count + 1)
    storage.put("b", str(count + 1).encode())
    return str(count + 1).encode()


async def transact(target: Scripted, request: ObjectRequest) -> bytes:
    """Return the same in a transaction with awaits inside."""
    async with target.context.storage.transaction():
        return await append(target, request)


SCRIPTS: Mapping[str, Script] = {"append": append, "transact": transact}


@pytest.mark.parametrize("seed", range(4))
async def test_a_crash_leaves_whole_writes_and_all_that_were_answered(
    tmp_path: Path, seed: int
) -> None:
    choice = random.Random(seed)
    left: list[tuple[Path, int]] = []
    told = 0

    async def client(world: World) -> None:
        nonlocal told
        for _ in range(20):
            told = max(told, int(await world.ask(choice.choice(["append", "transact"]))))

    (tmp_path / "data").mkdir()
    async with world_at(tmp_path / "data", dict(SCRIPTS)) as world:
        clients = asyncio.gather(*(client(world) for _ in range(4)))
        while not clients.done():
            await asyncio.sleep(0)
            if choice.random() < 0.1 and len(left) < CRASHES:
                left.append((crashed(tmp_path / "data", tmp_path / str(len(left))), told))
        await clients
    assert left
    for folder, answered in left:
        await check(folder, answered)
    await check(tmp_path / "data", 80)


async def check(folder: Path, answered: int) -> None:
    async with world_at(folder) as world:
        values = await world.ledger.objects.get(KEY, ["a", "b"])
        count = int(values.get("a", b"0"))
        assert answered <= count <= 80
        assert values.get("b", b"0") == values.get("a", b"0")
        if count:
            assert len(await world.ledger.frames(STREAM, 0, 100)) == count
            assert await next_alarm_ms(world.ledger.objects) == 10_000_000 + count
