"""A browser reads streams over HTTP/2 and HTTP/3, by fetch and EventSource, and over a WebSocket.

From a page of the edge's own origin, and of another one that is allowed; it aborts, goes
offline, comes back and resumes.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Page

from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Hello,
    Open,
    Sampling,
    StreamEnd,
    Token,
    decode,
    encode,
    split,
)
from tailrace.up import development_certificate
from tests.e2e.browser import PATIENCE_MS, browser
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, running
from tests.e2e.sse import TIMEOUT, start
from tests.e2e.udp_way import UdpWay

pytestmark = pytest.mark.anyio

TOKENS = 200
HELD = 200
"""Characters; that is a part of each text."""
REQUEST: dict[str, Any] = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "seed": 21,
    "ignore_eos": True,
}
FUNCTIONS = (Path(__file__).parent / "browser.js").read_text("utf-8")


@dataclass
class Scene:
    """An edge with a certificate, browsers, and a page's origin elsewhere."""

    origin: HeldOrigin
    edge: Edge
    browsers: dict[str, Browser]
    """By the protocol that each speaks to the edge."""
    elsewhere: str
    way: UdpWay
    """To the edge, which can be cut."""
    text: str
    """Whole text of the stream that REQUEST opens."""

    @asynccontextmanager
    async def page(self, url: str, protocol: str = "h3") -> AsyncIterator[Page]:
        context = await self.browsers[protocol].new_context()
        try:
            page = await context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            await page.goto(url)
            await page.add_script_tag(content=FUNCTIONS)
            yield page
        finally:
            await context.close()


@asynccontextmanager
async def some_site() -> AsyncIterator[str]:
    """Yield a site with an empty page; its origin."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n")
        writer.write(b"Connection: close\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with closing(server):
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture(scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder = tmp_path_factory.mktemp("browser")
    files = development_certificate(folder / "certificate", datetime.now(UTC))
    async with some_site() as elsewhere:
        settings = folder / "tailrace.toml"
        settings.write_text(f'[edge]\nallowed_origins = ["{elsewhere}"]\n')
        origin = HeldOrigin(folder / "data")
        edge = Edge(origin, certificate=(files.certificate, files.key), config=settings)
        async with (
            running(origin, edge),
            UdpWay.open(edge.tls_port) as way,
            browser(files.certificate, edge.tls_port, way.port) as over_quic,
            browser(files.certificate) as over_tcp,
            httpx.AsyncClient(timeout=TIMEOUT) as client,
        ):
            text = (await start(client, edge.url, REQUEST)).text
            yield Scene(origin, edge, {"h3": over_quic, "h2": over_tcp}, elsewhere, way, text)


async def protocol_of(page: Page, url: str) -> str:
    """By which it was fetched; the browser notes it a moment after the body's end."""
    found = await page.wait_for_function("url => protocolOf(url)", arg=url)
    return str(await found.json_value())


@pytest.mark.parametrize("protocol", ["h2", "h3"])
@pytest.mark.parametrize("foreign", [False, True], ids=["same origin", "allowed origin"])
async def test_a_page_streams_by_fetch_and_event_source(
    scene: Scene, protocol: str, foreign: bool
) -> None:
    url = f"{scene.edge.tls_url}/v1/generate"
    place = scene.elsewhere if foreign else f"{scene.edge.tls_url}/healthz"
    async with scene.page(place, protocol) as page:
        scene.origin.hold(HELD)
        begun = "([url, body]) => { window.generating = generate(url, body) }"
        await page.evaluate(begun, [url, REQUEST])
        await page.wait_for_function("window.pieces >= 1")
        scene.origin.go_on()
        got = await page.evaluate("window.generating")
        assert got["text"] == scene.text
        assert got["pieces"] > 1  # the answer came in pieces, as it was generated
        assert len(got["stream"]) == 32 and got["token"]
        again = await page.evaluate("url => listen(url)", f"{url}/{got['stream']}")
        assert (again["text"], again["total"]) == (scene.text, TOKENS)
        if not foreign:  # pages of other sites cannot see the protocol
            assert await protocol_of(page, url) == protocol
            assert await protocol_of(page, f"{url}/{got['stream']}") == protocol


