"""The component of docs/web.md with `useChat`, as it stands there, in Chromium under StrictMode."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, Request, Route, async_playwright

from tests.e2e.browser import PATIENCE_MS, program
from tests.e2e.processes import Edge, Origin, running
from tests.npm import installed
from tests.schema_text import ROOT
from tests.sdks.adder import WORDS
from tests.sdks.test_producer import ADDER

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
WEB = HERE.parent / "web"
TEXT = "".join(WORDS)
[DOCUMENTED] = re.findall(
    r"```jsx\n(import \{ Chat.*?)```", (ROOT / "docs/web.md").read_text("utf-8"), re.DOTALL
)
MOUNTED = """
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
createRoot(document.getElementById("root")).render(<StrictMode><Conversation /></StrictMode>);
"""


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    origin = Origin(tmp_path / "data", producer=ADDER)
    made = Edge(origin)
    async with running(origin, made):
        yield made


async def bundled(script: str, folder: Path) -> str:
    """Return the script with all that it imports."""
    installed(HERE)
    (folder / "page.jsx").write_text(script)
    aliases = {
        "react": HERE / "node_modules/react",
        "react-dom": WEB / "node_modules/react-dom",
        "tailrace/ai-sdk": ROOT / "edge/web/tailrace/ai-sdk.js",
    }
    process = await asyncio.create_subprocess_exec(
        *(installed(WEB) / "esbuild", folder / "page.jsx", f"--outfile={folder / 'page.js'}"),
        *("--bundle", "--format=esm", "--jsx=automatic", "--log-level=error", "--tsconfig-raw={}"),
        *(f"--alias:{name}={path}" for name, path in aliases.items()),
        env={**os.environ, "NODE_PATH": str(HERE / "node_modules")},
    )
    assert await process.wait() == 0
    return (folder / "page.js").read_text("utf-8")


async def shows(page: Page, texts: list[str]) -> None:
    """Wait until the page shows these messages."""
    shown = "JSON.stringify([...document.querySelectorAll('p')].map((p) => p.textContent))"
    await page.wait_for_function(f"texts => {shown} === JSON.stringify(texts)", arg=texts)


async def test_the_documented_chat_outlives_a_reload_and_stops(edge: Edge, tmp_path: Path) -> None:
    asked = "Count, and wait."
    script = DOCUMENTED.replace("https://edge.example.com", edge.url)
    script = script.replace("Once upon a time", asked).replace('"demo"', '"adder"')
    html = f'<div id="root"></div><script type="module">{await bundled(script + MOUNTED, tmp_path)}'
    cancels = list[str]()

    def note(request: Request) -> None:
        if request.url.endswith("/cancel"):
            cancels.append(request.url)

    async def page_itself(route: Route) -> None:
        await route.fulfill(body=html + "</script>", content_type="text/html; charset=utf-8")

    async with async_playwright() as playwright, httpx.AsyncClient(base_url=edge.url) as client:
        launched = await playwright.chromium.launch(
            executable_path=program(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = await launched.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", note)
        await page.route(f"{edge.url}/page", page_itself)
        await page.goto(f"{edge.url}/page")
        await page.click("text=Ask")
        await shows(page, [asked, TEXT])
        await page.reload()
        await shows(page, [TEXT])  # the question is the application's to keep
        found = await client.head("/api/chat/chat-1/stream")
        stream = f"/v1/generate/{found.headers['Tailrace-Stream']}"
        assert (await client.get(stream)).json()["state"] == "running"
        assert cancels == []
        async with page.expect_response(lambda answer: answer.url.endswith("/cancel")):
            await page.click("text=Stop")
        assert (await client.get(stream)).json()["finish_reason"] == "cancelled"
        await launched.close()
