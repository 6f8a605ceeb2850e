"""A reader who pauses stops the generation, over either transport, and loses no token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import expect

from tests.console.conftest import Scene
from tests.console.pages import visiting
from tests.console.test_reading import HELD, LONG, paused, stream_of
from tests.console.test_try import choose, say
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, running

pytestmark = pytest.mark.anyio

WINDOW_FRAMES = 256
"""Maximum frames that a client has credit for, and that it queues (core.js)."""
TOKENS = 800
HELD_BEHIND_WINDOW = 2_400
"""Characters at which the text waits for its reader to run out of credit.

They are more than a window of frames, so only a reader without credit is left to wait for.
"""


@pytest.fixture(scope="module")
async def pausing(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[HeldOrigin, Edge]]:
    """Yield an origin and an edge that pauses streams without a reader after one second."""
    origin = HeldOrigin(tmp_path_factory.mktemp("pausing") / "data")
    edge = Edge(origin)
    edge.environment["TAILRACE_EDGE_UNREAD"] = "pause"
    edge.environment["TAILRACE_EDGE_UNREAD_AFTER_S"] = "1"
    async with running(origin, edge):
        yield origin, edge


async def generated(scene: Scene, edge: Edge, stream: str) -> int:
    """Return the number of frames in the log. An operator's request does not count as a reader."""
    answer = await scene.client.get(f"{edge.url}/v1/admin/streams/{stream}")
    told: dict[str, Any] = answer.json()
    frames: int = told["next_index"]
    return frames


async def generate_another(scene: Scene, edge: Edge) -> None:
    """Generate another text of the same length, so that time has passed for the engine."""
    request = {"model": "demo", "prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True}
    answer = await scene.client.post(f"{edge.url}/v1/generate", json=request)
    assert answer.json()["total_tokens"] == TOKENS


@pytest.mark.parametrize("transport", ["websocket", "fetch"])
async def test_a_paused_page_stops_the_generation_and_goes_on_with_the_next_token(
    scene: Scene, pausing: tuple[HeldOrigin, Edge], transport: str
) -> None:
    origin, edge = pausing
    async with visiting(scene.browser, edge.url, "try") as visit:
        page = visit.page
        await page.get_by_role("option", name="demo").wait_for(state="attached")
        await choose(page, transport)
        await page.get_by_label("Maximum tokens").fill(str(TOKENS))
        before = origin.count("stream.paused")
        origin.hold(HELD)
        await say(page, "Once upon a time")
        answer = page.get_by_role("article")
        await expect(answer).to_have_text(LONG)
        pause = await paused(page)
        shown = await answer.inner_text()
        stream = await stream_of(page)
        origin.hold(HELD_BEHIND_WINDOW)
        await origin.saw("stream.paused", before + 1)
        origin.go_on()
        await generate_another(scene, edge)
        stands = await generated(scene, edge, stream)
        assert WINDOW_FRAMES < stands < TOKENS
        await generate_another(scene, edge)
        assert await generated(scene, edge, stream) == stands
        assert await answer.inner_text() == shown
        await pause.click()
        await expect(answer).to_have_attribute("aria-busy", "false")
        whole = (await scene.client.get(f"{edge.url}/v1/generate/{stream}")).json()
        assert (whole["finish_reason"], whole["total_tokens"]) == ("length", TOKENS)
        assert (await answer.inner_text()).strip() == whole["text"].strip()
        assert visit.faults == []
