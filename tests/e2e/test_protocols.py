"""The same stream over HTTP/1.1, HTTP/2, HTTP/3 and TLS, as real clients read it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import curl_cffi
import httpx
import pytest
from curl_cffi import CurlHttpVersion
from websockets.asyncio.client import connect

from tailrace.up import development_certificate
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import SSE, TIMEOUT, Reading, resume, start, text_of

pytestmark = pytest.mark.anyio

REQUEST: dict[str, Any] = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": 40,
    "temperature": 0.8,
    "seed": 11,
    "ignore_eos": True,
}


@dataclass
class Secured:
    """An edge with a certificate, and what a client needs to trust it."""

    edge: Edge
    certificate: Path


@pytest.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    files = development_certificate(folder / "certificate", datetime.now(UTC))
    origin = Origin(folder / "data")
    edge = Edge(origin, certificate=(files.certificate, files.key))
    async with running(origin, edge):
        yield Secured(edge, files.certificate)


@pytest.fixture
async def reference(secured: Secured, client: httpx.AsyncClient) -> Reading:
    return await start(client, secured.edge.url, REQUEST)


@pytest.mark.parametrize("http2", [False, True])
async def test_over_tls(secured: Secured, reference: Reading, http2: bool) -> None:
    context = ssl.create_default_context(cafile=str(secured.certificate))
    async with httpx.AsyncClient(verify=context, http2=http2, timeout=TIMEOUT) as client:
        cut = await start(client, secured.edge.tls_url, REQUEST, stop_after=9)
        joined = await resume(client, secured.edge.tls_url, cut)
        version = (await client.get(f"{secured.edge.tls_url}/healthz")).http_version
    assert version == ("HTTP/2" if http2 else "HTTP/1.1")
    assert (joined.text, joined.indexes) == (reference.text, reference.indexes)


async def test_no_websocket_message_is_compressed(secured: Secured) -> None:
    url = f"{secured.edge.url.replace('http', 'ws')}/v1/ws"
    async with connect(url, compression="deflate") as client:
        assert client.protocol.extensions == []


def over_http3(secured: Secured) -> dict[str, Any]:
    return {
        "http_version": CurlHttpVersion.V3ONLY,
        "verify": str(secured.certificate),
        "timeout": 60,
    }


async def test_over_http3_cut_and_resumed(secured: Secured, reference: Reading) -> None:
    url = f"{secured.edge.tls_url}/v1/generate"

    def begin() -> tuple[str, bytes]:
        """Return the first bytes of the stream, and then the connection is dropped."""
        with curl_cffi.Session() as session:
            response = session.post(
                url, json=REQUEST, headers=SSE, stream=True, **over_http3(secured)
            )
            assert response.http_version == CurlHttpVersion.V3
            assert response.status_code == 200
            held = b""
            for chunk in response.iter_content():
                held += chunk
                if b"\n\n" in held.partition(b"id: ")[2]:  # `retry:` comes before the events
                    break
            return response.headers["Tailrace-Stream"], held

    stream, held = await asyncio.to_thread(begin)
    whole_events = held[: held.rindex(b"\n\n") + 2]
    last = int(whole_events.rsplit(b"id: ", 1)[1].split(b"\n")[0])
    rest = await asyncio.to_thread(
        lambda: curl_cffi.get(
            f"{url}/{stream}",
            headers={**SSE, "Last-Event-ID": str(last)},
            **over_http3(secured),
        )
    )
    assert rest.status_code == 200
    assert text_of(whole_events + rest.content) == reference.text


async def test_http11_says_where_http3_is(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=str(secured.certificate))
    async with httpx.AsyncClient(verify=context, timeout=TIMEOUT) as client:
        answer = await client.get(f"{secured.edge.tls_url}/healthz")
    assert f'h3=":{secured.edge.tls_port}"' in answer.headers["alt-svc"]


async def test_a_response_is_the_same_events_over_every_protocol(
    secured: Secured, client: httpx.AsyncClient
) -> None:
    asked = {"model": "demo", "input": "Once upon a time", "max_output_tokens": 30, "seed": 3}
    path = "/v1/responses"
    made = await client.post(f"{secured.edge.url}{path}", json=asked)
    name = made.json()["id"]
    whole = await client.get(f"{secured.edge.url}{path}/{name}?stream=true")
    rest = f"{secured.edge.tls_url}{path}/{name}?stream=true&starting_after=5"
    events = whole.text.split("\n\n")

    context = ssl.create_default_context(cafile=str(secured.certificate))
    async with httpx.AsyncClient(verify=context, http2=True, timeout=TIMEOUT) as over_http2:
        answer = await over_http2.get(f"{secured.edge.tls_url}{path}/{name}?stream=true")
        assert (answer.http_version, answer.text) == ("HTTP/2", whole.text)
        assert (await over_http2.get(rest)).text.split("\n\n") == events[6:]
        begun = await over_http2.post(
            f"{secured.edge.tls_url}{path}", json=asked | {"stream": True}
        )
        assert text_of_response(begun.text) == text_of_response(whole.text)

    ask: Callable[..., Any] = lambda method, url, **more: curl_cffi.request(  # noqa: E731
        method, url, **more, **over_http3(secured)
    )
    replayed = await asyncio.to_thread(ask, "GET", rest.partition("&")[0])
    assert replayed.http_version == CurlHttpVersion.V3 and replayed.text == whole.text
    assert (await asyncio.to_thread(ask, "GET", rest)).text.split("\n\n") == events[6:]
    url = f"{secured.edge.tls_url}{path}"
    made_again = await asyncio.to_thread(ask, "POST", url, json=asked | {"stream": True})
    assert text_of_response(made_again.text) == text_of_response(whole.text)


async def test_a_chat_is_the_same_chunks_over_every_protocol(
    secured: Secured, client: httpx.AsyncClient
) -> None:
    said = [{"role": "user", "content": "Tell me a story about a fox."}]
    asked = {"model": "demo", "messages": said, "max_tokens": 30, "seed": 3, "stream": True}
    headers = {"Idempotency-Key": "over every protocol"}  # all of them are of one stream
    plain, path = secured.edge.url, f"{secured.edge.tls_url}/v1/chat/completions"
    whole = await client.post(f"{plain}/v1/chat/completions", json=asked, headers=headers)
    assert whole.text.endswith("data: [DONE]\n\n") and whole.text.count("data: ") > 20
    rest = f"{path}/{whole.headers['Tailrace-Stream']}?stream=true&starting_after=5"

    context = ssl.create_default_context(cafile=str(secured.certificate))
    async with httpx.AsyncClient(verify=context, http2=True, timeout=TIMEOUT) as over_http2:
        answer = await over_http2.post(path, json=asked, headers=headers)
        assert (answer.http_version, answer.text) == ("HTTP/2", whole.text)
        resumed = (await over_http2.get(rest)).text
        assert whole.text.endswith(resumed) and '"sequence_number":6}' in resumed.split("\n")[0]

    ask: Callable[..., Any] = lambda method, url, **more: curl_cffi.request(  # noqa: E731
        method, url, **more, **over_http3(secured)
    )
    again = await asyncio.to_thread(ask, "POST", path, json=asked, headers=headers)
    assert again.http_version == CurlHttpVersion.V3 and again.text == whole.text
    assert (await asyncio.to_thread(ask, "GET", rest)).text == resumed


def text_of_response(body: str) -> str:
    """Return what the deltas of its events add up to."""
    said = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    return "".join(e["delta"] for e in said if e["type"] == "response.output_text.delta")
