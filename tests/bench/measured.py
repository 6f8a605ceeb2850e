"""A process under measurement, and confidence bounds of a median."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from math import comb
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOUBT = 0.05
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


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


def resident_kib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB


def median_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the median between the bounds in which that of all such values lies, but for `DOUBT`.

    It supposes nothing of how they are spread: of n values that are each as likely above the true
    median as below it, the kth and the kth from the end. Fewer than six can never be so sure.
    """
    ordered = sorted(values)
    many = len(ordered)
    skip, outside = 0, 2 / 2**many
    while (more := outside + 2 * comb(many, skip + 1) / 2**many) <= DOUBT:
        skip, outside = skip + 1, more
    return ordered[skip], statistics.median(ordered), ordered[many - 1 - skip]
