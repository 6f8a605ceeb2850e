"""The SDK of npm in a page of another origin, in a real browser."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import async_playwright

from tests.e2e.browser import PATIENCE_MS, program
from tests.e2e.processes import Edge, Origin, running
from tests.npm import installed

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
ASK = """async ([url]) => {
  const { default: OpenAI } = await import("/node_modules/openai/index.mjs");
  const options = { baseURL: `${url}/v1`, apiKey: "unused", dangerouslyAllowBrowser: true };
  const client = new OpenAI({ ...options, maxRetries: 0 });
  const asked = { model: "demo", input: "Once upon a time", max_output_tokens: 40, stream: true };
  const events = [];
  for await (const event of await client.responses.create(asked)) {
    events.push(event);
    if (event.sequence_number === 9) break;
  }
  const { id } = events[0].response;
  const rest = await client.responses.retrieve(id, { stream: true, starting_after: 9 });
  for await (const event of rest) events.push(event);
  const whole = await client.responses.retrieve(id);
  const refused = await client.responses.retrieve("resp_x").catch((error) => error);
  return {
    numbers: events.map((event) => event.sequence_number),
    text: events.map((event) => event.delta ?? "").join(""),
    whole: whole.output_text,
    refused: [refused.status, refused.code, refused.requestID !== null],
  };
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Drop the log of requests: a test reports only failures."""


@asynccontextmanager
async def some_site() -> AsyncIterator[str]:
    """One that serves the packages of this folder; its origin."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(HERE)))
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


async def test_a_page_of_an_origin_that_may_ask_reads_and_resumes(tmp_path: Path) -> None:
    installed(HERE)
    settings, origin = tmp_path / "tailrace.toml", Origin(tmp_path / "data")
    async with some_site() as elsewhere:
        settings.write_text(f'[edge]\nallowed_origins = ["{elsewhere}"]\n')
        edge = Edge(origin, config=settings)
        async with running(origin, edge), async_playwright() as playwright:
            arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage"]
            launched = await playwright.chromium.launch(executable_path=program(), args=arguments)
            page = await launched.new_page()
            page.set_default_timeout(PATIENCE_MS)
            await page.goto(f"{elsewhere}/package.json")
            got: dict[str, Any] = await page.evaluate(ASK, [edge.url])
            await launched.close()
    assert got["numbers"] == list(range(len(got["numbers"])))
    assert got["text"] == got["whole"] != ""
    assert got["refused"] == [404, "unknown_stream", True]
