"""`tailrace warm` beside a real edge and origin, and its history when they are gone."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import ROOT, START_TIMEOUT_S, Edge, Origin, running

pytestmark = pytest.mark.anyio

BODY = {"model": "demo", "prompt": "Once", "max_tokens": 4}


async def warm(*words: str, data: Path | None = None) -> tuple[int, str, str]:
    told = {} if data is None else {"TAILRACE_ORIGIN_DATA": str(data)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tailrace.cli", "warm", *words),
        cwd=ROOT,
        env={**os.environ, **told},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def recorded(client: httpx.AsyncClient, edge: Edge, requests: int) -> dict[str, Any]:
    """Return the origin's answer once it has recorded `requests` requests, within a second."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            [told] = (await client.get(f"{edge.url}/v1/admin/warm")).json()["origins"]
            if sum(one["arrivals"] for one in told["models"]) >= requests and not told["waiting"]:
                return dict(told)
            await asyncio.sleep(0.05)


async def test_what_was_asked_of_an_origin_is_told_and_simulated(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    origin = Origin(tmp_path)
    edge = Edge(origin)
    async with running(origin, edge):
        for _ in range(2):
            answer = await client.post(f"{edge.url}/v1/generate", json=BODY)
            assert answer.status_code == 200
        told = await recorded(client, edge, 2)
        assert told["history"] == str(tmp_path / "history.db") and told["dropped"] == 0
        at = ("--edge", edge.url)
        status, out, err = await warm("status", "--json", *at, "--chart", str(tmp_path / "r.svg"))
        assert status == 0, err
        [model] = json.loads(out)["origins"][0]["models"]
        assert (model["model"], model["arrivals"], model["cold"]) == ("demo", 2, 0)
        assert "<svg" in (tmp_path / "r.svg").read_text("utf-8")
        status, out, err = await warm("status", *at)
        assert status == 0 and origin.link in out and "demo" in out, err
        status, out, err = await warm("explain", "demo", "--json", *at)
        [load] = json.loads(out)["origins"][0]["loads"]
        assert load["attributed"] >= 0.98 and {"imports", "read"} <= {
            stage["stage"] for stage in load["stages"]
        }
        status, _, err = await warm("apply", "ttl-60", *at)
        assert status == 2 and "its single model always stays loaded" in err
        status, _, err = await warm("explain", "other", *at)
        assert (
            status == 2 and "nothing is recorded of a model 'other' (recorded models: demo)" in err
        )
    status, out, err = await warm("simulate", "--json", "--policy", "ttl-1", data=tmp_path)
    assert status == 0, err
    assert json.loads(out)["policies"][0]["requests"] == 2
    words = ("explain", "demo", "--history", str(tmp_path / "history.db"), "--limit", "1")
    status, out, err = await warm(*words, "--chart", str(tmp_path / "w.png"))
    assert status == 0 and "2 requests in a day, 0 of them cold starts" in out, err
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = await warm("status", "--edge", edge.url)
    assert status == 1 and err.startswith(f"error: {edge.url}: ")
