"""The client of edge/web/ in workerd: streams of a real edge, by fetch and by WebSocket."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.npm import installed
from tests.worker.workerd import BUILD_TIMEOUT_S, FOLDER, runtime

TIMEOUT_S = 60.0
INPUT = {"model": "demo", "prompt": "Once upon", "max_tokens": 12, "seed": 3}


def configured(**variables: str) -> str:
    # A string of Cap'n Proto has the escapes of JSON, but for those of characters by number.
    bindings = ", ".join(
        f"(name = {json.dumps(name)}, text = {json.dumps(value, ensure_ascii=False)})"
        for name, value in variables.items()
    )
    return f"""using Workerd = import "/workerd/workerd.capnp";
const config :Workerd.Config = (services = [
  (name = "reads", worker = (
    modules = [(name = "reads.js", esModule = embed "reads.js")],
    compatibilityDate = "2026-11-01",
    compatibilityFlags = ["nodejs_compat"],
    bindings = [{bindings}],
  )),
  (name = "internet", network = (allow = ["public", "private"])),
]);
"""


@pytest.mark.anyio
async def test_a_stream_is_read_read_on_and_cancelled_in_workerd(tmp_path: Path) -> None:
    flags = ["--bundle", "--format=esm", "--target=es2024", "--external:node:assert/strict"]
    flags += [f"--outfile={tmp_path / 'reads.js'}", "--log-level=warning"]
    entry = Path(__file__).parent / "reads.js"
    await asyncio.to_thread(
        subprocess.run,
        [str(installed(FOLDER) / "esbuild"), str(entry), *flags],
        check=True,
        timeout=BUILD_TIMEOUT_S,
    )
    origin = Origin(tmp_path / "origin")
    edge = Edge(origin)
    async with running(origin, edge), httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        whole = (await client.post(f"{edge.url}/v1/generate", json=INPUT)).json()["text"]
        config = tmp_path / "reads.capnp"
        config.write_text(configured(EDGE=edge.url, INPUT=json.dumps(INPUT), WHOLE=whole))
        done = await asyncio.to_thread(
            subprocess.run,
            [str(runtime()), "test", str(config), "--experimental", "--verbose"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "read in Cloudflare-Workers" in said
