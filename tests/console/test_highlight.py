"""Syntax colours of code in the console: without a page, and while code streams into one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.console.conftest import Scene
from tests.console.pages import visiting
from tests.console.test_try import say
from tests.e2e.processes import Edge, Origin, running
from tests.npm import installed
from tests.web.test_client import run

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
PYTHON = '''def greet(name: str) -> str:  # polite
    """Say hello."""
    return f"Hello, {name}" if name is not None else 42
class Whale(Animal): ...'''
HTML = '<a href="x" onclick="window.ran=1">go</a><script>window.ran = 2</script>'
PATCH = "- old\n+ new"
BLOCKS = {"python": PYTHON, "html": HTML, "diff": PATCH, "klingon": "nuqneH"}
ANSWER = "\n\n".join(f"```{language}\n{code}\n```" for language, code in BLOCKS.items())
LINES = 300
LONG = "```js\n" + "".join(f"const a{n} = go({n}); // {n}\n" for n in range(LINES)) + "```"
COLOURS = """
    (root) => [...root.querySelectorAll("pre span[class]")].map((one) => [
        one.className, one.textContent, getComputedStyle(one).color])
"""
STAYS = """
    () => {
        const first = document.querySelector("article pre code > span");
        const same = window.first === first;
        window.first ??= first;
        return same;
    }
"""


def test_in_node() -> None:
    installed(HERE)
    run("node", "--test", HERE / "highlight.test.js")


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    folder = tmp_path_factory.mktemp("highlight")
    origin = Origin(folder / "data", producer="tests.console.writer:writer")
    made = Edge(origin)
    async with running(origin, made):
        yield made


async def ask(page: Page, text: str) -> None:
    """Have the model write the text."""
    await page.get_by_role("option", name="writer").wait_for(state="attached")
    await page.get_by_role("radio", name="Chat").check()
    await say(page, text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_code_has_colours_with_enough_contrast(scene: Scene, edge: Edge, scheme: str) -> None:
    async with visiting(scene.browser, edge.url, "try", scheme=scheme) as visit:
        page = visit.page
        await ask(page, ANSWER)
        answer = page.get_by_role("article")
        await expect(answer).to_have_attribute("aria-busy", "false")
        blocks = answer.locator("pre > code")
        await expect(blocks).to_have_text(list(BLOCKS.values()))
        await expect(blocks.nth(0).locator(".code-kwd").first).to_have_text("def")
        await expect(blocks.nth(1).locator(".code-str").first).to_have_text('"x"')
        await expect(blocks.nth(2).locator(".code-insert")).to_have_text("+ new")
        await expect(blocks.nth(3).locator("span")).to_have_count(0)
        found: list[Any] = await answer.evaluate(COLOURS)
        plain = await blocks.nth(3).evaluate("(one) => getComputedStyle(one).color")
        names = {"code-kwd", "code-str", "code-num", "code-func", "code-class", "code-cmnt"}
        assert names <= {kind for kind, _, colour in found if colour != plain}
        assert await page.evaluate("window.ran ?? 0") == 0
        assert await visit.violations() == []
        await visit.photograph(f"code-{scheme}")
        assert visit.faults == []


async def test_lines_that_are_complete_keep_their_elements_while_code_streams(
    scene: Scene, edge: Edge
) -> None:
    async with visiting(scene.browser, edge.url, "try") as visit:
        page = visit.page
        await ask(page, LONG)
        code = page.get_by_role("article").locator("pre > code")
        await expect(code).to_contain_text("const a100")
        await expect(code.locator(".code-kwd").first).to_be_visible()
        assert not await page.evaluate(STAYS)
        await expect(page.get_by_role("article")).to_have_attribute("aria-busy", "false")
        assert await page.evaluate(STAYS)
        await expect(code).to_have_text(LONG.removeprefix("```js\n").removesuffix("\n```"))
        await expect(code.locator(".code-cmnt")).to_have_count(LINES)
        assert visit.faults == []
