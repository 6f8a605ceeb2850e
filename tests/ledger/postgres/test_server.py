"""Servers that hang, go back in time, or are configured to acknowledge too early."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext

import psycopg
import pytest

from tailrace.ledger.errors import ConfigError, Damaged, LedgerAway, LedgerFailed, StaleEpoch
from tailrace.ledger.interface import ObjectKey, ObjectWrite, Refusal
from tailrace.ledger.postgres.ledger import PostgresLedger
from tailrace.ledger.postgres.schema import Identity
from tailrace.ledger.postgres.server import Server, failed, with_last
from tests.ledger.backends import A, B, Clock, everything, new, token, tokens
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

KEY = ObjectKey("stream", "one")
PATIENCE_S = 60.0


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    made = PostgresServer.make()
    try:
        yield made
    finally:
        made.stop()


@asynccontextmanager
async def opened(dsn: str, lease_s: float = 3.0) -> AsyncIterator[PostgresLedger]:
    ledger = await PostgresLedger.open(dsn, Clock(), owner="one", lease_s=lease_s)
    try:
        yield ledger
    finally:
        await ledger.close()


async def append_until_it_fails(ledger: PostgresLedger) -> LedgerFailed | ConfigError:
    """Return the error that ends the appends to A, of which there was one."""
    async with asyncio.timeout(PATIENCE_S):
        for index in range(1, 1 << 30):
            try:
                assert await ledger.append(tokens(A, [index])) == []
            except (LedgerFailed, ConfigError) as error:
                return error
    raise AssertionError


async def claim_for_ever(ledger: PostgresLedger) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await ledger.objects.claim(KEY)


# ---- acknowledged too early ----


async def test_nothing_acknowledged_is_lost_when_synchronous_commit_is_turned_off(
    server: PostgresServer,
) -> None:
    count = 2_000
    async with opened(server.dsn()) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        await asyncio.to_thread(server.set, "synchronous_commit", "off")
        for first in range(1, count, 20):
            await ledger.append(tokens(A, range(first, min(first + 20, count))))
        server.kill()
        await asyncio.to_thread(server.start, synchronous_commit="on")
        assert await everything(ledger, A) == [token(index) for index in range(count)]


async def test_a_server_whose_fsync_is_turned_off_is_written_to_no_more(
    server: PostgresServer,
) -> None:
    async with opened(server.dsn(), lease_s=0.3) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        await asyncio.to_thread(server.set, "fsync", "off")
        error = await append_until_it_fails(ledger)
        assert isinstance(error, ConfigError)
        assert "fsync is off" in error.message


# ---- failed ----


async def append_when_it_fails(ledger: PostgresLedger, appending: asyncio.Task[object]) -> None:
    """Check that a failed append releases nothing, and that the writer has stopped."""
    with pytest.raises(LedgerFailed, match="another has it"):
        await appending
    await asyncio.wait({ledger._writer._task})
    assert ledger._writer._task.exception() is None
    assert ledger.tail(A).released == 0
    with pytest.raises(LedgerFailed, match="another has it"):
        await ledger.append(tokens(A, [0]))


async def test_what_a_failed_ledger_was_about_to_store_is_not_stored(
    database: str, postgres: PostgresServer
) -> None:
    async with opened(database) as ledger:
        await ledger.create(new())
        appending = asyncio.create_task(ledger.append(tokens(A, [0])))
        # The append has woken the writer, which has not run yet.
        asyncio.get_running_loop().call_soon(ledger._writer.fail, LedgerFailed("another has it"))
        await append_when_it_fails(ledger, appending)
        stored = postgres.execute("SELECT next_index FROM tailrace.head", database)
        assert stored == [(0,)]


@pytest.mark.parametrize(("ends", "stored"), [("by itself", 1), ("undone", 0)])
async def test_a_ledger_that_fails_while_it_stores_acknowledges_nothing_and_tries_no_more(
    database: str, postgres: PostgresServer, ends: str, stored: int
) -> None:
    which = "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%moved AS%'"
    async with opened(database) as ledger:
        await ledger.create(new())
        with psycopg.connect(database) as other:
            other.execute("SELECT FROM tailrace.head FOR UPDATE")
            appending = asyncio.create_task(ledger.append(tokens(A, [0])))
            await asyncio.to_thread(postgres.until, f"SELECT count(*) {which}")
            ledger._writer.fail(LedgerFailed("another has it"))
            if ends == "undone":
                postgres.execute(f"SELECT pg_cancel_backend(pid) {which}")
        await append_when_it_fails(ledger, appending)
        head = postgres.execute("SELECT next_index FROM tailrace.head", database)
        assert head == [(stored,)]


async def test_a_closed_ledger_takes_no_append(database: str) -> None:
    async with opened(database) as ledger:
        await ledger.create(new())
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(LedgerFailed, match="the ledger is closed"):
            await ledger.append(tokens(A, [0]))


# ---- gone back ----


async def test_the_promotion_of_a_standby_that_nobody_waited_for_fails_the_ledger(
    server: PostgresServer,
) -> None:
    standby = await asyncio.to_thread(server.standby)
    await asyncio.to_thread(server.set, "synchronous_standby_names", "")
    try:
        async with opened(f"host={server.folder},{standby.folder} user=postgres") as ledger:
            await ledger.create(new())
            await ledger.append(tokens(A, [0]))
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(standby.promote)
            with pytest.raises(LedgerFailed, match="another server than before"):
                await ledger.append(tokens(A, [1]))
            with pytest.raises(LedgerFailed, match="another server than before"):
                await ledger.info(A)
    finally:
        standby.stop()


async def test_a_server_that_lacks_a_commit_fails_the_ledger(
    database: str, postgres: PostgresServer
) -> None:
    async with opened(database) as ledger:
        await ledger.create(new())
        for index in range(5):
            await ledger.append(tokens(A, [index]))
        postgres.execute("UPDATE tailrace.owner SET commits = commits - 1", database)
        with pytest.raises(LedgerFailed, match="no longer has commit 5"):
            await ledger.append(tokens(A, [5]))


@pytest.mark.parametrize("lost", ["next_index = 3", "epoch = 0"])
async def test_a_stream_that_went_back_fails_the_ledger(
    database: str, postgres: PostgresServer, lost: str
) -> None:
    async with opened(database) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, range(5)))
        postgres.execute(f"UPDATE tailrace.head SET {lost}", database)
        with pytest.raises(LedgerFailed, match="no longer has"):
            await ledger.info(A)


async def test_a_watched_stream_that_went_back_fails_the_ledger(
    database: str, postgres: PostgresServer
) -> None:
    async with opened(database) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        postgres.execute("UPDATE tailrace.head SET epoch = 0", database)
        ledger.watch(A, lambda: None)  # which has the listener look
        with pytest.raises(LedgerFailed, match="no longer has"):
            await claim_for_ever(ledger)


async def test_an_epoch_counts_only_with_the_lease_of_its_owner(
    database: str, postgres: PostgresServer
) -> None:
    """A sequence that went back has given the same epoch to another origin."""
    async with opened(database) as ledger:
        epoch = (await ledger.objects.claim(KEY)).epoch
        postgres.execute("UPDATE tailrace.object SET lease = lease + 1", database)
        assert not await ledger.objects.owns(KEY, epoch)
        with pytest.raises(StaleEpoch):
            await ledger.objects.write(ObjectWrite(KEY, epoch, puts={"a": b"1"}))


# ---- no answer ----


async def longest_silence(ledger: PostgresLedger, until: asyncio.Task[list[Refusal]]) -> float:
    """Return what the ledger tells of its server while something waits for that."""
    longest = 0.0
    while not until.done():
        longest = max(longest, ledger.silent_s())
        await asyncio.sleep(0.01)
    return longest


async def test_a_primary_that_hangs_is_left_for_the_one_that_took_its_place(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost its standby, so its commits wait for ever; it does not know why."""
    monkeypatch.setattr("tailrace.ledger.postgres.server.ANSWER_TIMEOUT_S", 1.0)
    standby = await asyncio.to_thread(server.standby)
    try:
        async with opened(f"host={server.folder},{standby.folder} user=postgres") as ledger:
            first = ledger._server.conninfo
            await ledger.create(new())
            await ledger.append(tokens(A, range(5)))
            await asyncio.to_thread(standby.promote)
            appending = asyncio.create_task(ledger.append(tokens(A, [5])))
            silence = asyncio.create_task(longest_silence(ledger, appending))
            hangs = (
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE wait_event = 'SyncRep' AND query LIKE '%moved AS%'"
            )
            await asyncio.to_thread(server.until, hangs)
            async with asyncio.timeout(PATIENCE_S):
                assert await appending == []
            assert await silence > 0
            assert await ledger.append(tokens(A, [6])) == []
            stored = standby.execute("SELECT next_index FROM tailrace.head")
            assert stored == [(7,)]
            assert await everything(ledger, A) == [token(index) for index in range(7)]
            # That server is there all the time: it comes first in the list, and is not used again.
            ledger._server.conninfo = first
            await asyncio.to_thread(
                standby.execute,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'tailrace%'",
            )
            assert await ledger.append(tokens(A, [7])) == []
            assert ledger._server.conninfo != first
    finally:
        standby.stop()


