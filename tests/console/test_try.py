"""The console's first page: a chat whose network is cut in the middle of a sentence."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import Scene
from tests.console.pages import DESKTOP, PHONE, Visit, visiting
from tests.console.teller import told

pytestmark = pytest.mark.anyio

WAVES = 60
WHOLE = "".join("".join(told(number)) for number in range(WAVES))
CUT_AFTER = 60
"""Tokens before a cut that was asked for ahead."""
POSITION_IS_STORED = """
    () => Object.values(sessionStorage).some((stored) => /"next":[1-9]/.test(stored))
"""
"""The client stores every second which frames the page has."""
SHIFTS = """
    window.shifted = [];
    new PerformanceObserver((list) => {
        for (const { hadRecentInput, sources } of list.getEntries()) {
            if (hadRecentInput) continue;
            window.shifted.push(...sources.map(({ node }) => node?.parentElement?.outerHTML));
        }
    }).observe({ type: "layout-shift" });
"""


async def choose(page: Page, transport: str) -> None:
    await page.get_by_text("Model, transport").click()
    await page.get_by_label("Continue my text").check()
    await page.get_by_label("Transport").select_option(transport)


async def say(page: Page, text: str) -> None:
    await page.get_by_label("What to say").fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


@pytest.mark.parametrize(
    ("transport", "protocol"), [("fetch", "HTTP/3"), ("websocket", "WebSocket")]
)
async def test_a_stream_that_is_cut_goes_on_with_the_next_token(
    scene: Scene, transport: str, protocol: str
) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, transport)
        await page.get_by_role("button", name="Cut the network").click()
        await expect(page.get_by_role("button", name="Will cut")).to_be_visible()
        await page.evaluate(SHIFTS)
        await say(page, f"{WAVES} waves")
        answer = page.get_by_role("article")
        await expect(answer).to_have_attribute("aria-busy", "true")
        await visit.see("the network is cut")
        await visit.photograph(f"cut-{transport}")
        await expect(page.locator(".events")).to_contain_text("ended: stop")
        await expect(answer).to_have_attribute("aria-busy", "false")
        assert await answer.inner_text() == WHOLE  # without the mark, which is no text
        await expect(answer.locator(".cutmark")).to_have_count(1)
        await expect(page.locator(".sum")).to_contain_text("none lost")
        await _check_the_wire(page, protocol)
        # Nothing has moved while it came.
        assert await page.evaluate("window.shifted") == []
        assert await visit.violations() == []
        await visit.photograph(transport)
        assert visit.faults == []


async def _check_the_wire(page: Page, protocol: str) -> None:
    async def number(name: str) -> int:
        named = page.locator(".figures div").filter(has=page.get_by_text(name, exact=True))
        text = await named.locator("dd").inner_text()
        return int(text.replace(",", ""))

    assert await number("Received before the cut") >= CUT_AFTER
    missed = await number("Generated while offline")
    assert missed > 0
    assert await number("Replayed") == missed
    assert await number("Tokens") == WAVES * len(told(0))
    first = page.locator(".figures div").filter(has_text="Time to resume").locator("dd")
    assert re.fullmatch(r"[\d.]+ m?s", await first.inner_text())
    way = page.locator(".figures div").filter(has_text="Protocol").locator("dd")
    await expect(way).to_have_text(protocol)
    own, event, chunk = (float(text) for text in await page.locator(".costs b").all_inner_texts())
    assert own < event < chunk
    assert (
        f"resumed after frame {await number('Received before the cut') - 1}"
        in await page.locator(".events").inner_text()
    )


async def test_an_answer_is_generated_again_as_a_branch(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        again = page.get_by_role("button", name="Again", exact=True)
        await expect(again).to_be_disabled()
        await say(page, "2 waves")
        answer = page.get_by_role("article")
        await expect(answer).to_have_attribute("aria-busy", "false")
        told_once = await answer.inner_text()
        await expect(again).to_be_enabled()
        async with page.expect_request("**/v1/generate/*/branch") as asked:
            await again.click()
        assert (await asked.value).post_data_json == {"index": 0}
        await expect(answer).to_have_attribute("aria-busy", "false")
        await expect(page.locator(".events")).to_contain_text("ended: stop")
        assert await answer.inner_text() == told_once  # the teller says the same to the same words
        await expect(page.get_by_role("article")).to_have_count(1)
        assert await visit.violations() == []
        assert visit.faults == []


async def test_the_request_can_be_made_from_a_terminal(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        await page.get_by_label("What to say").fill("it's 2 waves")
        await page.get_by_text("Use this from a terminal").click()
        program, *words = shlex.split(await page.locator(".curl").inner_text())
        assert (program, words[:2]) == ("curl", ["-N", f"{scene.edge.url}/v1/generate"])
        body = json.loads(words[words.index("-d") + 1])
        assert (body["model"], body["prompt"]) == ("teller", "it's 2 waves")
        assert await visit.violations() == []
        assert visit.faults == []


async def test_a_screen_reader_hears_whole_sentences(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        region = page.get_by_role("log", name="New text of the answer")
        await expect(region).to_have_attribute("aria-live", "polite")
        await say(page, "5 waves")
        await expect(region).to_contain_text("Wave 4 came in from the sea.")
        heard = await region.locator("p").all_inner_texts()  # several in one, if they come at once
        said = " ".join(heard).split()
        assert said == "".join("".join(told(number)) for number in range(5)).split()
        assert all(one.endswith(".") for one in heard)


async def test_stop_is_always_at_hand_and_ends_it_for_everybody(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "try", size=PHONE) as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        await say(page, "1000000 waves")
        stop = page.get_by_role("button", name="Stop")
        await expect(stop).to_be_enabled()
        await expect(page.get_by_role("article")).to_contain_text("Wave 20")
        await expect(stop).to_be_in_viewport()
        assert await visit.violations() == []
        await visit.photograph("phone")
        await page.keyboard.press("Escape")
        await expect(page.locator(".events")).to_contain_text("ended: cancelled")
        await expect(stop).to_be_disabled()
        assert visit.faults == []


async def test_a_stream_outlives_a_reload_of_the_page(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "fetch")
        await say(page, f"{3 * WAVES} waves")
        await page.wait_for_function(POSITION_IS_STORED)
        await page.reload()
        await expect(page.locator(".events")).to_contain_text("ended: stop")
        whole = "".join("".join(told(number)) for number in range(3 * WAVES))
        assert await page.get_by_role("article").inner_text() == whole
        replayed = page.locator(".river .replayed")
        assert await replayed.count() > 0  # what was shown before the reload
        color = "at => getComputedStyle(at).stroke"
        assert await replayed.first.evaluate(color) not in ("none", await _color_of_live(page))


async def _color_of_live(page: Page) -> str:
    live = page.locator(".river .live").first
    color: str = await live.evaluate("at => getComputedStyle(at).stroke")
    return color


async def test_what_happened_is_in_view_on_a_small_desktop(scene: Scene) -> None:
    size = (1280, 900)
    async with visiting(scene.browser, scene.edge.url, "try", size=size) as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        await say(page, "2 waves")
        await expect(page.locator(".events")).to_contain_text("ended: stop")
        card = page.locator(".card").filter(has=page.get_by_role("heading", name="What happened"))
        await expect(card).to_be_in_viewport(ratio=1)
        assert visit.faults == []


async def test_the_page_can_be_left_while_it_streams_and_scrolls(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        await say(page, "1000000 waves")
        await expect(page.get_by_role("article")).to_contain_text("Wave 20")
        turns = await page.query_selector(".turns")
        await page.get_by_role("link", name="Health").click()
        await visit.see("Linked edges")
        assert turns is not None
        # The browser tells of a scroll in its next frame, when the page may have gone.
        await turns.evaluate("at => at.dispatchEvent(new Event('scroll'))")
        await page.get_by_role("link", name="Try it").click()
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator(".events")).to_contain_text("ended: cancelled")
        assert visit.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_wrong_with_the_first_page(scene: Scene, scheme: str) -> None:
    for size in (DESKTOP, PHONE):
        async with visiting(
            scene.browser, scene.edge.tls_url, "try", scheme=scheme, size=size
        ) as visit:
            await visit.see("Every token here is written to a ledger before you see it.")
            await _look(visit, f"{scheme}-{size[0]}")


async def _look(visit: Visit, suffix: str) -> None:
    assert await visit.violations() == []
    await visit.photograph(suffix)
    assert visit.faults == []
