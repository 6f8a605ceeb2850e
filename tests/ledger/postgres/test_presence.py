"""Numbers of readers that origins publish for each other on PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import pytest

from tailrace.ledger.interface import PublishedReaders
from tailrace.ledger.postgres.ledger import PostgresLedger
from tailrace.ledger.postgres.presence import MAX_NOTICE_STREAMS
from tests.ledger.backends import A, B, C, PostgresBackend
from tests.ledger.postgres.test_ledger import two, until
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

Publish = Callable[[], Awaitable[None]]


@pytest.fixture
def backend(database: str) -> PostgresBackend:
    return PostgresBackend(database)


async def test_origins_read_the_sums_of_the_others(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        third = await backend.open()
        await one.presence.publish({A: 2, B: 1})
        await other.presence.publish({A: 5})
        await third.presence.publish({A: 10, C: 1})
        found = await one.presence.read([A, B, bytes(16)])
        assert found == {A: PublishedReaders(2, 15), B: PublishedReaders(1, 0)}
        await one.presence.publish({A: 3, B: 0})
        assert await other.presence.read([A, B]) == {A: PublishedReaders(5, 13)}
        await third.close()
        assert await other.presence.read([A, C]) == {A: PublishedReaders(5, 3)}


async def test_a_dead_origins_readers_leave_with_its_lease(
    backend: PostgresBackend, postgres: PostgresServer, database: str
) -> None:
    dead, alive = await backend.open(lease_s=0.5), await backend.open()
    await dead.presence.publish({A: 7})
    assert await alive.presence.read([A]) == {A: PublishedReaders(0, 7)}
    await dead._lease.stop()  # its process no longer runs

    async def left() -> bool:
        return not await alive.presence.read([A])

    await until(left)
    # its own numbers are still there, in case it was only slow
    assert await dead.presence.read([A]) == {A: PublishedReaders(7, 0)}
    postgres.execute(
        "UPDATE tailrace.owner SET expires = expires - interval '2 hours'"
        " WHERE lease = (SELECT min(lease) FROM tailrace.owner)",
        database,
    )
    third = await backend.open()  # a new origin removes the rows of owners that are long gone
    assert postgres.execute("SELECT * FROM tailrace.presence", database) == []
    for ledger in (third, alive, dead):
        await ledger.close()


class Heard:
    """The notifications of one origin: the streams, or None for all of them."""

    def __init__(self, ledger: PostgresLedger) -> None:
        self.notices: list[Sequence[bytes] | None] = []
        ledger.presence.watch(self.notices.append)

    async def until(self, notice: Sequence[bytes] | None, publish: Publish) -> None:
        """Publish again and again until the notice came, as a listener may not listen yet."""
        self.notices.clear()

        async def came() -> bool:
            await publish()
            return notice in self.notices

        await until(came)


async def test_other_origins_are_notified_of_the_streams(backend: PostgresBackend) -> None:
    async with two(backend) as (one, other):
        heard, own = Heard(other), Heard(one)
        await heard.until([A, B], lambda: one.presence.publish({A: 1, B: 2}))
        await own.until([A], lambda: other.presence.publish({A: 1}))
        assert [A, B] not in own.notices  # nobody is notified of what it published itself
        many = [number.to_bytes(16, "big") for number in range(MAX_NOTICE_STREAMS + 1)]
        few = dict.fromkeys(many[:-1], 1)
        await heard.until(many[:-1], lambda: one.presence.publish(few))
        await heard.until(None, lambda: one.presence.publish(dict.fromkeys(many, 1)))


async def test_a_crash_of_the_server_loses_the_numbers_and_they_can_be_published_again() -> None:
    server = PostgresServer.make()
    with ExitStack() as stack:
        stack.callback(server.stop)
        dsn = stack.enter_context(server.database())
        async with two(PostgresBackend(dsn)) as (one, other):
            heard = Heard(other)
            await heard.until([A], lambda: one.presence.publish({A: 4}))
            heard.notices.clear()
            server.kill()
            server.start()
            assert await other.presence.read([A]) == {}

            async def reconnected() -> bool:
                await other.presence.read([A])
                return None in heard.notices  # any number may have changed

            await until(reconnected)
            await one.presence.publish({A: 4})
            assert await other.presence.read([A]) == {A: PublishedReaders(0, 4)}
