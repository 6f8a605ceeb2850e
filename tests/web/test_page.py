"""The page of docs/web.md, as it stands there, in Chromium over HTTP/3; and what becomes of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import Browser, CDPSession, Page

from tailrace.up import development_certificate
from tests.e2e.browser import PATIENCE_MS, browser
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, running
from tests.e2e.udp_way import UdpWay
from tests.npm import installed
from tests.schema_text import ROOT
from tests.web.pacing import WORDS

pytestmark = pytest.mark.anyio

Motion = Literal["no-preference", "reduce"]
HERE = Path(__file__).parent
DOCUMENTED = re.findall(r"```html\n(.*?)```", (ROOT / "docs/web.md").read_text("utf-8"), re.DOTALL)
WHOLE = "".join(f"word{number} " for number in range(WORDS))


class Scene:
    """An edge, a browser, and a network path for UDP that tests can cut."""

    def __init__(self, origin: HeldOrigin, edge: Edge, launched: Browser, way: UdpWay) -> None:
        self.origin = origin
        self.edge = edge
        self.browser = launched
        self.way = way

    @asynccontextmanager
    async def page(
        self, html: str, port: int | None = None, motion: Motion = "no-preference"
    ) -> AsyncIterator[Page]:
        """One at the edge's own name, as behind a proxy of both."""
        context = await self.browser.new_context(reduced_motion=motion)
        try:
            page = await context.new_page()
            await serve(page, f"https://localhost:{port or self.edge.tls_port}/page", html)
            yield page
        finally:
            await context.close()


async def serve(page: Page, url: str, html: str) -> None:
    """Go to a page of the edge's that only this one finds there."""
    page.set_default_timeout(PATIENCE_MS)

    async def fulfil(route: object) -> None:
        await route.fulfill(body=html, content_type="text/html")  # type: ignore[attr-defined]

    await page.route(url, fulfil)
    await page.goto(url)


