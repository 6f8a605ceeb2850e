"""`tailrace edge --wrangler FILE`, as it runs."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Process, free_port


@pytest.mark.anyio
async def test_an_edge_listens_where_a_wrangler_file_says_and_goes_by_its_routes(
    tmp_path: Path,
) -> None:
    port = free_port()
    file = tmp_path / "wrangler.jsonc"
    said: dict[str, object] = {"name": "relay", "main": "x.ts", "compatibility_date": "2026-01-31"}
    said |= {"dev": {"ip": "127.0.0.1", "port": port}}
    said |= {"env": {"live": {"routes": ["api.example.com/*"], "vars": {"MODE": "live"}}}}
    file.write_text(json.dumps(said))
    (tmp_path / ".dev.vars.live").write_text("TAILRACE_EDGE_ORIGIN_SECRET=hunter-two-hunter-two\n")
    edge = await Process("edge", "--wrangler", file, "--env", "live").start()
    try:
        await edge.saw(f"Running on http://127.0.0.1:{port}")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for host, status in (("api.example.com", 200), ("other.example.com", 421)):
                answer = await client.get("/healthz", headers={"Host": host})
                assert answer.status_code == status
    finally:
        await edge.stop()
    assert "hunter-two" not in str(edge.events)
