"""Streams with active content, opened in a browser next to the console of the same edge."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Error, Page, Route

from tailrace.up import development_certificate
from tests.e2e.browser import browser
from tests.e2e.sse import TIMEOUT
from tests.e2e.test_stream_calls import streams_only

pytestmark = pytest.mark.anyio

SCRIPT = """
document.documentElement.id = "ran";
try { document.documentElement.id += " " + sessionStorage.getItem("tailrace.key"); } catch {}
const asked = new XMLHttpRequest();
asked.open("GET", "/v1/admin/streams", false);
asked.send();
document.documentElement.id += " " + asked.status;
"""
DOCUMENTS = {
    "text/html": f"<!doctype html><title>x</title><script>{SCRIPT}</script>",
    "image/svg+xml": f'<svg xmlns="http://www.w3.org/2000/svg"><script>{SCRIPT}</script></svg>',
    "application/xhtml+xml": '<html xmlns="http://www.w3.org/1999/xhtml"><head>'
    f"<script>{SCRIPT}</script></head></html>",
}


async def opened(page: Page, url: str, *without: str) -> str | None:
    """Return the id that the script of a document gives it, if headers are removed from the answer.

    None if the browser saves the document instead of showing it.
    """

    async def strip(route: Route) -> None:
        answer = await route.fetch()
        kept = {name: value for name, value in answer.headers.items() if name not in without}
        await route.fulfill(response=answer, headers=kept)

    await page.route(url, strip)
    try:
        await page.goto(url)
    except Error as error:
        if "Download is starting" in str(error):
            return None
        raise
    finally:
        await page.unroute(url)
    found: str = await page.evaluate("document.documentElement.id")
    return found


async def test_documents_and_scripts_in_streams_cannot_act_as_the_edges_own(tmp_path: Path) -> None:
    files = development_certificate(tmp_path / "certificate", datetime.now(UTC))
    async with (
        streams_only(tmp_path / "data") as (_, [edge]),
        browser(files.certificate) as launched,
        httpx.AsyncClient(timeout=TIMEOUT) as client,
    ):
        written = DOCUMENTS | {"text/javascript": "window.loot = 1"}
        urls = {kind: f"{edge.url}/v1/stream/{n}" for n, kind in enumerate(written)}
        for kind, text in written.items():
            made = await client.put(urls[kind], content=text, headers={"Content-Type": kind})
            assert made.status_code == 201
            urls[kind] += "?offset=-1"
        page = await launched.new_page()
        await page.goto(edge.url)
        await page.evaluate("sessionStorage.setItem('tailrace.key', 'secret')")
        disposition, policy = "content-disposition", "content-security-policy"
        for kind in DOCUMENTS:
            assert await opened(page, urls[kind]) is None
            assert await opened(page, urls[kind], disposition) == ""
            # Without both it is a page of the edge's own: the attack itself works.
            assert await opened(page, urls[kind], disposition, policy) == "ran secret 200"
        await page.goto(edge.url)
        await page.locator("nav").first.wait_for()  # the console's own scripts run
        blocked = await page.evaluate(
            """async (url) => {
                const said = new Promise((done) => {
                    addEventListener("securitypolicyviolation", (event) => done(event.blockedURI));
                    const script = document.createElement("script");
                    script.src = url;
                    script.onload = () => done("ran");
                    document.head.append(script);
                });
                return [await said, window.loot ?? 0];
            }""",
            urls["text/javascript"],
        )
        assert blocked == [urls["text/javascript"], 0]
