"""The runtimes, in front of an origin with a model and of one that follows a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Origin, running
from tests.e2e.sse import TIMEOUT
from tests.runtimes.runtime import RUNTIMES, Runtime
from tests.runtimes.scripted_producer import Script

PRODUCER = "tests.runtimes.scripted_producer:make"
Scripts = Callable[..., Script]


@pytest.fixture(scope="session")
async def model_origin(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Origin]:
    origin = Origin(tmp_path_factory.mktemp("origin"))
    async with running(origin):
        yield origin


@pytest.fixture(scope="session")
async def scripted_origin(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Origin]:
    origin = Origin(tmp_path_factory.mktemp("scripted"), producer=PRODUCER)
    async with running(origin):
        yield origin


@asynccontextmanager
async def started(name: str, origin: Origin, folder: Path, **more: Any) -> AsyncIterator[Runtime]:
    made = RUNTIMES[name](origin, folder, **more)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture(scope="session", params=list(RUNTIMES))
async def runtime(
    request: pytest.FixtureRequest,
    model_origin: Origin,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Runtime]:
    """Before the demo model."""
    async with started(request.param, model_origin, tmp_path_factory.mktemp("edge")) as made:
        yield made


@pytest.fixture(scope="session", params=list(RUNTIMES))
async def standing(
    request: pytest.FixtureRequest,
    scripted_origin: Origin,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Runtime]:
    """Before the scripted producer."""
    async with started(request.param, scripted_origin, tmp_path_factory.mktemp("edge")) as made:
        yield made


@pytest.fixture
async def stage(standing: Runtime) -> AsyncIterator[Runtime]:
    """Before the scripted producer; whatever a test kills of it is up again for the next one."""
    yield standing
    await standing.start()


@pytest.fixture
def script(tmp_path: Path) -> Scripts:
    """Return a function that makes scripts with a gate of their own."""

    def make(words: int, **more: Any) -> Script:
        return Script(words, str(tmp_path / "gate"), **more)

    return make


@pytest.fixture
async def client(stage: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stage.url, timeout=TIMEOUT) as made:
        yield made