async def test_a_page_aborts_and_resumes(scene: Scene) -> None:
    url = f"{scene.edge.tls_url}/v1/generate"
    async with scene.page(f"{scene.edge.tls_url}/healthz") as page:
        scene.origin.hold(HELD)
        begun = await page.evaluate("([url, body]) => generate(url, body, 20)", [url, REQUEST])
        scene.origin.go_on()
        assert begun["aborted"]
        resumed = await page.evaluate(
            "([url, after]) => listen(`${url}?after=${after}`)",
            [f"{url}/{begun['stream']}", begun["last"]],
        )
        assert begun["text"] + resumed["text"] == scene.text
        assert await protocol_of(page, f"{url}/{begun['stream']}") == "h3"


LONG = REQUEST | {"max_tokens": 500}


async def begin_to_listen(scene: Scene, page: Page, url: str) -> None:
    """Let the page read LONG by an EventSource, until it has some of it and the rest is held."""
    scene.origin.hold(HELD)
    begun = await page.evaluate("([url, body]) => generate(url, body, 5)", [url, LONG])
    await page.evaluate("url => { window.listening = listen(url) }", f"{url}/{begun['stream']}")
    await page.wait_for_function("window.progress >= 10")


async def check_that_all_has_come(page: Page) -> None:
    """Every event, once and in order."""
    got = await page.evaluate("window.listening")
    assert got["ids"] == list(range(len(got["ids"])))
    assert got["total"] == 500


async def test_a_page_goes_offline_and_comes_back_from_another_address(scene: Scene) -> None:
    """A telephone that leaves a house does this.

    Nothing passes for a while, then packets come from another address.
    """
    async with scene.page(f"https://localhost:{scene.way.port}/healthz") as page:
        await begin_to_listen(scene, page, f"https://localhost:{scene.way.port}/v1/generate")
        before = scene.way.lost
        await page.context.set_offline(True)
        scene.way.cut = True
        scene.origin.go_on()
        while scene.way.lost < before + 5:
            await page.wait_for_timeout(50)
        scene.way.change()
        scene.way.cut = False
        await page.context.set_offline(False)
        await check_that_all_has_come(page)


async def test_a_page_outlives_its_edge(scene: Scene) -> None:
    """The browser's EventSource reconnects by itself, with the id of the last event."""
    async with scene.page(f"{scene.edge.tls_url}/healthz") as page:
        await begin_to_listen(scene, page, f"{scene.edge.tls_url}/v1/generate")
        await scene.edge.stop()
        scene.origin.go_on()
        scene.edge.events.clear()
        await scene.edge.ready()
        await check_that_all_has_come(page)


async def test_a_websocket_of_a_page_carries_frames(scene: Scene) -> None:
    wanted = Open(
        model="demo",
        prompt="Once upon a time",
        max_tokens=TOKENS,
        ignore_eos=True,
        credit=1000,
        sampling=Sampling(temperature=0.8, seed=21),
    )
    opening = encode(Hello(SCHEMA_HASH, "browser")) + encode(wanted, 1)
    url = f"{scene.edge.tls_url.replace('https', 'wss')}/v1/ws"
    for place in (f"{scene.edge.tls_url}/healthz", scene.elsewhere):
        async with scene.page(place) as page:
            received = b""
            last: object = None
            await page.evaluate(
                "([url, first]) => connect(url, first)", [url, b64encode(opening).decode()]
            )
            texts = []
            while not isinstance(last, StreamEnd):
                received = b64decode(await page.evaluate("nextMessage()"))
                for raw in split(received):
                    last = decode(raw)[1]
                    if isinstance(last, Token):
                        texts.append(last.text)
            assert "".join(texts) == scene.text


async def test_a_page_of_another_origin_gets_nothing(scene: Scene) -> None:
    async with (
        some_site() as stranger,
        scene.page(stranger) as page,
    ):
        url = f"{scene.edge.tls_url}/v1/generate"
        got = await page.evaluate(
            "([url, body]) => generate(url, body).catch(error => error.name)", [url, REQUEST]
        )
        assert got == "TypeError"
        socket = f"{scene.edge.tls_url.replace('https', 'wss')}/v1/ws"
        assert await page.evaluate("url => connect(url, '').catch(() => 'refused')", socket) == (
            "refused"
        )
