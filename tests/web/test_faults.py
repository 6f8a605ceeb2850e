"""The client under faults: in Node.js, in Chromium and in Firefox, by the same suite."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from tests.e2e.browser import program
from tests.npm import installed, needs
from tests.web.site import Site, site

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
CASES = 40
"""All that faults.js holds."""
SUITE_TIMEOUT_S = 240


@pytest.fixture(scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("web")) as made:
        yield made


def check(told: dict[str, object]) -> None:
    print(json.dumps(told["tookMs"], indent=1))
    assert told["failed"] == {}
    assert told["ran"] == CASES


async def test_in_node(standing: Site) -> None:
    installed(HERE)
    process = await asyncio.create_subprocess_exec(
        *("node", "--experimental-websocket", "faults_in_node.mjs", standing.url),
        cwd=HERE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SUITE_TIMEOUT_S):
        said, faults = await process.communicate()
    assert process.returncode == 0, faults.decode()
    check(json.loads(said))


async def test_in_chromium(standing: Site) -> None:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(
            executable_path=program(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        async with asyncio.timeout(SUITE_TIMEOUT_S):
            page = await launched.new_page()
            await page.goto(f"{standing.url}/page/page.js")
            told = await standing.asked()
        await launched.close()
    check(told)


PREFERENCES = {
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.update.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "browser.startup.homepage_override.mstone": "ignore",
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
