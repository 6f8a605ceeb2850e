"""Settings and fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.ledger.postgres_server import PostgresServer


# The time of an example depends on how busy the machine is, and proves nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Yield a server for tests that leave it running; each takes a database of its own."""
    from tests.ledger.postgres_server import PostgresServer  # a GPU's machine has no driver

    server = PostgresServer.make()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """Yield the DSN of an empty database."""
    with postgres.database() as dsn:
        yield dsn
