"""A process that a bench measures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def process(
    *command: object, core: str | None = None, tree: Path = ROOT
) -> AsyncIterator[asyncio.subprocess.Process]:
    """On one core, or wherever there is room; its packages are those of `tree`."""
    pinned = () if core is None else ("taskset", "-c", core)
    running = await asyncio.create_subprocess_exec(
        *(*pinned, *map(str, command)),
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield running
    finally:
        running.terminate()
        await running.wait()


def cpu_s(pid: int) -> float:
    """Processor time that all threads of a process have had, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
