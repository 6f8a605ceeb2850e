"""Fixtures of the ledgers' tests: each kind of ledger in turn."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tailrace.ledger.interface import Ledger
from tests.ledger.backends import Backend, PostgresBackend, SqliteBackend, opened


@pytest.fixture(params=["sqlite", "postgres"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """Return each kind of ledger in turn."""
    if request.param == "sqlite":
        return SqliteBackend(tmp_path)
    return PostgresBackend(request.getfixturevalue("database"))


@pytest.fixture
async def ledger(backend: Backend) -> AsyncIterator[Ledger]:
    async with opened(backend) as made:
        yield made
