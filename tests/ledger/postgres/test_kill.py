"""Servers, standbys and origins that are killed: nothing acknowledged is lost or doubled."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.interface import Append
from tailrace.ledger.postgres.ledger import PostgresLedger
from tests.ledger.backends import A, B, Clock, everything, new, token, tokens
from tests.ledger.postgres.postgres_producer import STREAMS, stream_id
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[3]
KILLS = 5


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """Yield a server of its own, to be killed."""
    made = PostgresServer.make()
    try:
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def opened(dsn: str, owner: str = "one") -> AsyncIterator[PostgresLedger]:
    ledger = await PostgresLedger.open(dsn, Clock(), owner=owner)
    try:
        yield ledger
    finally:
        await ledger.close()


class Producers:
    """Producers of some streams of one ledger, and what was acknowledged to each."""

    def __init__(self, ledger: PostgresLedger, count: int) -> None:
        self.ledger = ledger
        self.acknowledged: dict[bytes, int] = {stream_id(n): 0 for n in range(count)}
        self._news = asyncio.Condition()
        self._stopping = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for stream in self.acknowledged:
            await self.ledger.create(new(stream))
        async with asyncio.TaskGroup() as group:
            for stream in self.acknowledged:
                group.create_task(self._produce(stream))
            yield
            self._stopping = True

    async def _produce(self, stream: bytes) -> None:
        while not self._stopping:
            index = self.acknowledged[stream]
            assert await self.ledger.append([Append(stream, 1, index, token(index))]) == []
            async with self._news:
                self.acknowledged[stream] += 1
                self._news.notify_all()

    async def more(self, count: int) -> None:
        """Wait until every stream has that many more acknowledged."""
        goal = {stream: known + count for stream, known in self.acknowledged.items()}
        async with self._news:
            await self._news.wait_for(lambda: all(self.acknowledged[s] >= goal[s] for s in goal))

    async def check(self, ledger: PostgresLedger) -> None:
        """Every stream holds exactly what was acknowledged, in order."""
        for stream, count in self.acknowledged.items():
            assert await everything(ledger, stream) == [token(index) for index in range(count)]


async def test_appends_go_on_when_the_server_is_killed_and_comes_back(
    server: PostgresServer,
) -> None:
    async with opened(server.dsn()) as ledger:
        producers = Producers(ledger, 8)
        async with producers.running():
            for _ in range(KILLS):
                await producers.more(5)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await producers.more(5)
        await producers.check(ledger)
    async with opened(server.dsn(), "two") as ledger:
        await producers.check(ledger)


async def test_the_promotion_of_a_standby_loses_nothing(server: PostgresServer) -> None:
    standby = await asyncio.to_thread(server.standby)
    dsn = f"host={server.folder},{standby.folder} user=postgres dbname=postgres"
    try:
        async with opened(dsn) as ledger:
            producers = Producers(ledger, 8)
            async with producers.running():
                await producers.more(20)
                await asyncio.to_thread(server.kill)
                before = dict(producers.acknowledged)
                await asyncio.to_thread(standby.promote)
                await producers.more(20)
            await producers.check(ledger)
            assert all(producers.acknowledged[s] > count for s, count in before.items())
    finally:
        standby.stop()


async def test_a_commit_waits_for_its_standby_even_when_told_not_to(
    server: PostgresServer,
) -> None:
    """pg_cancel_backend ends the wait with a warning; that is not taken for an answer."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    async with opened(server.dsn()) as ledger:
        await ledger.create(new())
        await asyncio.to_thread(server.set, "synchronous_standby_names", "ANY 1 (*)")
        appending = asyncio.create_task(ledger.append(tokens(A, [0])))
        cancel = (
            "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity"
            " WHERE wait_event = 'SyncRep' AND query LIKE '%moved AS%'"
        )
        await asyncio.to_thread(server.until, cancel)
        await asyncio.to_thread(server.until, f"{waiting} AND query LIKE 'COMMIT%'")
        assert not appending.done()
        await asyncio.to_thread(server.set, "synchronous_standby_names", "")
        assert await appending == []
        assert await everything(ledger, A) == [token(0)]


async def test_a_server_that_stays_away_fails_the_ledger_and_says_to_retry(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.ledger.postgres.commit.WRITE_TIMEOUT_S", 0.2)
    async with opened(server.dsn()) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        await asyncio.to_thread(server.kill)
        for _ in range(2):
            with pytest.raises(LedgerFailed) as raised:
                await ledger.append(tokens(A, [1]))
            assert raised.value.retryable
        assert ledger.tail(A).released == 1
        assert ledger.tail(A).take(0, 10) == [token(0).frame]
        await asyncio.to_thread(server.start)
        assert await everything(ledger, A) == [token(0)]  # stored records can still be read


async def test_nobody_loses_its_streams_because_the_server_was_away(
    server: PostgresServer,
) -> None:
    """All leases lapse while nobody can renew; that does not count for one lease."""
    dsn, lease_s = server.dsn(), 3.0
    one = await PostgresLedger.open(dsn, Clock(), owner="one", lease_s=lease_s)
    other = await PostgresLedger.open(dsn, Clock(), owner="other", lease_s=lease_s)
    await one.create(new(A))
    await other.create(new(B))
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start, 6432)  # where the origins do not look
    all_lapsed = "SELECT pg_sleep_until(max(expires) + interval '1 ms') FROM tailrace.owner"
    await asyncio.to_thread(server.execute, all_lapsed)
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    assert await one.unfinished() == []
    assert await other.unfinished() == []
    await one._lease.stop()
    async with asyncio.timeout(60):
        while await other.unfinished() != [A]:
            continue
    await one.close()
    await other.close()


# ---- origins ----


@asynccontextmanager
async def producer(dsn: str, owner: str, heard: Callable[[int, int], None]) -> AsyncIterator[None]:
    """Yield a process that appends; killed at the end, and all it said is heard."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.ledger.postgres.postgres_producer", dsn, owner,
        cwd=ROOT, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for _ in range(100):
            number, index = map(int, (await process.stdout.readline()).split())
            heard(number, index)
        yield
    finally:
        process.kill()
        rest = await process.stdout.read()
        await process.wait()
        for line in rest.decode().splitlines():
            number, index = map(int, line.split())
            heard(number, index)


async def test_killed_origins_lose_nothing_and_the_next_one_goes_on(database: str) -> None:
    acknowledged: dict[int, list[int]] = {number: [] for number in range(STREAMS)}
    for turn in range(KILLS):
        async with producer(
            database, f"origin {turn}", lambda number, index: acknowledged[number].append(index)
        ):
            pass
    async with opened(database, "checker") as ledger:
        for number, known in acknowledged.items():
            stored = await everything(ledger, stream_id(number))
            assert stored == [token(i, f" {number}/{i}") for i in range(len(stored))]
            # Each index was acknowledged once, in order; one at each kill may be unheard.
            assert known == sorted(set(known))
            assert set(known) <= set(range(len(stored)))
            assert len(stored) - len(known) <= KILLS
            epoch = (await ledger.info(stream_id(number))).epoch
            assert epoch == KILLS
        assert sum(map(len, acknowledged.values())) >= 100 * KILLS
