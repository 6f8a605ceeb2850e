"""`tailrace top` beside a real edge with a real origin that is at work."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import ROOT, Edge, Origin, running

pytestmark = pytest.mark.anyio

BODY = {"model": "demo", "prompt": "Once", "max_tokens": 900, "ignore_eos": True}
SSE = {"Accept": "text/event-stream"}


async def top(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tailrace.cli", "top", *words),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def busy(edge: str) -> dict[str, Any]:
    """Return what it tells of a second in which frames went through the edge."""
    told: dict[str, Any] = {"edge": {"frames_per_s": 0}}
    while not told["edge"]["frames_per_s"]:  # the worker may get no processor for one of them
        status, out, err = await top(edge, "--once", "--json", "--interval", "1")
        assert status == 0, err
        told = json.loads(out)
    return told


async def test_it_shows_what_runs_and_how_fast(tmp_path: Path, client: httpx.AsyncClient) -> None:
    origin = Origin(tmp_path)
    edge = Edge(origin)
    async with running(origin, edge):
        looking = asyncio.create_task(busy(edge.url))
        while not looking.done():
            answer = await client.post(f"{edge.url}/v1/generate", json=BODY, headers=SSE)
            assert answer.status_code == 200
        told = await looking
        assert told["edge"]["origins"] == {origin.link: True}
        assert told["edge"]["frames_per_s"] > 0 and told["edge"]["relay_p99_ms"] > 0
        assert told["live"] == sum(told["states"].values())
        [worker] = told["pool"]
        assert (worker["origin"], worker["state"], worker["model"]) == (
            origin.link,
            "ready",
            "demo",
        )
        assert worker["tokens_per_s"] >= 0 and 0 <= worker["kv_cache_used"] <= 1
        [promise] = told["slo"]
        assert (promise["priority"], promise["model"], promise["promised_ms"]) == (
            "standard",
            "demo",
            1_000,
        )
        assert promise["streams"] > 0 and 0 <= promise["missed_ratio"] <= 1
        status, out, _ = await top(edge.url, "--once")
        assert status == 0 and origin.link in out and "frames/s" in out
        assert "promised ms" in out
    status, _, err = await top(edge.url, "--once")
    assert status == 1 and err.startswith(f"error: {edge.url}: ") and "Traceback" not in err
