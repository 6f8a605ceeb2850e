"""The client under faults: in Node.js, in Chromium and in Firefox, by the same suite."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import CDPSession, Page, async_playwright

from tests.e2e.browser import program
from tests.needs import needs
from tests.npm import installed
from tests.web.site import Site, site

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
CASES = 55
"""All that faults.js holds."""
SUITE_TIMEOUT_S = 240
STREAMS = 1000
LEFT_IN_NODE_BYTES, LEFT_IN_CHROMIUM_BYTES = 1500, 300
"""Maximum growth of the heap for each stream, in bytes.

If streams all stayed it would be 2,400 to 3,100 in Node, and 1,100 in Chromium.
"""


@pytest.fixture(scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("web")) as made:
        yield made


def check(told: dict[str, Any]) -> None:
    print(json.dumps(told["tookMs"], indent=1))
    assert told["failed"] == {}
    assert told["ran"] == CASES


async def node(script: str, site: Site, *flags: str) -> dict[str, Any]:
    """Return what a script prints, in JSON."""
    installed(HERE)
    process = await asyncio.create_subprocess_exec(
        *("node", "--experimental-websocket", *flags, script, site.url),
        cwd=HERE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SUITE_TIMEOUT_S):
        said, faults = await process.communicate()
    assert process.returncode == 0, faults.decode()
    told: dict[str, Any] = json.loads(said)
    return told


async def test_in_node(standing: Site) -> None:
    check(await node("faults_in_node.mjs", standing))


async def test_a_thousand_streams_leave_nothing_in_the_heap_of_node(standing: Site) -> None:
    grown = await node("leak_in_node.mjs", standing, "--expose-gc")
    print(grown)
    assert max(grown.values()) < LEFT_IN_NODE_BYTES * STREAMS, grown


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=program(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield await launched.new_page()
        finally:
            await launched.close()


async def test_in_chromium(standing: Site) -> None:
    async with chromium() as page, asyncio.timeout(SUITE_TIMEOUT_S):
        await page.goto(f"{standing.url}/page/page.js")
        told = await standing.asked()
    check(told)


async def test_a_thousand_streams_leave_nothing_in_the_heap_of_chromium(standing: Site) -> None:
    async with chromium() as page, asyncio.timeout(SUITE_TIMEOUT_S):
        await page.goto(f"{standing.url}/page/leak.js")
        await page.wait_for_function("window.reads")
        session = await page.context.new_cdp_session(page)
        await page.evaluate("window.reads(200, 'fetch')")
        before = await used(session)
        await page.evaluate("count => window.reads(count, 'fetch')", STREAMS)
        grown = await used(session) - before
    print(grown)
    assert grown < LEFT_IN_CHROMIUM_BYTES * STREAMS


async def used(session: CDPSession) -> int:
    """Return what the heap holds when all that can be is collected."""
    await session.send("HeapProfiler.collectGarbage")
    return int((await session.send("Runtime.getHeapUsage"))["usedSize"])


PREFERENCES = {
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.update.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "browser.startup.homepage_override.mstone": "ignore",
    # Firefox delays repeated attempts for up to a minute, and the suite tries every 50 ms.
    "network.websocket.delay-failed-reconnects": False,
}


async def test_in_firefox(standing: Site, tmp_path: Path) -> None:
    """Driven by nobody: its page runs the suite, and posts what came of it."""
    found = next(filter(None, map(shutil.which, ("firefox-esr", "firefox"))), None)
    if found is None:
        needs("needs a Firefox", "on Debian: apt-get install firefox-esr")
    assert found is not None
    lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});" for k, v in PREFERENCES.items()]
    (tmp_path / "user.js").write_text("\n".join(lines))
    process = await asyncio.create_subprocess_exec(
        *(found, "--headless", "--no-remote", "--profile", str(tmp_path)),
        f"{standing.url}/page/page.js",
        env={**os.environ, "HOME": str(tmp_path), "MOZ_CRASHREPORTER_DISABLE": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(SUITE_TIMEOUT_S):
            told = await standing.asked()
    finally:
        process.terminate()
        await process.wait()
    check(told)
