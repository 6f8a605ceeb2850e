from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ledger.interface import Ledger
from tests.ledger.backends import Backend, PostgresBackend, SqliteBackend, opened
from tests.ledger.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for tests that leave it running; each takes a database of its own."""
    server = PostgresServer.make()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """The DSN of an empty database."""
    with postgres.database() as dsn:
        yield dsn


@pytest.fixture(params=["sqlite", "postgres"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """Each kind of ledger in turn."""
    if request.param == "sqlite":
        return SqliteBackend(tmp_path)
    return PostgresBackend(request.getfixturevalue("database"))


@pytest.fixture
async def ledger(backend: Backend) -> AsyncIterator[Ledger]:
    async with opened(backend) as made:
        yield made
