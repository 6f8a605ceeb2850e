"""Commits whose answer is lost: neither lost nor stored twice."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tailrace.ledger.errors import StaleEpoch
from tailrace.ledger.interface import ObjectKey, ObjectWrite, StreamKind
from tailrace.ledger.postgres.ledger import PostgresLedger
from tests.ledger.backends import A, B, Clock, PostgresBackend, everything, new, token, tokens
from tests.ledger.postgres.postgres_proxy import Cut, Proxy
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

KEY = ObjectKey("stream", "one")
CUTS = [Cut.BEFORE, Cut.AFTER]


@pytest.fixture
async def proxy(postgres: PostgresServer) -> AsyncIterator[Proxy]:
    made = Proxy(postgres.folder)
    async with made.running():
        yield made


@pytest.fixture
async def ledger(
    database: str, proxy: Proxy, postgres: PostgresServer
) -> AsyncIterator[PostgresLedger]:
    dsn = database.replace(str(postgres.folder), str(proxy.folder))
    made = await PostgresLedger.open(dsn, Clock(), owner="behind the proxy")
    yield made
    await made.close()


@pytest.mark.parametrize("when", CUTS)
async def test_an_append_is_stored_once(ledger: PostgresLedger, proxy: Proxy, when: Cut) -> None:
    await ledger.create(new())
    for index in range(10):
        if index % 3 == 1:
            proxy.cut_next(when, token(index).frame)
        assert await ledger.append(tokens(A, [index])) == []
    assert proxy.cuts == 3
    assert await everything(ledger, A) == [token(index) for index in range(10)]


@pytest.mark.parametrize("when", CUTS)
async def test_refusals_of_a_group_are_told_once_it_is_found_stored(
    ledger: PostgresLedger, proxy: Proxy, when: Cut
) -> None:
    await ledger.create(new(A))
    await ledger.create(new(B))
    proxy.cut_next(when, token(0).frame)
    refused = await ledger.append([*tokens(A, [0]), *tokens(B, [0], epoch=5)])
    assert [type(refusal.error) for refusal in refused] == [StaleEpoch]
    assert proxy.cuts == 1
    assert await everything(ledger, A) == [token(0)]
    assert await everything(ledger, B) == []


@pytest.mark.parametrize("when", CUTS)
async def test_an_objects_write_is_stored_once(
    ledger: PostgresLedger, proxy: Proxy, when: Cut
) -> None:
    epoch = (await ledger.objects.claim(KEY)).epoch
    creates = [new(A, kind=StreamKind.OBJECT)]
    proxy.cut_next(when, token(0).frame)
    await ledger.objects.write(
        ObjectWrite(KEY, epoch, puts={"a": b"1"}, creates=creates, appends=tokens(A, [0]))
    )
    assert proxy.cuts == 1
    assert await everything(ledger, A) == [token(0)]
    assert await ledger.objects.list(KEY) == {"a": b"1"}


@pytest.mark.parametrize("when", CUTS)
async def test_a_create_makes_one_stream_and_says_so(
    ledger: PostgresLedger, proxy: Proxy, when: Cut
) -> None:
    await ledger.create(new(B))  # so that partition and statement are there
    proxy.cut_next(when, A)
    info, created = await ledger.create(new(A, key="k"))
    assert (info.stream, created, proxy.cuts) == (A, True, 1)


@pytest.mark.parametrize("when", CUTS)
async def test_a_takeover_gives_the_epoch_that_counts(
    ledger: PostgresLedger, proxy: Proxy, when: Cut
) -> None:
    await ledger.create(new())
    proxy.cut_next(when, A)
    epoch = await ledger.take_over(A)
    assert proxy.cuts == 1
    assert await ledger.append(tokens(A, [0], epoch)) == []


async def test_another_origin_that_takes_over_meanwhile_fences_what_was_not_stored(
    ledger: PostgresLedger, proxy: Proxy, database: str
) -> None:
    await ledger.create(new())
    other = await PostgresBackend(database).open()
    proxy.cut_next(Cut.BEFORE, token(0).frame, closes=True)
    appending = asyncio.create_task(ledger.append(tokens(A, [0])))
    await proxy.was_cut.wait()
    epoch = await other.take_over(A)
    assert await other.append(tokens(A, [0], epoch)) == []
    proxy.is_open.set()  # now the append is repeated
    [refusal] = await appending
    assert isinstance(refusal.error, StaleEpoch)
    assert await everything(other, A) == [token(0)]
    await other.close()
