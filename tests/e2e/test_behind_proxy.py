"""An edge behind a proxy: the headers of live answers, and the real nginx and Caddy."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import curl_cffi
import httpx
import pytest
from curl_cffi import CurlHttpVersion
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tailrace.ledger.frame import SCHEMA_HASH, Heartbeat, Hello, decode, encode, split
from tailrace.up import development_certificate
from tests.e2e.processes import ROOT, Edge, Origin, free_port, running
from tests.e2e.sse import TIMEOUT

pytestmark = pytest.mark.anyio

PATIENCE_S = 45.0
"""Less than an event stream lasts: what a proxy holds back until its end comes too late."""
PROMPT = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "seed": 1}
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
CHAT = {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "stream": True}
LONG_TOKENS = 400
"""More than are generated before a first text has been seen and a cancel has come."""
SSE, FRAMES = {"Accept": "text/event-stream"}, {"Accept": "application/vnd.tailrace.frames"}
LINES = {"Accept": "application/x-ndjson"}
CHAT_ID = "a-chat-before"
TURN = {"id": "1", "role": "user", "parts": [{"type": "text", "text": "Once upon a time"}]}
LIVE_ROUTES: dict[str, tuple[str, str, dict[str, str], dict[str, Any] | None]] = {
    "events": ("POST", "/v1/generate", SSE, PROMPT),
    "frames": ("POST", "/v1/generate", FRAMES, PROMPT),
    "lines": ("POST", "/v1/generate", LINES, PROMPT),
    "lines again": ("GET", "/v1/generate/{id}", LINES, None),
    "events of two": ("POST", "/v1/generate", SSE, PROMPT | {"n": 2}),
    "events again": ("GET", "/v1/generate/{id}", SSE, None),
    "frames again": ("GET", "/v1/generate/{id}", FRAMES, None),
    "chat": ("POST", "/v1/chat/completions", {}, CHAT),
    "chat of two": ("POST", "/v1/chat/completions", {}, CHAT | {"n": 2}),
    "chat again": ("GET", "/v1/chat/completions/{id}?stream=true", {}, None),
    "completions": ("POST", "/v1/completions", {}, PROMPT | {"stream": True}),
    "response": (
        *("POST", "/v1/responses", {}),
        {"model": "demo", "input": "Once", "max_output_tokens": 8, "stream": True},
    ),
    "response again": ("GET", "/v1/responses/resp_{id}?stream=true", {}, None),
    "message": (
        *("POST", "/v1/messages", {"Anthropic-Version": "2023-06-01"}),
        {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "stream": True},
    ),
    "AI SDK": ("POST", "/api/chat", {}, {"id": "c", "model": "demo", "messages": [TURN]}),
    "AI SDK again": ("GET", f"/api/chat/{CHAT_ID}/stream", {}, None),
    "prompts": ("POST", "/v1/completions", {}, PROMPT | {"stream": True, "prompt": ["a", "b"]}),
    "stream as events": ("GET", "/v1/stream/notes?offset=-1&live=sse", {}, None),
    "stream as frames": ("GET", "/v1/stream/notes?offset=-1&live=frames", {}, None),
    "long poll": ("GET", "/v1/stream/notes?offset=-1&live=long-poll", {}, None),
    "generation as events": ("GET", "/v1/stream/{id}?offset=-1&live=sse", {}, None),
}


@dataclass
class Place:
    """An edge, its certificate and a stream, shared by the tests of all proxies."""

    edge: Edge
    certificate: Path
    stream: str
    """The id of a generation that has ended."""


@pytest.fixture(scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    files = development_certificate(folder / "certificate", datetime.now(UTC))
    origin = Origin(folder / "data")
    edge = Edge(origin, certificate=(files.certificate, files.key))
    async with running(origin, edge), httpx.AsyncClient(timeout=TIMEOUT) as client:
        made = await client.post(f"{edge.url}/v1/generate", json=PROMPT)
        asked = {"id": CHAT_ID, "model": "demo", "messages": [TURN], "max_tokens": 8}
        chat = await client.post(f"{edge.url}/api/chat", json=asked)
        assert (chat.status_code, chat.text.endswith("data: [DONE]\n\n")) == (200, True)
        closed = {"Content-Type": "text/plain", "Stream-Closed": "true"}
        put = await client.put(f"{edge.url}/v1/stream/notes", content="a", headers=closed)
        assert (made.status_code, put.status_code) == (200, 201)
        yield Place(edge, files.certificate, made.json()["id"])


@pytest.mark.parametrize("version", ["V1_1", "V2TLS", "V3ONLY"])
@pytest.mark.parametrize("route", LIVE_ROUTES)
async def test_every_live_answer_asks_proxies_to_pass_it_on_at_once(
    place: Place, route: str, version: str
) -> None:
    method, path, headers, body = LIVE_ROUTES[route]
    async with curl_cffi.AsyncSession[curl_cffi.Response]() as client:
        answer = await client.request(
            method,
            place.edge.tls_url + path.format(id=place.stream),
            headers=headers,
            json=body,
            stream=True,
            http_version=CurlHttpVersion[version],
            verify=str(place.certificate),
            timeout=60,
        )
        said = answer.headers
        await answer.aclose()
    assert answer.status_code == 200
    assert (said["x-accel-buffering"], said["incremental"]) == ("no", "?1")
    if route == "long poll":  # asked for once, under a URL of its own
        assert said["cache-control"].endswith("stale-while-revalidate=300, no-transform")
    else:
        assert said["cache-control"].removeprefix("no-cache, ") == "no-store, no-transform"


@pytest.mark.parametrize("accept", [SSE, LINES], ids=["events", "lines"])
@pytest.mark.parametrize("query", ["", "?turns=1"], ids=["tokens", "turns"])
async def test_a_followed_chat_asks_for_it_too(
    place: Place, accept: dict[str, str], query: str
) -> None:
    """It has no end, which curl would wait for."""
    url = f"{place.edge.url}/v1/chats/{CHAT_ID}{query}"
    async with (
        httpx.AsyncClient(timeout=TIMEOUT) as client,
        client.stream("GET", url, headers=accept) as answer,
    ):
        said = answer.headers
    assert answer.status_code == 200
    assert (said["x-accel-buffering"], said["incremental"]) == ("no", "?1")
    assert said["cache-control"].removeprefix("no-cache, ") == "no-store, no-transform"


async def test_what_is_not_live_says_nothing_to_proxies(place: Place) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        for path in (f"/v1/generate/{place.stream}", "/healthz", "/web/tailrace/index.js"):
            answer = await client.get(place.edge.url + path)
            assert answer.status_code == 200
            assert not {"incremental", "x-accel-buffering"} & set(answer.headers)
            assert "no-transform" not in answer.headers["cache-control"]


# ---- real proxies ----


def program(name: str) -> str:
    """Return its path; skips the test where it is not installed, but in CI."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        say = pytest.fail if os.environ.get("CI") else pytest.skip
        say(f"needs {name}: apt install {name}")
    assert found is not None
    return found