async def test_a_lone_server_that_hangs_fails_the_ledger_in_the_end(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.ledger.postgres.server.ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("tailrace.ledger.postgres.commit.WRITE_TIMEOUT_S", 1.0)
    async with opened(server.dsn()) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        await asyncio.to_thread(server.set, "synchronous_standby_names", "ANY 1 (*)")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(LedgerFailed):
                await ledger.append(tokens(A, [1]))
        await asyncio.to_thread(server.set, "synchronous_standby_names", "")


async def test_a_commit_that_is_cancelled_on_the_server_is_made_again(
    database: str, postgres: PostgresServer
) -> None:
    async with opened(database) as ledger:
        await ledger.create(new())
        with psycopg.connect(database) as other:
            other.execute("SELECT FROM tailrace.head FOR UPDATE")
            appending = asyncio.create_task(ledger.append(tokens(A, [0])))
            cancel = (
                "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND query LIKE '%moved AS%'"
            )
            await asyncio.to_thread(postgres.until, cancel)
        assert await appending == []
        assert await everything(ledger, A) == [token(0)]


@pytest.mark.parametrize(
    ("given", "left", "then"),
    [
        ({"host": "a,b", "port": "5432"}, ("a", "5432"), {"host": "b,a", "port": "5432,5432"}),
        ({"host": "a,b"}, ("b", "5432"), {"host": "a,b"}),
        ({"host": "a,a", "port": "1,2"}, ("a", "1"), {"host": "a,a", "port": "2,1"}),
        ({"hostaddr": "::1,::2"}, ("::1", "5432"), {"hostaddr": "::2,::1"}),
        ({"host": "a", "port": "1"}, ("a", "1"), {"host": "a", "port": "1"}),
    ],
)
def test_the_host_that_was_left_is_tried_last(
    given: dict[str, str], left: tuple[str, str], then: dict[str, str]
) -> None:
    host, port = (part.encode() for part in left)
    assert with_last(given, host, port) == then


KNOWN = Identity(system=7, timeline=3)
FOUND: list[tuple[Identity, bool, type[Exception] | None]] = [
    (KNOWN, False, None),
    (KNOWN._replace(timeline=4), True, None),  # a standby that every commit had waited for
    (KNOWN._replace(timeline=4), False, LedgerFailed),
    (KNOWN._replace(timeline=2), True, psycopg.OperationalError),
    (KNOWN._replace(system=8), True, LedgerFailed),
]


async def test_a_new_timeline_alone_fails_a_ledger_whose_commits_waited_for_no_standby(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[Identity, bool]] = []

    async def check(_connection: object) -> tuple[Identity, bool]:
        return said.pop(0)

    monkeypatch.setattr("tailrace.ledger.postgres.server.check_server", check)
    for found, synchronous, error in FOUND:
        said += [(KNOWN, synchronous), (found, synchronous)]
        ours = Server(server.dsn(), "test")
        connections = [await ours.connect()]
        with pytest.raises(error) if error else nullcontext():
            connections.append(await ours.connect())
        for connection in connections:
            await connection.close()


# ---- damaged pages ----


async def test_a_broken_page_costs_those_who_read_it_and_nobody_else(
    server: PostgresServer,
) -> None:
    clock, dsn = Clock(), server.dsn()
    ledger = await PostgresLedger.open(dsn, clock, owner="one")
    await ledger.create(new(A))
    assert await ledger.append(tokens(A, range(3))) == []
    clock.now += 10 * 3_600_000  # the frames of B lie in the partition of another hour
    await ledger.create(new(B))
    assert await ledger.append(tokens(B, range(3))) == []
    epoch = (await ledger.objects.claim(KEY)).epoch
    await ledger.objects.write(ObjectWrite(KEY, epoch, puts={"n": b"1"}))
    await ledger.close()
    [(first,)] = server.execute(
        "SELECT pg_relation_filepath(tableoid) FROM tailrace.frame ORDER BY sid LIMIT 1", dsn
    )
    [(values,)] = server.execute("SELECT pg_relation_filepath('tailrace.value')", dsn)
    server.execute("CHECKPOINT")
    server.kill()
    for table in (first, values):
        with (server.data / str(table)).open("r+b") as raw:
            raw.write(b"\xff" * 8192)
    server.start()
    ledger = await PostgresLedger.open(dsn, clock, owner="two")
    try:
        for read in (ledger.read(A, 0, 9), ledger.objects.get(KEY, ["n"])):
            with pytest.raises(Damaged, match="invalid page") as error:
                await read
            assert not error.value.retryable
        assert await ledger.read(B, 0, 9) == [token(index) for index in range(3)]
        epoch = await ledger.take_over(B)
        assert await ledger.append(tokens(B, [3], epoch)) == []
        assert sorted(await ledger.unfinished()) == [A]
    finally:
        await ledger.close()


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (psycopg.errors.DataCorrupted, Damaged),
        (psycopg.errors.IndexCorrupted, Damaged),
        (psycopg.errors.OutOfMemory, LedgerAway),
        (psycopg.errors.IoError, LedgerAway),
        (psycopg.errors.UndefinedTable, LedgerFailed),
    ],
)
def test_what_the_server_could_not_read_is_no_failed_ledger(
    error: type[psycopg.Error], explained: type[Exception]
) -> None:
    assert type(failed(error("as it says"))) is explained
