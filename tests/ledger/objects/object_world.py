"""Shared parts of the objects' tests: a real ledger, a clock moved by hand, scripted objects."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tailrace.ledger.interface import (
    ALL_VALUES,
    Alarm,
    Ledger,
    ObjectKey,
    ObjectState,
    ObjectStore,
    ObjectWrite,
    ValueRange,
)
from tailrace.ledger.objects.object import (
    DurableObject,
    ObjectContext,
    ObjectLimits,
    ObjectRequest,
    ObjectResponse,
)
from tailrace.ledger.objects.runtime import ObjectRuntime
from tailrace.ledger.sqlite.ledger import SqliteLedger

START_MS = 1_000_000
KEY = ObjectKey("thing", "one")
OTHER = ObjectKey("thing", "other")


class HandClock:
    """A clock that stands until it is moved, and the timer that goes by it."""

    def __init__(self) -> None:
        self.now = START_MS
        self.parks: asyncio.Queue[int] = asyncio.Queue()
        self._until_ms = 0
        self._wake: asyncio.Event | None = None

    def now_ms(self) -> int:
        return self.now

    async def wait(self, wake: asyncio.Event, until_ms: int) -> None:
        self._wake, self._until_ms = wake, until_ms
        self.parks.put_nowait(until_ms)
        await wake.wait()

    def move_to(self, now_ms: int) -> None:
        self.now = now_ms
        if self._wake is not None and now_ms >= self._until_ms:
            self._wake.set()


class HeldStore:
    """An object store whose writes wait for the test, and fail on request."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.begun: list[ObjectWrite] = []
        self.reads = 0
        self.failure: Exception | None = None
        self.open = asyncio.Event()
        self.seen = asyncio.Event()  # a write has begun

    async def write(self, write: ObjectWrite) -> None:
        self.begun.append(write)
        self.seen.set()
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        await self._store.write(write)

    async def get(self, key: ObjectKey, names: Sequence[str]) -> dict[str, bytes]:
        self.reads += 1
        # A real wait, as of a store behind a network: everybody else gets a turn.
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        return await self._store.get(key, names)

    async def list(self, key: ObjectKey, wanted: ValueRange = ALL_VALUES) -> dict[str, bytes]:
        return await self._store.list(key, wanted)

    async def claim(self, key: ObjectKey) -> ObjectState:
        return await self._store.claim(key)

    async def seize(self, key: ObjectKey) -> None:
        await self._store.seize(key)

    async def owns(self, key: ObjectKey, epoch: int) -> bool:
        return await self._store.owns(key, epoch)

    async def due(self, now_ms: int, limit: int) -> Sequence[tuple[ObjectKey, Alarm]]:
        return await self._store.due(now_ms, limit)

    async def names(self, kind: str, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        return await self._store.names(kind, after=after, limit=limit)


class LedgerWithObjects:
    """A ledger with another object store."""

    def __init__(self, ledger: SqliteLedger, objects: ObjectStore) -> None:
        self._ledger = ledger
        self.objects = objects

    def __getattr__(self, name: str) -> object:
        return getattr(self._ledger, name)


Script = Callable[["Scripted", ObjectRequest], Awaitable[bytes | ObjectResponse]]
Ring = Callable[["Scripted", int], Awaitable[None]]


class Scripted(DurableObject):
    """An object that does what the test has it do; `memory` is gone with the instance."""

    def __init__(self, context: ObjectContext, scripts: Mapping[str, Script], ring: Ring) -> None:
        super().__init__(context)
        self._scripts = scripts
        self._ring = ring
        self.memory: dict[str, object] = {}

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        answer = await self._scripts[request.url](self, request)
        return answer if isinstance(answer, ObjectResponse) else ObjectResponse(200, (), answer)

    async def alarm(self, retries: int) -> None:
        await self._ring(self, retries)


async def no_ring(target: Scripted, retries: int) -> None:
    raise AssertionError("no alarm was expected")


@dataclass
class World:
    """A ledger and a runtime of one class of objects, "thing"."""

    ledger: SqliteLedger
    store: HeldStore
    clock: HandClock
    scripts: dict[str, Script]
    ring: Ring = no_ring
    limits: ObjectLimits = field(default_factory=ObjectLimits)

    def __post_init__(self) -> None:
        self.made: list[Scripted] = []
        self.runtime = self.another_runtime()

    def another_runtime(self) -> ObjectRuntime:
        """Return a runtime as another process that shares the ledger would have it."""
        return ObjectRuntime(
            cast(Ledger, LedgerWithObjects(self.ledger, self.store)),
            {"thing": self.make},
            self.clock.now_ms,
            bytes,
            limits=self.limits,
            timer=self.clock,
        )

    def make(self, context: ObjectContext) -> Scripted:
        async def ring(target: Scripted, retries: int) -> None:
            await self.ring(target, retries)

        self.made.append(Scripted(context, self.scripts, ring))
        return self.made[-1]

    async def ask(self, script: str, body: bytes = b"", *, of: ObjectKey = KEY) -> bytes:
        answer = await self.runtime.fetch(of, ObjectRequest("POST", script, (), body))
        assert isinstance(answer.body, bytes)
        return answer.body

    def asking(self, script: str, body: bytes = b"", *, of: ObjectKey = KEY) -> asyncio.Task[bytes]:
        return asyncio.create_task(self.ask(script, body, of=of))


@asynccontextmanager
async def world_at(
    folder: Path, scripts: dict[str, Script] | None = None, *, held: bool = False
) -> AsyncIterator[World]:
    """Yield a world on the ledger in `folder`, which may be there already."""
    clock = HandClock()
    ledger = await SqliteLedger.open(folder / "ledger.db", clock.now_ms)
    store = HeldStore(ledger.objects)
    if not held:
        store.open.set()
    world = World(ledger, store, clock, {} if scripts is None else scripts)
    try:
        yield world
    finally:
        store.open.set()
        await world.runtime.close()
        await ledger.close()


def crashed(folder: Path, into: Path) -> Path:
    """Return what a process that died now would have left in `folder`: a copy of its files."""
    return Path(shutil.copytree(folder, into))


async def step() -> None:
    """Let every task that can run go on until it waits for what the test holds back."""
    for _ in range(30):
        await asyncio.sleep(0)


async def put(target: Scripted, request: ObjectRequest) -> bytes:
    target.context.storage.put("value", request.body)
    return b"put"


async def get(target: Scripted, request: ObjectRequest) -> bytes:
    return await target.context.storage.get("value") or b""


async def increment(target: Scripted, request: ObjectRequest) -> bytes:
    count = int(await target.context.storage.get("count") or b"0")
    target.context.storage.put("count", str(count + 1).encode())
    return str(count + 1).encode()


BASIC: Mapping[str, Script] = {"put": put, "get": get, "increment": increment}
