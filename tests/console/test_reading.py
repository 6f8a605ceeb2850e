"""The reader's hand on the pace of the console's first page: pause, units, steering, branches."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Locator, Page, expect

from tests.console.conftest import Scene
from tests.console.pages import visiting
from tests.console.teller import told
from tests.console.test_try import WAVES, WHOLE, choose, say
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, running

pytestmark = pytest.mark.anyio

STEER = " And then a whale came"
INSTRUCTION = "Another one, please."
HELD = 200
"""Characters after which the origin's text stops, so that a page is in the middle of it."""
LONG = re.compile(r".{60}", re.DOTALL)
SOME = re.compile(r"\w")
SEEN = """
    window.seen = [];
    const look = () => {
        const text = document.querySelector("article")?.innerText.trim() ?? "";
        if (text !== window.seen.at(-1)) window.seen.push(text);
        requestAnimationFrame(look);
    };
    look();
    null
"""


@pytest.fixture(scope="module")
async def demo(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[HeldOrigin, Edge]]:
    """Yield an origin of the demo model, whose text can be held, and an edge before it."""
    origin = HeldOrigin(tmp_path_factory.mktemp("reading") / "data")
    edge = Edge(origin)
    async with running(origin, edge):
        yield origin, edge


async def ended(scene: Scene, edge: Edge, stream: str) -> str:
    """Wait for the end of a stream, and return its reason."""
    events = {"Accept": "text/event-stream"}
    await scene.client.get(f"{edge.url}/v1/generate/{stream}", headers=events)
    answer = await scene.client.get(f"{edge.url}/v1/admin/streams/{stream}")
    reason: str = answer.json()["end"]["finish_reason"]
    return reason


async def stream_of(page: Page) -> str:
    href = await page.locator(".wire a.mono").get_attribute("href")
    assert href is not None
    return href.rpartition("/")[2]


async def test_a_pause_shows_nothing_more_and_loses_nothing(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        pause = page.get_by_role("button", name="Pause")
        await expect(pause).to_be_disabled()
        await say(page, f"{WAVES} waves")
        answer = page.get_by_role("article")
        await expect(answer).to_contain_text("Wave 3")
        await pause.click()
        await expect(pause).to_have_attribute("aria-pressed", "true")
        shown = await answer.inner_text()
        assert WHOLE.startswith(shown.rstrip()) and len(shown) < len(WHOLE)
        assert await ended(scene, scene.edge, await stream_of(page)) == "stop"
        assert await answer.inner_text() == shown
        await expect(answer).to_have_attribute("aria-busy", "true")
        assert await visit.violations() == []
        await pause.click()
        await expect(answer).to_have_attribute("aria-busy", "false")
        assert await answer.inner_text() == WHOLE
        assert visit.faults == []


async def test_text_comes_by_whole_sentences_and_the_setting_stays(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        await page.get_by_text("Pace and format").click()
        await page.get_by_label("One step is a").select_option("sentence")
        await page.evaluate(SEEN)
        await say(page, "5 waves")
        answer = page.get_by_role("article")
        await expect(answer).to_have_attribute("aria-busy", "false")
        assert await answer.inner_text() == "".join("".join(told(n)) for n in range(5))
        seen = await page.evaluate("window.seen")
        assert len(seen) > 2 and all(one == "" or one.endswith("sea.") for one in seen), seen
        await page.reload()
        await page.get_by_text("Pace and format").click()
        await expect(page.get_by_label("One step is a")).to_have_value("sentence")
        # At 120 words a minute the second sentence comes 4 s after the first.
        await page.get_by_label("Words a minute").select_option("120")
        await choose(page, "auto")
        await say(page, "5 waves")
        newest = page.get_by_role("article").last
        await expect(newest).to_have_text("Wave 0 came in from the sea.")
        await expect(page.locator(".events")).to_contain_text("ended: stop")
        await expect(newest).to_have_text("Wave 0 came in from the sea.")
        await page.get_by_role("button", name="Stop").click()  # shows what there is
        await expect(newest).to_have_attribute("aria-busy", "false")
        await expect(newest).to_contain_text("Wave 4")
        assert await visit.violations() == []
        assert visit.faults == []


async def test_the_demo_model_continues_a_text_past_its_end_and_others_chat(
    scene: Scene, demo: tuple[HeldOrigin, Edge]
) -> None:
    _, edge = demo
    past = "past its end, up to 600 tokens"
    for url, model, task in (
        (edge.url, "demo", "Continue my text"),
        (scene.edge.url, "teller", "Chat"),
    ):
        async with visiting(scene.browser, url, "try") as visit:
            page = visit.page
            await page.get_by_role("option", name=model).wait_for(state="attached")
            checked = page.get_by_role("radio", name=task)
            await expect(checked).to_be_checked()
            continues = task != "Chat"
            await expect(page.get_by_text(past)).to_have_count(int(continues))
            await page.get_by_text("Use this from a terminal").click()
            assert ("ignore_eos" in await page.locator(".curl").inner_text()) == continues
            await page.get_by_role("radio", name="Continue my text").check()
            await expect(page.get_by_text(past)).to_be_visible()
            assert await visit.violations() == []
            assert visit.faults == []


async def test_an_answer_that_runs_is_steered(scene: Scene, demo: tuple[HeldOrigin, Edge]) -> None:
    origin, edge = demo
    async with visiting(scene.browser, edge.url, "try") as visit:
        page = visit.page
        await begin(page, origin)
        await page.get_by_label("Text to go on with").fill(STEER)
        async with page.expect_request("**/v1/generate/*/steer") as asked:
            await page.get_by_role("button", name="Steer", exact=True).click()
        assert (await asked.value).post_data_json == {"text": STEER}
        origin.go_on()  # the answer to it comes when it has taken effect
        await expect(page.locator(".events")).to_contain_text("steered by you")
        await expect(page.get_by_role("article")).to_contain_text(STEER.strip())
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator(".events")).to_contain_text("ended: cancelled")
        assert visit.faults == []


async def begin(page: Page, origin: HeldOrigin, task: str = "Continue my text") -> None:
    """Ask for a text, which stops in its middle, and open what changes it."""
    await page.get_by_role("option", name="demo").wait_for(state="attached")
    await choose(page, "auto")
    await page.get_by_role("radio", name=task).check()
    await page.get_by_text("Steer, branch").click()
    origin.hold(HELD)
    await say(page, "Once upon a time")
    await expect(page.get_by_role("article")).to_have_text(LONG)


async def paused(page: Page) -> Locator:
    """Press Pause, and wait until the page is drawn: its text stands still from then on."""
    pause = page.get_by_role("button", name="Pause")
    await pause.click()
    await expect(pause).to_have_attribute("aria-pressed", "true")
    return pause


async def test_a_branch_shares_what_is_shown_and_ends_the_rest(
    scene: Scene, demo: tuple[HeldOrigin, Edge]
) -> None:
    origin, edge = demo
    async with visiting(scene.browser, edge.url, "try") as visit:
        page = visit.page
        await begin(page, origin)
        await paused(page)
        answer = page.get_by_role("article")
        shown = (await answer.inner_text()).rstrip()
        parent = await stream_of(page)
        await page.get_by_label("Text to go on with").fill(STEER)
        origin.hold(4 * HELD)  # a held stream would keep its worker from the branch
        async with page.expect_request("**/v1/generate/*/branch") as asked:
            await page.get_by_role("button", name="Branch here").click()
        request = await asked.value
        body = request.post_data_json
        assert body is not None and body["text"] == STEER and body["index"] > 5
        assert parent in request.url
        await expect(answer).to_contain_text(STEER.strip())
        branch = await answer.inner_text()
        assert branch.startswith(shown)
        # The shown text may have ended with a line break, which the branch keeps.
        assert branch.removeprefix(shown).lstrip().startswith(STEER.lstrip())
        origin.go_on()
        assert await ended(scene, edge, parent) == "cancelled"
        await expect(page.get_by_role("article")).to_have_count(1)
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator(".events")).to_contain_text("ended: cancelled")
        assert visit.faults == []


