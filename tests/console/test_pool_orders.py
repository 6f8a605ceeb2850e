"""The console's warm pool page gives orders to a pool: load, pin, and another policy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Locator, expect

from tests.console.conftest import Scene
from tests.console.pages import visiting
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.test_several_models import KEPT, OURS, tables

pytestmark = pytest.mark.anyio

TWO_FIT = "cpu_memory_mib = 130\n"


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    """Yield an edge before an origin of three models, of which two fit."""
    file = tmp_path / "tailrace.toml"
    each = f"{OURS}memory_mib = 60\n"
    file.write_text(KEPT + TWO_FIT + tables("one", "two", "three", each=each))
    origin = Origin(tmp_path / "data", config=file)
    made = Edge(origin)
    async with running(origin, made):
        yield made


async def test_a_pool_is_told_to_load_to_pin_and_to_use_a_policy(scene: Scene, edge: Edge) -> None:
    async with visiting(scene.browser, edge.url, "pool") as visit:
        page = visit.page
        models = page.get_by_role("region", name="Models and their tiers")

        def row(name: str) -> Locator:
            named = page.get_by_role("rowheader", name=name, exact=True)
            return models.get_by_role("row").filter(has=named)

        done = page.get_by_role("status")
        await page.get_by_role("button", name="Pin one", exact=True).click()
        await expect(done).to_have_text("one is pinned, also after a restart")
        await expect(row("one")).to_contain_text("pinned")
        await page.get_by_role("button", name="Pin two", exact=True).click()
        refused = page.get_by_role("alert")  # the third would never have room
        await expect(refused).to_contain_text("pin fewer models")
        assert await visit.violations() == []
        await page.get_by_role("button", name="Unpin one").click()
        await expect(done).to_have_text("one is no longer pinned")
        await expect(refused).to_have_count(0)
        await page.get_by_role("combobox", name="Policy", exact=True).select_option(
            "a fixed time to live"
        )
        seconds = page.get_by_label("Seconds", exact=True)
        await seconds.fill("1234")
        await expect(seconds).to_have_value("1234")
        await page.get_by_role("button", name="Apply").click()
        await expect(done).to_have_text("ttl-1234 decides until the next restart")
        await expect(row("two")).to_contain_text("ttl-1234")
        await page.get_by_role("combobox", name="Policy", exact=True).select_option("break-even")
        await page.get_by_label("as the shadow policy only").check()
        await page.get_by_role("button", name="Apply").click()
        await visit.see("Shadow policy break-even: 0 cold starts")
        async with page.expect_response("**/v1/admin/warm/prewarm*") as answered:
            await page.get_by_role("button", name="Load three now").click()
        answer = await answered.value
        assert answer.ok and answer.request.post_data_json == {"model": "three"}
        await expect(done).to_have_text("three is loaded if there is room")
        wide = await page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0
        assert await visit.violations() == []
        await visit.photograph("orders")
        [refusal] = visit.faults  # the browser notes that a pin was refused
        assert "status of 409" in refusal


async def test_an_origin_without_a_pool_has_no_orders(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.url, "pool") as visit:
        await visit.see("pinned")
        await expect(visit.page.get_by_role("button", name="Pin")).to_have_count(0)
        await expect(visit.page.get_by_role("button", name="Apply")).to_have_count(0)
