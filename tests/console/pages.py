"""The console's pages in a real browser: opened, looked at, photographed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page

from tests.e2e.browser import PATIENCE_MS
from tests.npm import installed

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "build" / "screenshots"
DESKTOP, PHONE = (1360, 900), (390, 844)


class Visit:
    """A page of a tab, and its errors."""

    def __init__(self, page: Page, name: str) -> None:
        self.page = page
        self.name = name
        self.faults: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda said: self._note(said.type, said.text))

    def _note(self, kind: str, text: str) -> None:
        # Breaches of the content policy are reported here, too. A refusal that the page shows is no
        # fault.
        if kind == "error" and "status of 401" not in text and "status of 404" not in text:
            self.faults.append(text)

    async def see(self, what: str) -> None:
        """Wait until the page shows this text."""
        await self.page.get_by_text(what).first.wait_for()

    async def violations(self) -> list[str]:
        """Return what axe finds, and where."""
        source = installed(HERE).parent / "axe-core" / "axe.min.js"
        await self.page.evaluate(source.read_text("utf-8"))
        found: list[dict[str, Any]] = await self.page.evaluate(
            "axe.run().then(({ violations }) => violations)"
        )
        return [f"{one['id']}: {node['target']}" for one in found for node in one["nodes"]]

    async def photograph(self, suffix: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        await self.page.evaluate("scrollTo(0, 0)")
        await self.page.screenshot(path=PICTURES / f"{self.name}-{suffix}.png", full_page=True)


@asynccontextmanager
async def visiting(
    browser: Browser,
    url: str,
    page: str,
    *,
    scheme: Any = "light",
    size: tuple[int, int] = DESKTOP,
    key: str = "",
) -> AsyncIterator[Visit]:
    """Yield a tab of its own at a page of the console."""
    context = await browser.new_context(
        color_scheme=scheme,
        viewport={"width": size[0], "height": size[1]},
        reduced_motion="reduce",
    )
    try:
        tab = await context.new_page()
        tab.set_default_timeout(PATIENCE_MS)
        if key:
            await tab.add_init_script(f"sessionStorage.setItem('tailrace.key', '{key}')")
        visit = Visit(tab, page.partition("/")[0] + ("-of-one" if "/" in page else ""))
        await tab.goto(f"{url}/#/{page}")
        yield visit
    finally:
        await context.close()
