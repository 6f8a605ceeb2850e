"""A request that is refused leaves nothing behind; one whose outcome is unknown, all or nothing."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from tailrace.ledger.errors import (
    LedgerFailed,
    LedgerFull,
    Overloaded,
    StaleEpoch,
    StreamFull,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Ledger, ObjectKey, ObjectStore
from tailrace.ledger.objects import storage
from tailrace.ledger.objects.object import ObjectResponse
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.streams.chunks import CHUNK_BYTES
from tailrace.origin.streams.settings import StreamSettings
from tests.ledger.objects.object_world import HeldStore, LedgerWithObjects, step
from tests.origin.streams.stream_world import StreamWorld, streams_at

pytestmark = pytest.mark.anyio

BODY = b"0123456789" * (CHUNK_BYTES // 5)
"""Three frames."""
ERRORS: list[Callable[[], BaseException]] = [
    *(
        lambda kind=kind: kind("a fault of the test's")
        for kind in (Overloaded, LedgerFull, StreamFull, Unavailable, LedgerFailed, StaleEpoch)
    ),
    asyncio.CancelledError,
    RuntimeError,
]


class FaultyStore:
    """An object store whose next call but `left` fails, once, before or after it is done."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.left = -1
        self.error: Callable[[], BaseException] = RuntimeError
        self.after = False
        self.wrote = False

    def arm(self, left: int, error: Callable[[], BaseException], *, after: bool) -> None:
        self.left, self.error, self.after, self.wrote = left, error, after, False

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            fails = self.left == -1
            if fails and not self.after:
                raise self.error()
            result = await method(*args, **kwargs)
            self.wrote |= name == "write"
            if fails:
                raise self.error()
            return result

        return call


@asynccontextmanager
async def faulty(folder: Path) -> AsyncIterator[tuple[StreamWorld, FaultyStore]]:
    stores: list[FaultyStore] = []

    def seen_as(ledger: SqliteLedger) -> Ledger:
        stores.append(FaultyStore(ledger.objects))
        return cast(Ledger, LedgerWithObjects(ledger, cast(ObjectStore, stores[0])))

    async with streams_at(folder, seen_as=seen_as) as world:
        yield world, stores[0]


class Attempt(ABC):
    """One request to the stream of a name of its own, which may be sent again."""

    def __init__(self, world: StreamWorld, name: str) -> None:
        self._world, self._name = world, name

    async def prepare(self) -> dict[str, bytes]:
        """Make what it needs; the values that are stored of its stream then."""
        return await self.values()

    @abstractmethod
    async def send(self) -> ObjectResponse: ...

    async def values(self) -> dict[str, bytes]:
        return await self._world.ledger.objects.list(ObjectKey("stream", self._name))

    async def held(self) -> bytes | None:
        """Return what a reader sees; None if there is no stream."""
        answer = await self._world.ask("GET", self._name)
        if answer.status == 404:
            return None
        assert answer.status == 200 and isinstance(answer.body, bytes)
        head = await self._world.ask("HEAD", self._name)
        assert head.header("stream-next-offset") == answer.header("stream-next-offset")
        return answer.body

    before: bytes | None = None
    whole = BODY


class Put(Attempt):
    """A PUT with a body."""

    async def send(self) -> ObjectResponse:
        return await self._world.put(self._name, BODY, stream_ttl="60")


class Post(Attempt):
    """A POST of an idempotent producer."""

    before, whole = b"a", b"a" + BODY

    async def prepare(self) -> dict[str, bytes]:
        await self._world.put(self._name, stream_ttl="60")
        assert (await self._place(0, b"a")).status == 200
        return await self.values()

    async def send(self) -> ObjectResponse:
        return await self._place(1, BODY)

    async def _place(self, seq: int, body: bytes) -> ObjectResponse:
        return await self._world.post(
            self._name,
            body,
            producer_id="p",
            producer_epoch="0",
            producer_seq=str(seq),
            stream_seq=str(seq),
        )


async def is_as_before_and_taken_once(
    attempt: Attempt, values: dict[str, bytes], *, may_be_whole: bool
) -> None:
    if may_be_whole and await attempt.held() != attempt.before:
        assert await attempt.held() == attempt.whole
    else:
        assert await attempt.held() == attempt.before
        assert await attempt.values() == values
    assert (await attempt.send()).status in (200, 201, 204)
    assert await attempt.held() == attempt.whole


