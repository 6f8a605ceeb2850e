"""A real Prometheus scrapes a real edge and a real origin, with the rules that we ship."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.processes import Edge, Origin, free_port, running
from tests.needs import needs_program
from tests.test_telemetry import ROOT, expressions

pytestmark = [
    pytest.mark.anyio,
    needs_program("prometheus", "on Debian or Ubuntu: apt-get install prometheus"),
]

PATIENCE_S = 120.0
RULES = ROOT / "deploy/prometheus"
# No draft model runs here, and nothing fails.
EMPTY = {"Speculation: tokens kept A"}


class Prometheus:
    """A client for the HTTP API of a Prometheus server."""

    def __init__(self, client: httpx.AsyncClient, port: int) -> None:
        self._client = client
        self._url = f"http://127.0.0.1:{port}/api/v1"

    async def get(self, what: str, **query: str) -> Any:
        answer = (await self._client.get(f"{self._url}/{what}", params=query)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def found(self, expression: str) -> list[Any]:
        data = await self.get("query", query=expression.replace("$__rate_interval", "1m"))
        found: list[Any] = data["result"]
        return found

    async def until_found(self, expression: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self.found(expression):  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.1)


def measured(folder: Path) -> tuple[Origin, Edge, dict[str, str]]:
    """Return an origin and an edge, and where each shows its metrics, by the name of its job."""
    ports = {"tailrace-origin": free_port(), "tailrace-edge": free_port()}
    targets = {job: f"127.0.0.1:{port}" for job, port in ports.items()}
    settings = folder / "tailrace.toml"
    settings.write_text(
        f'[origin]\nmetrics = "{targets["tailrace-origin"]}"\n'
        f'[edge]\nmetrics = "{targets["tailrace-edge"]}"\n'
    )
    origin = Origin(folder / "origin", config=settings)
    return origin, Edge(origin, config=settings), targets


@asynccontextmanager
async def prometheus(
    client: httpx.AsyncClient, folder: Path, targets: dict[str, str]
) -> AsyncIterator[Prometheus]:
    """With the configuration that we ship, but other addresses, and a scrape each second."""
    settings = yaml.safe_load((RULES / "prometheus.yaml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(RULES / "rules.yaml")]
    assert {job["job_name"] for job in settings["scrape_configs"]} == {*targets}
    for job in settings["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    file, port = folder / "prometheus.yaml", free_port()
    file.write_text(yaml.safe_dump(settings))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if (await client.get(f"http://127.0.0.1:{port}/-/ready")).status_code == 200:
                        break
                except httpx.TransportError:
                    assert process.returncode is None, "prometheus ended"
                await asyncio.sleep(0.05)
        yield Prometheus(client, port)
    finally:
        process.terminate()
        await process.wait()


async def test_every_query_of_the_dashboard_and_every_alert_is_answered(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    origin, edge, targets = measured(tmp_path)
    async with running(origin, edge), prometheus(client, tmp_path, targets) as asked:
        await asked.until_found("count(up == 1) == 2")
        body = {"model": "demo", "prompt": "Once", "max_tokens": 20, "ignore_eos": True}
        async with asyncio.timeout(PATIENCE_S):
            # Until two scrapes have seen more of everything than the one before.
            while not await asked.found(
                "rate(tailrace_generation_tokens_total[1m]) > 0"
                " and on() rate(tailrace_edge_frames_total[1m]) > 0"
                " and on() rate(tailrace_edge_errors_total[1m]) > 0"
                " and on() rate(tailrace_slo_streams_total[1m]) > 0"
            ):
                for headers in ({"Accept": "text/event-stream"}, {}):
                    answer = await client.post(
                        f"{edge.url}/v1/generate", json=body, headers=headers
                    )
                    assert answer.status_code == 200
                await client.get(f"{edge.url}/v1/generate/none")
        rules = {
            rule["name"]: rule
            for group in (await asked.get("rules"))["groups"]
            for rule in group["rules"]
        }
        empty = set()
        for where, expression in expressions().items():
            if not await asked.found(expression) and where not in rules:
                empty.add(where)
        assert empty == EMPTY
        assert {rule["health"] for rule in rules.values()} == {"ok"}
        # On a busy machine alerts about latency may be pending, but none fires so soon.
        assert [name for name, rule in rules.items() if rule["state"] == "firing"] == []
        await origin.kill()
        await asked.until_found('ALERTS{alertname="TailraceNoOriginReady"}')
        await asked.until_found('ALERTS{alertname="TailraceDown", job="tailrace-origin"}')
