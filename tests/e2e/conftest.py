"""Fixtures of the end-to-end tests: an origin with two edges, all real processes."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import TIMEOUT


class House:
    """An origin with two edges."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.edges = [Edge(origin), Edge(origin)]


class HeldHouse(House):
    """An origin with two edges whose streams go only as far as a test lets them."""

    origin: HeldOrigin


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[HeldHouse]:
    """For tests that kill: nobody else's."""
    made = HeldHouse(HeldOrigin(tmp_path / "data"))
    async with running(made.origin, *made.edges):
        yield made


@pytest.fixture(scope="module")
async def standing_house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """For tests that leave it as it was; one for all of a file."""
    made = House(Origin(tmp_path_factory.mktemp("house")))
    async with running(made.origin, *made.edges):
        yield made


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that shares no connection with another test."""
    async with httpx.AsyncClient(timeout=TIMEOUT) as made:
        yield made