@pytest.mark.parametrize("kind", [Put, Post])
@pytest.mark.parametrize("after", [False, True])
async def test_whatever_the_storage_raises_wherever_nothing_is_half_done(
    tmp_path: Path, kind: type[Attempt], after: bool
) -> None:
    async with faulty(tmp_path) as (world, store):
        for number, error in enumerate(ERRORS):
            for step in range(50):
                attempt = kind(world, f"{number}-{step}")
                values = await attempt.prepare()
                store.arm(step, error, after=after)
                refused = None
                try:
                    refused = (await attempt.send()).status >= 400
                except (TailraceError, RuntimeError):
                    refused = True
                met = store.left < 0
                store.left = -1
                if not met:
                    assert not refused
                    break
                assert refused or await attempt.held() == attempt.whole
                await is_as_before_and_taken_once(attempt, values, may_be_whole=store.wrote)
            else:
                pytest.fail("a request asks the storage of less than that")


@pytest.mark.parametrize("kind", [Put, Post])
async def test_wherever_its_queue_is_full_nothing_is_half_done(
    tmp_path: Path, kind: type[Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [*range(0, 400, 3), *range(60_000, 131_000, 5_000), *range(131_000, 131_500, 3)]
    async with streams_at(tmp_path) as world:
        outcomes = set[int | None]()
        for limit in limits:
            attempt = kind(world, str(limit))
            values = await attempt.prepare()
            with monkeypatch.context() as patch:
                patch.setattr(storage, "MAX_PENDING_BYTES", limit)
                status = None
                try:
                    status = (await attempt.send()).status
                except Overloaded:
                    assert await attempt.held() == attempt.before
            outcomes.add(status)
            await is_as_before_and_taken_once(attempt, values, may_be_whole=status is not None)
        assert len(outcomes) == 2, "some were refused, and some were not"


@pytest.mark.parametrize("kind", [Put, Post])
async def test_whenever_its_caller_goes_nothing_is_half_done(
    tmp_path: Path, kind: type[Attempt]
) -> None:
    async with streams_at(tmp_path) as world:
        for turns in range(40):
            attempt = kind(world, str(turns))
            values = await attempt.prepare()
            sending = asyncio.create_task(attempt.send())
            for _ in range(turns):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait([sending])
            await is_as_before_and_taken_once(attempt, values, may_be_whole=True)


async def test_posts_beyond_the_queue_of_a_slow_disk_leave_whole_values(tmp_path: Path) -> None:
    """45 of 1 MB at once, while no write comes to its end: about 32 are let in."""
    settings = StreamSettings(long_poll_s=0.0, durability=Durability.POWER)
    held: list[HeldStore] = []

    def seen_as(ledger: SqliteLedger) -> Ledger:
        held.append(HeldStore(ledger.objects))
        return cast(Ledger, LedgerWithObjects(ledger, held[0]))

    async with streams_at(tmp_path, settings=settings, seen_as=seen_as) as world:
        held[0].open.set()
        await world.put("a", content_type="application/json")
        held[0].open.clear()

        async def post(number: int) -> int:
            body = json.dumps([[number, part, "x" * 250_000] for part in range(4)])
            try:
                answer = await world.post("a", body.encode(), content_type="application/json")
            except Overloaded:
                return 503
            return answer.status

        posts = [asyncio.create_task(post(number)) for number in range(45)]
        for _ in range(20):
            await step()
        held[0].open.set()
        statuses = await asyncio.gather(*posts)
        assert set(statuses) == {204, 503}
        for number in [number for number, status in enumerate(statuses) if status == 503]:
            assert await post(number) == 204
        seen, offset = list[tuple[int, int]](), "-1"
        while True:
            page = await world.ask("GET", "a", query=f"?offset={offset}")
            assert isinstance(page.body, bytes)
            seen += [(number, part) for number, part, _ in json.loads(page.body)]
            offset = page.header("stream-next-offset") or ""
            if page.header("stream-up-to-date"):
                break
    assert sorted(seen) == [(number, part) for number in range(45) for part in range(4)]