@asynccontextmanager
async def proxy(*command: str, port: int, environment: dict[str, str] | None = None) -> Any:
    """Return a proxy as a child process that listens on `port`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **(environment or {})},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert process.returncode is None, command
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        yield
    finally:
        process.terminate()
        await process.wait()


def nginx(folder: Path, block: str, port: int) -> Any:
    """Nginx with its default settings and this in `http`."""
    kept = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off;\n{kept}{block}\n}}\n"
    )
    return proxy(program("nginx"), "-c", str(file), "-p", str(folder), port=port)


def caddy(folder: Path, site: str, port: int) -> Any:
    """Caddy with its default settings and this site; it opens no port but that one."""
    options = "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
    (folder / "Caddyfile").write_text(options + site)
    command = (program("caddy"), "run", "--config", str(folder / "Caddyfile"))
    kept = {"XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    return proxy(*command, port=port, environment=kept)


def documented(language: str) -> str:
    """Return the first block of docs/proxies.md in that language."""
    text = (ROOT / "docs/proxies.md").read_text()
    return str(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0])


async def news_comes_at_once(url: str, client: httpx.AsyncClient) -> None:
    """Check that a live reader gets the stored text, then each append, in one answer."""
    text = {"Content-Type": "text/plain"}
    assert (await client.put(url, content="old", headers=text)).status_code == 201
    for live, old, new in (("sse", "data:old", "data:new"), ("frames", "old", "new")):
        async with (
            client.stream("GET", f"{url}?offset=-1&live={live}") as answer,
            asyncio.timeout(PATIENCE_S),
        ):
            assert answer.status_code == 200
            seen, pieces = "", answer.aiter_raw()
            while old not in seen:
                seen += (await anext(pieces)).decode("latin-1")
            await client.post(url, content="new", headers=text)
            while new not in seen:
                seen += (await anext(pieces)).decode("latin-1")


async def a_long_poll_is_answered_when_there_is_news(url: str, client: httpx.AsyncClient) -> None:
    text = {"Content-Type": "text/plain"}
    put = await client.put(url, content="old", headers=text)
    assert put.status_code == 201
    waits = asyncio.create_task(
        client.get(f"{url}?offset={put.headers['Stream-Next-Offset']}&live=long-poll")
    )
    await client.post(url, content="new", headers=text)
    answer = await waits
    assert (answer.status_code, answer.text) == (200, "new")


async def a_chat_is_shown_while_it_is_made(url: str, client: httpx.AsyncClient) -> None:
    """Cancel an answer once its first text has been seen, and check that it ends as cancelled.

    A proxy that holds answers back shows the text of this one when the generation has ended.
    """
    chat = {"id": url.rpartition(":")[2], "model": "demo", "messages": [TURN]}
    asked = chat | {"max_tokens": LONG_TOKENS, "ignore_eos": True}
    async with (
        client.stream("POST", f"{url}/api/chat", json=asked) as answer,
        asyncio.timeout(PATIENCE_S),
    ):
        assert answer.status_code == 200
        stream, seen, pieces = answer.headers["Tailrace-Stream"], "", answer.aiter_text()
        while "text-delta" not in seen:
            seen += await anext(pieces)
        cancelled = await client.post(f"{url}/v1/generate/{stream}/cancel")
        assert cancelled.status_code == 200
        async for piece in pieces:
            seen += piece
    assert '"type":"abort"' in seen
    again = await client.get(f"{url}/api/chat/{chat['id']}/stream")
    assert '"type":"abort"' in again.text


def websocket(url: str, **options: Any) -> connect:
    return connect(f"{url.replace('http', 'ws', 1)}/v1/ws", compression=None, proxy=None, **options)


async def a_session_is_served(socket: connect) -> None:
    async with socket as session, asyncio.timeout(PATIENCE_S):
        await session.send(encode(Hello(SCHEMA_HASH, "test")))
        heard: list[object] = []
        while not any(isinstance(frame, Heartbeat) for frame in heard):
            heard += [decode(raw)[1] for raw in split(await session.recv(decode=False))]


def default_nginx(folder: Path, port: int, edge: Edge) -> Any:
    where = f"location / {{ proxy_pass {edge.url}; }}"
    return nginx(folder, f"server {{ listen 127.0.0.1:{port}; {where} }}", port)


def default_caddy(folder: Path, port: int, edge: Edge) -> Any:
    site = f"http://127.0.0.1:{port} {{\n\treverse_proxy 127.0.0.1:{edge.port}\n}}\n"
    return caddy(folder, site, port)


@pytest.mark.parametrize(
    ("started", "is_transparent"), [(default_nginx, False), (default_caddy, True)]
)
async def test_in_their_default_settings_proxies_do_what_the_guide_says(
    place: Place, tmp_path: Path, started: Callable[[Path, int, Edge], Any], is_transparent: bool
) -> None:
    port = free_port()
    async with (
        started(tmp_path, port, place.edge),
        httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client,
    ):
        url = f"http://127.0.0.1:{port}"
        await news_comes_at_once(f"{url}/v1/stream/{started.__name__}", client)
        await a_long_poll_is_answered_when_there_is_news(
            f"{url}/v1/stream/{started.__name__}-poll", client
        )
        await a_chat_is_shown_while_it_is_made(url, client)
        page = await client.post(f"{url}/v1/generate", json=PROMPT, headers={"Origin": url})
        if is_transparent:
            assert page.status_code == 200
            await a_session_is_served(websocket(url))
        else:
            assert (page.status_code, page.json()["error"]["code"]) == (403, "foreign_origin")
            with pytest.raises(InvalidStatus) as refused:
                await a_session_is_served(websocket(url))
            assert refused.value.response.status_code == 426
        # To the edge that request comes from this machine, and for this machine.
        admin = await client.get(f"{url}/v1/admin/streams")
        assert (admin.status_code, admin.json()["error"]["code"]) == (403, "missing_right")
        assert (await client.get(f"{url}/readyz")).json() == {"ready": True, "reasons": []}
        assert (await client.get(f"{place.edge.url}/v1/admin/streams")).status_code == 200


Started = Callable[[Path, int, Edge, Path], Any]


def documented_nginx(folder: Path, port: int, edge: Edge, certificate: Path) -> Any:
    block = documented("nginx").replace("127.0.0.1:8080", f"127.0.0.1:{edge.port}")
    block = block.replace("listen 443", f"listen 127.0.0.1:{port}")
    block = re.sub(r"/etc/letsencrypt/\S*fullchain.pem", str(certificate), block)
    block = re.sub(r"/etc/letsencrypt/\S*privkey.pem", str(certificate.with_suffix(".key")), block)
    return nginx(folder, block, port)


def documented_caddy(folder: Path, port: int, edge: Edge, certificate: Path) -> Any:
    block = documented("caddyfile").replace("127.0.0.1:8080", f"127.0.0.1:{edge.port}")
    tls = f"tls {certificate} {certificate.with_suffix('.key')}"
    block = block.replace(
        "edge.example {", f"https://edge.example:{port} {{\n\tbind 127.0.0.1\n\t{tls}"
    )
    return caddy(folder, block, port)


@pytest.mark.parametrize("started", [documented_nginx, documented_caddy])
async def test_the_documented_settings_work_with_the_documented_proxy(
    place: Place, tmp_path: Path, started: Started
) -> None:
    (tmp_path / "tailrace.toml").write_text(documented("toml"))
    edge, port = (
        Edge(links=place.edge.command[place.edge.command.index("--origin") + 1]),
        free_port(),
    )
    edge.command.remove("--operator-without-key")
    edge.command += ["--config", str(tmp_path / "tailrace.toml")]
    trusted, with_http2 = (
        ssl.create_default_context(cafile=str(place.certificate)) for _ in range(2)
    )
    # The certificate is for localhost.
    trusted.check_hostname = with_http2.check_hostname = False
    name = {"Host": f"edge.example:{port}"}  # as browsers send it for a port other than 443
    sni = {"sni_hostname": "edge.example"}
    try:
        await edge.start()
        await edge.saw("origin link up")
        async with (
            started(tmp_path, port, edge, place.certificate),
            httpx.AsyncClient(
                timeout=TIMEOUT, trust_env=False, verify=trusted, headers=name
            ) as client,
        ):
            url = f"https://127.0.0.1:{port}"

            async def asked(request: httpx.Request) -> None:
                request.extensions |= sni

            client.event_hooks["request"] = [asked]
            await news_comes_at_once(f"{url}/v1/stream/{started.__name__}", client)
            own_page = {"Origin": f"https://edge.example:{port}"}
            page = await client.post(f"{url}/v1/generate", json=PROMPT, headers=own_page)
            assert (page.status_code, page.http_version) == (200, "HTTP/1.1")
            async with httpx.AsyncClient(
                timeout=TIMEOUT, trust_env=False, verify=with_http2, headers=name, http2=True
            ) as browser:
                browser.event_hooks["request"] = [asked]
                page = await browser.post(f"{url}/v1/generate", json=PROMPT, headers=own_page)
                assert (page.status_code, page.http_version) == (200, "HTTP/2")
            refused = await client.get(f"{url}/v1/admin/streams")
            assert refused.status_code == 403
            name_of_it = {"host": "127.0.0.1", "port": port, "ssl": trusted}
            await a_session_is_served(websocket(f"https://edge.example:{port}", **name_of_it))
            await a_long_poll_is_answered_when_there_is_news(
                f"{url}/v1/stream/{started.__name__}-poll", client
            )
            await a_chat_is_shown_while_it_is_made(url, client)
    finally:
        await edge.stop()
