"""The runtimes: each with an origin, shared by all files; a test that kills has them made whole."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.e2e.processes import Origin, running
from tests.runtimes.runtime import RUNTIMES, Runtime


@pytest.fixture(scope="session")
async def shared_origin(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Origin]:
    origin = Origin(tmp_path_factory.mktemp("origin"))
    async with running(origin):
        yield origin


@pytest.fixture(scope="session", params=list(RUNTIMES))
async def runtime(
    request: pytest.FixtureRequest,
    shared_origin: Origin,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Runtime]:
    made = RUNTIMES[request.param](shared_origin, tmp_path_factory.mktemp(request.param))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