async def test_an_instruction_ends_the_answer_where_it_is_shown_and_is_answered(
    scene: Scene, demo: tuple[HeldOrigin, Edge]
) -> None:
    origin, edge = demo
    async with visiting(scene.browser, edge.url, "try") as visit:
        page = visit.page
        await begin(page, origin, "Chat")
        await page.get_by_text("Pace and format").click()
        await page.get_by_label("Answers are").select_option("plain")
        await paused(page)
        answers = page.get_by_role("article")
        shown = (await answers.inner_text()).strip()
        parent = await stream_of(page)
        await page.get_by_label("Text to go on with").fill(INSTRUCTION)
        assert await visit.violations() == []
        origin.hold(4 * HELD)  # a held stream would keep its worker from the branch
        async with page.expect_request("**/v1/generate/*/branch") as asked:
            await page.get_by_role("button", name="Ask here").click()
        request = await asked.value
        body = request.post_data_json
        assert body is not None and parent in request.url
        assert body == {"index": body["index"], "instruction": INSTRUCTION}
        await expect(page.locator(".asked").last).to_contain_text(INSTRUCTION)
        await expect(answers.last).to_have_text(SOME)
        origin.go_on()
        assert await ended(scene, edge, parent) == "cancelled"
        await expect(answers.last).to_have_attribute("aria-busy", "false")
        first, second = await answers.all_inner_texts()
        assert first.strip() == shown
        whole = await scene.client.get(f"{edge.url}/v1/generate/{await stream_of(page)}")
        # No space need be between the two, and the page shows none at their ends.
        assert "".join(whole.json()["text"].split()) == "".join(f"{first}{second}".split())
        # Another answer is to the same instruction.
        async with page.expect_request("**/v1/generate/*/branch") as asked:
            await page.get_by_role("button", name="Again", exact=True).click()
        assert (await asked.value).post_data_json == {"index": body["index"]}
        await expect(answers.last).to_have_attribute("aria-busy", "false")
        await page.reload()
        await expect(answers.first).to_have_text(first)
        assert visit.faults == []


async def test_an_instruction_is_for_chats(scene: Scene, demo: tuple[HeldOrigin, Edge]) -> None:
    origin, edge = demo
    async with visiting(scene.browser, edge.url, "try") as visit:
        page = visit.page
        await begin(page, origin)
        await page.get_by_label("Text to go on with").fill(INSTRUCTION)
        await expect(page.get_by_role("button", name="Branch here")).to_be_enabled()
        await expect(page.get_by_role("button", name="Ask here")).to_be_disabled()
        origin.go_on()
        await page.get_by_role("button", name="Stop").click()


async def test_a_branch_that_is_refused_leaves_the_answer_as_it_was(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="teller").wait_for(state="attached")
        await choose(page, "auto")
        await say(page, "3 waves")
        answer = page.get_by_role("article")
        await expect(answer).to_have_attribute("aria-busy", "false")
        before = await answer.inner_text()
        await page.get_by_text("Steer, branch").click()
        await page.get_by_role("button", name="Branch here").click()
        await expect(page.get_by_role("alert")).to_contain_text("cannot continue an answer")
        assert await answer.inner_text() == before
        await expect(page.locator(".asked")).to_have_count(1)
        await expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
