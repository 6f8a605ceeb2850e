"""A house for the SDKs, and the scripts of Node.js that run those of npm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import House
from tests.e2e.processes import running
from tests.e2e.sse import TIMEOUT
from tests.npm import installed

HERE = Path(__file__).parent
SCRIPT_TIMEOUT_S = 120.0

Node = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    """An origin with two edges, for tests that leave them as they were."""
    made = House(tmp_path_factory.mktemp("house"))
    async with running(made.origin, *made.edges):
        yield made


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Reads what a client that was cut off would read."""
    async with httpx.AsyncClient(timeout=TIMEOUT) as made:
        yield made


@pytest.fixture(scope="session")
def node() -> Node:
    """Runs a script of this folder with the packages of npm; gives the JSON that it prints last."""
    installed(HERE)

    async def run(script: str, *arguments: object) -> Any:
        process = await asyncio.create_subprocess_exec(
            *("node", str(HERE / script), *map(str, arguments)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(SCRIPT_TIMEOUT_S):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, err.decode()
        return json.loads(out.decode().splitlines()[-1])

    return run
