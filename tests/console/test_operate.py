"""The console's pages for operators, over a real edge and origin."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Locator, Page, expect
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.ledger.frame import Answer, Body, BodyEnd, Call, Frame
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.admin.query import Query
from tailrace.origin.admin.streams import LivePages, encoded
from tailrace.origin.edges.calls import MAX_PIECE_BYTES
from tailrace.origin.generations.runs import Runs
from tailrace.origin.metrics import Metrics
from tests.console.conftest import Scene
from tests.console.pages import DESKTOP, PHONE, visiting
from tests.e2e.processes import Edge, running
from tests.edge.scripted_origin import ScriptedOrigin
from tests.origin.stage import RECIPE, host_of

pytestmark = pytest.mark.anyio

ENDLESS = 1_000_000
LOOKS = [("light", DESKTOP), ("dark", DESKTOP), ("light", PHONE)]


@pytest.fixture(scope="module")
async def streams(scene: Scene) -> list[str]:
    """Two that run on, and one that has ended."""
    made = [await scene.start(waves) for waves in (ENDLESS, ENDLESS, 2)]
    told = await scene.client.get(
        f"{scene.edge.url}/v1/generate/{made[-1]}", headers={"Accept": "text/event-stream"}
    )  # to its end
    assert "event: end" in told.text
    return made


@pytest.mark.parametrize(("scheme", "size"), LOOKS, ids=["light", "dark", "phone"])
async def test_axe_finds_nothing_wrong_with_any_page(
    scene: Scene, streams: list[str], scheme: str, size: tuple[int, int]
) -> None:
    shows = {
        "streams": "running",
        f"ledger/{streams[-1]}": "ended: stop",
        "ledger": "Streams that ended recently",
        "pool": "ready in",
        "latency": "p99",
        "health": "Linked edges",
    }
    for page, text in shows.items():
        async with visiting(
            scene.browser, scene.edge.tls_url, page, scheme=scheme, size=size
        ) as visit:
            await visit.see(text)
            if page == "pool":
                await visit.page.get_by_label("Arrivals").select_option("mixed")
                await visit.page.get_by_role("button", name="Simulate").click()
                await visit.see("Over the optimum")
            assert await visit.violations() == [], page
            wide = await visit.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, f"{page} is wider than the screen"
            await visit.photograph(f"{scheme}-{size[0]}")
            assert visit.faults == [], page


async def test_the_pool_page_tells_of_models_and_simulates_what_was_asked_of_them(
    scene: Scene,
) -> None:
    wanted = {"model": "teller", "prompt": "1 waves", "max_tokens": 100}
    for _ in range(2):
        answer = await scene.client.post(f"{scene.edge.url}/v1/generate", json=wanted)
        assert answer.status_code == 200
    async with visiting(scene.browser, scene.edge.tls_url, "pool") as visit:
        table = visit.page.get_by_role("table").filter(has_text="Cold starts")
        row = table.get_by_role("row").filter(has_text="teller")
        await expect(row.get_by_role("cell").nth(2)).not_to_have_text(re.compile("^[01]$"))
        assert visit.faults == []
        # Other requests to this origin decide if there is an idle gap to evaluate.
        async with visit.page.expect_request("**/v1/admin/simulate") as sent:
            await visit.page.get_by_role("button", name="Simulate").click()
        asked = json.loads((await sent.value).post_data or "")
        assert asked["trace"] == "history" and asked["load_s"] is None


async def test_the_columns_of_the_pool_and_the_ledger_are_named(
    scene: Scene, streams: list[str]
) -> None:
    async def columns(page: Page, table: str) -> list[str]:
        region = page.get_by_role("region", name=table)
        await region.get_by_role("columnheader").first.wait_for()
        return await region.get_by_role("columnheader").all_inner_texts()

    async with visiting(scene.browser, scene.edge.tls_url, "pool") as visit:
        models = "Model, Tier, Requests (1 h), (24 h), Cold starts, Load time, Policy, Keep until"
        assert await columns(visit.page, "Models and their tiers") == models.split(", ")
        workers = "Worker, State, Model, Device, Streams, Tokens, Last step, KV cache, Load time"
        assert await columns(visit.page, "Workers") == [*workers.split(", "), "Deaths"]
    async with visiting(scene.browser, scene.edge.tls_url, "ledger") as visit:
        await visit.see("Database responding")
        names = await visit.page.locator(".stats dt").all_inner_texts()
        assert names == ["Used", "WAL", "Free on the disk", "Database responding"]
        ended = "Stream, Ended, Reason, Model, Tokens, Took, Resumes"
        found = await columns(visit.page, "Streams that ended recently")
        assert found == ended.split(", ")


async def test_a_stream_is_seen_cancelled_and_looked_up_without_reloading(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "streams") as visit:
        page = visit.page
        await page.get_by_role("table", name="Live streams").wait_for()
        stream = await scene.start(ENDLESS)
        row = page.get_by_role("row").filter(has=page.locator(f"a[title='{stream}']"))
        await expect(row).to_contain_text("running")
        tokens = row.get_by_role("cell").nth(6)
        before = await tokens.inner_text()
        await expect(tokens).not_to_have_text(before)
        for width in (1920, 1280, 1241, 1100, 861, 860, 480, 360):
            await page.set_viewport_size({"width": width, "height": 900})
            beyond = await row.evaluate("row => row.scrollWidth - row.clientWidth")
            assert beyond <= 0, f"a row is {beyond} px wider than its list at {width}"
        await row.get_by_role("button", name="Cancel").click()
        await expect(row).to_have_count(0)
        ended = page.get_by_role("region", name="Streams that ended recently").get_by_role("row")
        mine = ended.filter(has=page.locator(f"a[href='#/ledger/{stream}']"))
        await expect(mine).to_contain_text("cancelled")
        await mine.get_by_role("link").click()
        await visit.see("ended: cancelled")
        phases = ("In the queue", "Until output", "Output")
        for part in (*phases, "Batch", "Commits", "Relay", "No reader"):
            await expect(page.get_by_text(part, exact=True)).to_be_visible()
        assert visit.faults == []


async def test_frames_are_scrubbed_through_and_say_nothing_unasked(
    scene: Scene, streams: list[str]
) -> None:
    stream = streams[-1]
    async with visiting(scene.browser, scene.edge.tls_url, f"ledger/{stream}") as visit:
        page = visit.page
        slider = page.get_by_role("slider")
        await expect(slider).to_have_attribute("max", "14")
        assert "Wave" not in await page.inner_text("main")
        await page.get_by_label("Show text").check()
        said = page.get_by_role("region", name="Text up to this frame")
        await expect(said).to_contain_text("Wave 1 came in from the sea.")
        await slider.fill("3")
        await expect(said).to_have_text("Wave 0 came in from")
        await slider.focus()
        await page.keyboard.press("ArrowRight")
        await expect(said).to_have_text("Wave 0 came in from the")
        await expect(page.locator(".scrub")).to_contain_text("Frame 4")
        await page.get_by_role("button", name="Play").click()
        await expect(said).to_contain_text("Wave 1 came in from the sea.")
        assert visit.faults == []


async def test_the_marks_of_a_histogram_differ_and_fit(scene: Scene, streams: list[str]) -> None:
    """None is turned or cut off, as uPlot writes them on its canvas."""
    noted = """
        window.badly = [];
        window.written = [];
        const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            const { a, b, e } = this.getTransform();
            const share = { center: 0.5, right: 0, end: 0 }[this.textAlign] ?? 1;
            const right = e + a * (x + share * this.measureText(text).width);
            window.written.push(text);
            if (b !== 0 || right > this.canvas.width) window.badly.push(text);
            return write.apply(this, arguments);
        };
        null
    """
    async with visiting(scene.browser, scene.edge.tls_url, "pool") as visit:
        page = visit.page
        await page.evaluate(noted)
        await page.get_by_role("link", name="Latency").click()
        await visit.see("Between tokens")
        await page.wait_for_function("window.written.includes('> 262,144')")
        assert await page.evaluate("window.badly") == []
        ui = "import('/web/console/ui.js')"
        spans = f"{ui}.then(({{ span }}) => [0.05, 0.1, 4.25, 310, 999.7].map(span))"
        told = await page.evaluate(spans)
        assert told == ["0.05 ms", "0.1 ms", "4.3 ms", "310 ms", "1.0 s"]
        assert visit.faults == []


async def test_a_worker_that_is_killed_is_seen_to_die_and_to_start_again(
    scene: Scene, streams: list[str]
) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "pool") as visit:
        page = visit.page
        starts = page.locator(".start")
        await expect(starts).to_have_count(1)
        await scene.origin.kill_worker()
        await visit.see("ended by SIGKILL")
        await expect(starts).to_have_count(2)
        await expect(starts.first).to_contain_text("ready in")
        await expect(page.locator(".lane svg")).to_have_accessible_name(re.compile("ready teller"))
        assert visit.faults == []


async def test_an_edge_with_keys_asks_for_an_operators(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "api-keys.json"

    def added(name: str, rights: str) -> str:
        words = ["key", "add", name, "--keys", str(keys), "--rights", rights, "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        key: str = json.loads(result.stdout)["key"]
        return key

    user, operator = added("user", "generate,read"), added("ops", "admin")
    monkeypatch.setenv("TAILRACE_EDGE_API_KEYS", str(keys))
    edge = Edge(scene.origin)
    async with running(edge), visiting(scene.browser, edge.url, "health") as visit:
        page = visit.page
        field = page.get_by_label("API key")
        await field.fill(user)
        assert await visit.violations() == []
        await visit.photograph("key")
        await field.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("lacks the right")
        await field.fill(operator)
        await field.press("Enter")
        await visit.see("Linked edges")
        assert operator not in page.url
        await page.reload()
        await visit.see("Linked edges")
        await page.get_by_role("button", name="Forget the key").click()
        await field.wait_for()
        # The first page needs a key, too, but not an operator's.
        await page.get_by_role("link", name="Try it").click()
        await page.get_by_label("What to say").fill("2 waves")
        await page.get_by_role("button", name="Send", exact=True).click()
        await page.get_by_label("This edge asks for an API key").fill(user)
        await page.get_by_role("button", name="Use it in this tab").click()
        await page.get_by_label("What to say").fill("2 waves")
        await page.get_by_role("button", name="Send", exact=True).click()
        await expect(page.get_by_role("article")).to_contain_text("Wave 1 came in from the sea.")


# ---- ten thousand streams ----

MANY = 10_000
MIDDLE = MANY // 2 - 5


class CrowdedOrigin(ScriptedOrigin):
    """Answers operators as an origin does whose streams all wait: there is no worker."""

    def __init__(self, pages: LivePages) -> None:
        super().__init__(0)
        self.pages = pages
        self.patience_ms = 3_600_000

    def answers_to(self, call: Call) -> Sequence[Frame]:
        document: dict[str, Any] = {"ledger": "file:", "used_bytes": 1}
        if call.name == "streams":
            document = self.pages.page(Query(call.url))
        data = encoded(document)
        cuts = range(0, len(data), MAX_PIECE_BYTES)
        pieces = [Body(data[at : at + MAX_PIECE_BYTES]) for at in cuts]
        return [Answer(200, ()), *pieces, BodyEnd()]


def id_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
async def crowd(tmp_path: Path) -> AsyncIterator[Runs]:
    """Yield the streams of an origin, each a second younger than the one before."""
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 1000)
    clock = iter(range(10**9))
    metrics = Metrics(lambda: float(next(clock)))
    runs = Runs(ledger, 2 * MANY, host_of([], metrics), metrics)
    for number in range(MANY):
        await runs.start((id_of(number), RECIPE))
    yield runs
    await ledger.close()


async def test_ten_thousand_streams_are_one_list_of_which_only_what_is_seen_is_there(
    scene: Scene, crowd: Runs
) -> None:
    origin = CrowdedOrigin(LivePages(crowd, lambda at_s: round(at_s * 1000)))
    async with origin.listening():
        edge = Edge(links=f"127.0.0.1:{origin.port}")
        await edge.start()
        try:
            await edge.saw("origin link up")
            async with visiting(scene.browser, edge.url, "streams") as visit:
                await _scroll_through(visit.page, crowd)
                assert await visit.violations() == []
                await visit.photograph("crowd")
                assert visit.faults == []
        finally:
            await edge.stop()


async def _scroll_through(page: Page, crowd: Runs) -> None:
    table = page.get_by_role("table", name="Live streams")
    await expect(table).to_have_attribute("aria-rowcount", str(MANY + 1))
    body = page.locator(".body")

    def row(number: int) -> Locator:
        return page.get_by_role("row").filter(has=page.locator(f"a[title='{id_of(number).hex()}']"))

    await expect(row(MANY - 1)).to_have_attribute("aria-rowindex", "2")  # the youngest first
    for share, number in ((1.0, 0), (0.5, MIDDLE)):
        await body.evaluate("(at, share) => { at.scrollTop = share * at.scrollHeight }", share)
        await expect(row(number)).to_be_in_viewport()
    assert await page.get_by_role("row").count() < 300
    # A changed row is updated in place, and the sort order stays.
    stream = crowd.table.by_id[id_of(MIDDLE)]
    stream.progress.tokens = 4321
    crowd.table.changed(stream)
    await expect(row(MIDDLE)).to_contain_text("4,321")
    await page.get_by_role("button", name="Tokens").click()
    await expect(row(MIDDLE)).to_have_attribute("aria-rowindex", "2")
    await page.get_by_label("Stream ID").fill(id_of(77).hex())
    await expect(table).to_have_attribute("aria-rowcount", "2")
    await expect(row(77)).to_be_in_viewport()
