"""Fixtures of the console's tests: an origin, an edge and a browser."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
import pytest
from playwright.async_api import Browser, expect

from tailrace.up import development_certificate
from tests.e2e.browser import PATIENCE_MS, browser
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import TIMEOUT

expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Scene:
    """An origin that tells of waves, an edge before it, and a browser that trusts the edge."""

    origin: Origin
    edge: Edge
    browser: Browser
    client: httpx.AsyncClient

    async def start(self, waves: int) -> str:
        """Start a stream without a reader and return its id."""
        wanted = {"model": "teller", "prompt": f"{waves} waves", "max_tokens": 1_000_000}
        events = {"Accept": "text/event-stream"}
        url = f"{self.edge.url}/v1/generate"
        async with self.client.stream("POST", url, json=wanted, headers=events) as answer:
            return answer.headers["Tailrace-Stream"]


@pytest.fixture(scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("console")
    files = development_certificate(folder / "certificate", datetime.now(UTC))
    origin = Origin(folder / "data", producer="tests.console.teller:teller")
    edge = Edge(origin, certificate=(files.certificate, files.key))
    async with (
        running(origin, edge),
        browser(files.certificate, edge.tls_port) as launched,
        httpx.AsyncClient(timeout=TIMEOUT) as client,
    ):
        yield Scene(origin, edge, launched, client)
