"""Fixtures of the SDKs' tests: an origin with edges, and scripts in npm or another environment."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests import npm, python_packages
from tests.e2e.conftest import client, standing_house

__all__ = ["client", "house", "standing_house"]

HERE = Path(__file__).parent
PINS = HERE / "python_clients.txt"
SCRIPT_TIMEOUT_S = 120.0
MAJORS = ("7", "6")
"""The major versions of `ai` and `openai` of npm that are tried (majors.mjs)."""
OFFLINE = {
    "HF_HOME": str(HERE / ".python_clients/huggingface"),
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched
}

Script = Callable[..., Awaitable[Any]]
"""Runs a script of this folder with arguments; gives the JSON that it prints last."""

house = standing_house  # no test here hurts it


@pytest.fixture(scope="session")
def node() -> Script:
    """Return a function that runs a script with the packages of npm."""
    npm.installed(HERE)
    flag = "--experimental-websocket"  # Node.js 20 has none without it
    return lambda script, *arguments: said_by("node", flag, HERE / script, *arguments)


@pytest.fixture(scope="session")
def other_packages() -> Path:
    """Return the folder of the commands of Python's other clients."""
    return python_packages.installed(PINS)


@pytest.fixture(scope="session")
def python(other_packages: Path) -> Script:
    """Return a function that runs a script with Python's other clients."""
    interpreter = other_packages / "python"
    return lambda script, *arguments: said_by(interpreter, HERE / script, *arguments)


async def said_by(*command: object) -> Any:
    """Return what a command prints last, as JSON."""
    return json.loads((await done(*command)).splitlines()[-1])


async def done(*command: object) -> str:
    """Return what a command prints; fails with its error output."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "", **OFFLINE},
    )
    try:
        async with asyncio.timeout(SCRIPT_TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return out.decode()
