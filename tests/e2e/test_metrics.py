"""The metrics of a real origin, whose worker reports to it."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tailrace.cli import app
from tests.e2e.processes import Edge, Origin, free_port, running

pytestmark = pytest.mark.anyio

REPORTED = re.compile(r'^tailrace_generation_tokens_total\{worker="0"\} [1-9]', re.MULTILINE)
ENDED = 'tailrace_streams_ended_total{finish_reason="length"} 1.0'
ANSWERED = (
    'tailrace_edge_requests_total{method="POST",protocol="h1",route="/v1/generate",status="200"} 1'
)
FRAMES = re.compile(r"^tailrace_edge_frames_total{[^}]*} [1-9]", re.MULTILINE)
RELEASED = 'tailrace_time_to_first_token_seconds_count{priority="batch"} 1.0'


async def test_an_origin_shows_what_its_worker_reports_and_then_stops(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    url = f"127.0.0.1:{free_port()}"
    settings = tmp_path / "tailrace.toml"
    edge_url = f"127.0.0.1:{free_port()}"
    settings.write_text(f'[origin]\nmetrics = "{url}"\n[edge]\nmetrics = "{edge_url}"\n')
    origin = Origin(tmp_path / "data", config=settings)
    edge = Edge(origin, config=settings)
    async with running(origin, edge):
        body = {
            "model": "demo",
            "prompt": "Once",
            "max_tokens": 9,
            "ignore_eos": True,
            "priority": "batch",
        }
        answer = await client.post(f"{edge.url}/v1/generate", json=body)
        assert answer.json()["total_tokens"] == 9
        async with asyncio.timeout(30):  # until the worker's next report
            while not REPORTED.search(shown := (await client.get(f"http://{url}/metrics")).text):
                pass
        assert ENDED in shown
        assert RELEASED in shown
        shown = (await client.get(f"http://{edge_url}/metrics")).text
        assert ANSWERED in shown and FRAMES.search(shown)
        await edge.stop()
        assert await origin.stop() == 0
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://{url}/metrics")
    place = ["--path", str(origin.data / "ledger.db"), "--json"]
    told = await asyncio.to_thread(
        CliRunner().invoke, app, ["ledger", "show", answer.json()["id"], *place]
    )
    life = json.loads(told.stdout)["life"]
    assert 0 <= life["queue_ms"] <= life["first_ms"] <= life["whole_ms"]
    assert 0 <= life["gap_p50_ms"] <= life["gap_p95_ms"] <= life["gap_p99_ms"] <= life["whole_ms"]
    assert (life["resumes"], life["takeovers"]) == (0, 0)
