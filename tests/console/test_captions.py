"""Live captions: the microphone of a real browser, a recogniser, and a network that is cut."""

from __future__ import annotations

import wave
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from playwright.async_api import Browser, expect

from tailrace.up import development_certificate
from tests.console.pages import PHONE, visiting
from tests.e2e.browser import browser
from tests.e2e.processes import Edge, Origin, running
from tests.spoken import captions, needs_espeak, say

pytestmark = [pytest.mark.anyio, needs_espeak]

SPOKEN = ("one two three", "four five six", "seven eight")
TEXT = "One two three. Four five six. Seven eight."
MICROPHONE = "--use-file-for-fake-audio-capture={}%noloop"


@dataclass
class Scene:
    """An edge, and a browser whose microphone hears SPOKEN once."""

    edge: Edge
    browser: Browser


@pytest.fixture(scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("captions")
    sound = folder / "spoken.wav"
    with wave.open(str(sound), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(b"".join(say(one, "en-us+f2") for one in SPOKEN))
    settings = folder / "tailrace.toml"
    settings.write_text(captions())
    files = development_certificate(folder / "certificate", datetime.now(UTC))
    origin = Origin(folder / "data", config=settings)
    edge = Edge(origin, certificate=(files.certificate, files.key))
    more = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    more.append(MICROPHONE.format(sound))
    async with (
        running(origin, edge),
        browser(files.certificate, edge.tls_port, more=more) as launched,
    ):
        await origin.saw("worker.ready")
        yield Scene(edge, launched)


async def test_a_microphone_is_captioned_although_the_network_is_cut(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "captions") as visit:
        page = visit.page
        await expect(page.get_by_label("Model")).to_have_value("captions")
        await page.get_by_role("button", name="Listen", exact=True).click()
        text = page.get_by_label("Text", exact=True)
        await expect(text).to_contain_text("One")
        await page.get_by_role("button", name="Cut the network").click()
        waiting = page.locator("dt", has_text="Sound waiting").locator("+ dd")
        await expect(waiting).not_to_have_text("0 B")
        await page.get_by_role("button", name="Mend the network").click()
        await expect(text).to_have_text(TEXT)
        await page.get_by_role("button", name="Stop listening").click()
        await expect(page.get_by_role("button", name="Listen", exact=True)).to_be_visible()
        await expect(text).to_have_text(TEXT)
        assert await page.locator(".waveform path").get_attribute("d")
        assert await page.get_by_role("region", name="Revisions").locator("tr").count() > 3
        assert await visit.violations() == []
        assert visit.faults == []
        await visit.photograph("spoken")


async def test_the_page_fits_a_phone(scene: Scene) -> None:
    async with visiting(scene.browser, scene.edge.tls_url, "captions", size=PHONE) as visit:
        assert await visit.violations() == []
        await visit.photograph("phone")
