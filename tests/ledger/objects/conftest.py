"""Fixtures of the objects' tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ledger.objects.object_world import BASIC, World, world_at


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path, dict(BASIC)) as world:
        yield world


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[World]:
    """Yield a world whose writes wait until the test lets them through."""
    async with world_at(tmp_path, dict(BASIC), held=True) as world:
        yield world