@pytest.fixture(scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("page")
    files = development_certificate(folder / "certificate", datetime.now(UTC))
    origin = HeldOrigin(folder / "data", producer="tests.web.pacing:pacing")
    edge = Edge(origin, certificate=(files.certificate, files.key))
    async with (
        running(origin, edge),
        UdpWay.open(edge.tls_port) as way,
        browser(files.certificate, edge.tls_port, way.port) as launched,
    ):
        yield Scene(origin, edge, launched, way)


async def text_of(page: Page) -> str:
    return await page.evaluate("document.querySelector('#answer').textContent") or ""


async def has_words(page: Page, count: int) -> None:
    await page.wait_for_function(
        "count => document.querySelector('#answer').textContent.split(' ').length > count",
        arg=count,
    )


async def is_in_state(page: Page, state: str) -> None:
    await page.wait_for_function("s => document.querySelector('#state').value === s", arg=state)


async def ask(page: Page) -> None:
    await page.click("text=Ask")
    await has_words(page, 10)


async def ask_and_hold(scene: Scene, page: Page) -> None:
    """Open a stream that stops in its middle until the origin is told to go on."""
    scene.origin.hold(len(WHOLE) // 2)
    await ask(page)


def test_the_whole_integration_is_a_page_of_twenty_lines() -> None:
    (html,) = DOCUMENTED
    lines = html.splitlines()
    assert sum(line.startswith("  ") for line in lines) <= 20
    assert len(lines) <= 23


async def test_it_streams_over_http3_and_goes_on_after_a_reload(scene: Scene) -> None:
    async with scene.page(DOCUMENTED[0]) as page:
        await ask(page)
        before = await text_of(page)
        await page.reload()
        await has_words(page, len(before.split()))  # all of it is there again
        await is_in_state(page, "ended")
        assert await text_of(page) == WHOLE
        used = await page.evaluate(
            "performance.getEntriesByType('resource')"
            ".map(({name, nextHopProtocol}) => [new URL(name).pathname, nextHopProtocol])"
        )
        assert {protocol for path, protocol in used if path.startswith(("/v1/", "/web/"))} == {"h3"}


async def test_it_goes_offline_and_comes_back_from_another_address(scene: Scene) -> None:
    """A telephone that leaves a house does this."""
    async with scene.page(DOCUMENTED[0], scene.way.port) as page:
        await ask_and_hold(scene, page)
        before = scene.way.lost
        await page.context.set_offline(True)
        scene.way.cut = True
        scene.origin.go_on()
        while scene.way.lost < before + 2:
            await page.wait_for_timeout(50)
        scene.way.change()
        scene.way.cut = False
        await page.context.set_offline(False)
        await is_in_state(page, "ended")
        assert await text_of(page) == WHOLE


async def test_it_outlives_an_edge_that_is_killed_while_it_is_offline(scene: Scene) -> None:
    async with scene.page(DOCUMENTED[0]) as page:
        await ask_and_hold(scene, page)
        await page.context.set_offline(True)
        await scene.edge.kill()
        await is_in_state(page, "waiting")
        scene.origin.go_on()
        scene.edge.events.clear()
        await scene.edge.ready()
        await page.context.set_offline(False)
        await is_in_state(page, "ended")
        assert await text_of(page) == WHOLE


async def test_a_frozen_tab_misses_nothing_and_asks_nothing_again(scene: Scene) -> None:
    counted = DOCUMENTED[0].replace(
        "async function show(reading) {", "async function show(reading) { window.reading = reading;"
    )
    async with scene.page(counted) as page:
        await ask_and_hold(scene, page)
        session: CDPSession = await page.context.new_cdp_session(page)
        await session.send("Page.setWebLifecycleState", {"state": "frozen"})
        scene.origin.go_on()
        other = await scene.browser.new_page()  # time passes: a stream as long is read elsewhere
        await other.goto(f"{scene.edge.tls_url}/healthz")
        await other.evaluate(
            "fetch('/v1/generate', {method: 'POST', body: JSON.stringify("
            "{model: 'demo', prompt: '60'})}).then(answer => answer.text())"
        )
        await other.close()
        await session.send("Page.setWebLifecycleState", {"state": "active"})
        await is_in_state(page, "ended")
        assert await text_of(page) == WHOLE
        assert await page.evaluate("window.reading.resumes") == 0


async def test_stop_cancels(scene: Scene) -> None:
    async with scene.page(DOCUMENTED[0]) as page:
        await ask_and_hold(scene, page)
        await page.click("#stop")
        await is_in_state(page, "ended")
        scene.origin.go_on()
        assert WHOLE.startswith(await text_of(page))
        assert await text_of(page) != WHOLE


async def test_a_component_of_react_shows_a_stream_and_outlives_a_second_mount(
    scene: Scene, tmp_path: Path
) -> None:
    bundle = tmp_path / "component.js"
    react = ("--alias:react=./node_modules/react", "--tsconfig-raw={}")
    command = ("component.js", "--bundle", "--format=esm", f"--outfile={bundle}", *react)
    built = await asyncio.create_subprocess_exec(
        str(installed(HERE) / "esbuild"), *command, "--log-level=error", cwd=HERE
    )
    assert await built.wait() == 0
    html = f'<div id="root"></div><script type="module">{bundle.read_text("utf-8")}</script>'
    async with scene.page(html) as page:
        await ask_and_hold(scene, page)
        assert await page.evaluate("window.posts") == 1
        await page.click("text=Hide")
        await is_detached(page)
        scene.origin.go_on()
        await page.click("text=Show")
        await has_words(page, WORDS)  # at an even pace, a moment after its end has come
        assert await text_of(page) == WHOLE
        assert await page.evaluate("window.posts") == 1
        await page.wait_for_function("window.reason === 'stop'")
        assert await page.evaluate("window.textAtEnd") == WHOLE
        await ask_and_hold(scene, page)
        await page.click("text=Stop")
        await is_in_state(page, "ended")
        scene.origin.go_on()
        await page.wait_for_function("window.reason === 'cancelled'")
        assert await page.evaluate("window.cancelled.state") == "ended"


async def is_detached(page: Page) -> None:
    await page.wait_for_function("window.reading.state === 'detached'")


TABS = """<output id="answer"></output><script type="module">
  import { resume, stream } from "/web/tailrace/index.min.js";
  const [url, storage] = ["/v1/generate", localStorage];
  const input = { model: "demo", prompt: "words" };
  window.reading = resume(url, { storage }) ?? stream(url, { input, storage });
  const answer = document.querySelector("#answer");
  for await (const frame of reading) answer.textContent = reading.content;
  window.over = true;
</script>"""


async def test_tabs_share_a_stream(scene: Scene) -> None:
    async with scene.page(TABS) as page:
        await has_words(page, 10)
        other = await page.context.new_page()
        await serve(other, page.url, TABS)
        for tab in (page, other):
            await tab.wait_for_function("window.over")
            assert await text_of(tab) == WHOLE
        assert await page.evaluate("reading.id") == await other.evaluate("reading.id")


COMPRESSED = """<script type="module">
  import { stream } from "/web/tailrace/index.min.js";
  const reading = stream("/v1/generate", { input: { model: "demo", prompt: "120" } });
  for await (const frame of reading) if (reading.content.endsWith("word89 ")) break;
  const headers = { Accept: "application/x-ndjson" };
  const replay = await fetch(`/v1/generate/${reading.id}`, { headers });
  window.coding = replay.headers.get("Content-Encoding");
  const lines = replay.body.pipeThrough(new TextDecoderStream()).getReader();
  window.replayed = "";
  for (let said; !(said = await lines.read()).done; ) window.replayed += said.value;
  window.over = true;
</script>"""
TOLD = "replayed.split(`\\n`).filter(Boolean).map((line) => JSON.parse(line).text ?? ``).join(``)"


async def test_a_browser_decompresses_a_replay_and_each_live_token_after_it(scene: Scene) -> None:
    words = [f"word{number} " for number in range(120)]
    scene.origin.hold(len("".join(words[:90])))
    async with scene.page(COMPRESSED) as page:
        await page.wait_for_function("window.replayed?.includes('word89 ')")
        assert await page.evaluate("coding") == "zstd"
        assert not await page.evaluate("window.over")
        scene.origin.go_on()
        await page.wait_for_function("window.over")
        assert await page.evaluate(TOLD) == "".join(words)


PACED = """<script type="module">
  import { stream } from "/web/tailrace/index.min.js";
  import { smooth } from "/web/tailrace/smooth.js";
  const input = { model: "demo", prompt: "5" };
  let timers = 0;
  const setTimer = (ring, ms) => { timers += 1; setTimeout(ring, ms); };
  const reading = stream("/v1/generate", { input });
  for await (const text of smooth(reading, { setTimer })) window.text = text;
  window.timers = timers;
</script>"""


async def test_reduced_motion_turns_smooth_off(scene: Scene) -> None:
    timers = {}
    motions: tuple[Motion, ...] = ("reduce", "no-preference")
    for motion in motions:
        async with scene.page(PACED, motion=motion) as page:
            await page.wait_for_function("window.timers !== undefined")
            timers[motion] = await page.evaluate("window.timers")
            assert await page.evaluate("window.text") == "word0 word1 word2 word3 word4 "
    assert timers["reduce"] == 0 < timers["no-preference"]


MANY = """<!doctype html><main></main><script type="module">
  import { stream } from "/web/tailrace/index.min.js";
  const longest = [];
  new PerformanceObserver((list) => {
    for (const { duration } of list.getEntries()) longest.push(Math.round(duration));
  }).observe({ type: "longtask", buffered: true });
  async function show(reading) {
    const shown = document.querySelector("main").appendChild(document.createElement("p"));
    for await (const frame of reading) shown.textContent = reading.content;
    return [reading.content, reading.transport];
  }
  const input = { model: "demo", prompt: "words" };
  const readings = Array.from({ length: 50 }, () => stream("/v1/generate", { input }));
  window.came = await Promise.all(readings.map(show));
  window.longest = longest;
</script>"""


async def test_fifty_streams_in_one_page_come_whole(scene: Scene) -> None:
    """Each stream has 20 words a second.

    Tasks over 50 ms are printed and not asserted: other things run on the machine of a test.
    """
    async with scene.page("") as page:
        # Chromium lets a page that came from nowhere open no WebSocket to this machine.
        await page.goto(f"{scene.edge.tls_url}/healthz")
        await page.set_content(MANY)
        await page.wait_for_function("window.longest")
        came = await page.evaluate("window.came")
        print("tasks over 50 ms:", await page.evaluate("window.longest"))
    assert [text for text, _ in came] == [WHOLE] * 50
    assert sorted({transport for _, transport in came}) == ["fetch", "websocket"]
