"""`tailrace.edge:app` on Hypercorn as it comes, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

START_S = 60.0


@asynccontextmanager
async def hypercorn(
    folder: Path, *flags: str, **settings: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`hypercorn FLAGS tailrace.edge:app` in a folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TAILRACE_")}
    environment |= {f"TAILRACE_EDGE_{k.upper()}": v for k, v in settings.items()}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hypercorn", *flags, "tailrace.edge:app"),
        cwd=folder,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def ready(client: httpx.AsyncClient) -> None:
    """Wait until the edge answers, and its link to the origin is up."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                if (await client.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
