"""An edge's metrics, as a scraper sees them."""

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace.edge.flush import READS_PER_SAMPLE
from tailrace.edge.telemetry.metrics import EdgeMetrics
from tailrace.ledger.errors import Overloaded
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.frame import SCHEMA_HASH, Hello, Open, Token, encode
from tests.bench.edge.readers import message
from tests.edge.scripted_origin import STREAM, ScriptedOrigin, until
from tests.edge.server.serving import PATIENCE_S, Client, Served, serving

pytestmark = pytest.mark.anyio

WORDS = 5
BODY = {"model": "demo", "prompt": "Once"}
SSE = {"Accept": "text/event-stream"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
READ = "/v1/generate/{id}"


@pytest.fixture
async def origin() -> AsyncIterator[ScriptedOrigin]:
    async with ScriptedOrigin(WORDS).listening() as origin:
        yield origin


@pytest.fixture
async def served(origin: ScriptedOrigin) -> AsyncIterator[Served]:
    async with serving(origin) as served:
        yield served


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{served.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as client:
        yield client


def value(served: Served, name: str, **labels: str) -> float | None:
    state = served.context.application.app._app.state  # type: ignore[attr-defined]
    metrics: EdgeMetrics = state.metrics
    return metrics.registry.get_sample_value(f"tailrace_edge_{name}", labels)


def asked(route: str, method: str, status: int) -> dict[str, str]:
    return {"route": route, "method": method, "status": str(status), "protocol": "h1"}


async def test_requests_are_counted_by_route_and_status_whoever_answers_them(
    served: Served, client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    await client.post("/v1/generate", json=BODY, headers=SSE)  # past the application
    await client.post("/v1/generate", json=BODY)  # a document: the application's
    await client.get(f"/v1/generate/{STREAM.hex()}?after=1", headers=SSE)
    await client.get("/nothing/here")
    origin.refusal = Overloaded("no room")
    await client.post("/v1/generate", json=BODY, headers=SSE)
    await client.post("/v1/generate", json=BODY)
    assert value(served, "requests_total", **asked("/v1/generate", "POST", 200)) == 2
    assert value(served, "requests_total", **asked("/v1/generate", "POST", 503)) == 2
    assert value(served, "requests_total", **asked(READ, "GET", 200)) == 1
    assert value(served, "requests_total", **asked("other", "GET", 404)) == 1
    assert value(served, "errors_total", code="overloaded") == 2
    assert value(served, "errors_total", code="not_found") == 1
    assert value(served, "request_seconds_count", route="/v1/generate") == 4
    assert value(served, "time_to_first_byte_seconds_count", route=READ) == 1
    assert value(served, "stream_requests_total", kind="open") == 4
    assert value(served, "resumes_total", by="client") == 1


async def test_frames_are_counted_and_timed_from_the_link_to_the_socket(
    served: Served, client: httpx.AsyncClient
) -> None:
    await client.post("/v1/generate", json=BODY, headers=SSE)
    await client.get(f"/v1/generate/{STREAM.hex()}?after=1", headers=SSE)
    link = served.context.link.address
    assert value(served, "frames_total", origin=link) == (WORDS + 1) + (WORDS - 1)
    # The stream had ended: all that the second reader was sent lay behind the tip.
    assert value(served, "replayed_frames_total", origin=link) == 2 * WORDS
    for _ in range(READS_PER_SAMPLE):  # by now a second one is
        await client.post("/v1/generate", json=BODY, headers=SSE)
    reads = value(served, "relay_seconds_count")
    total_s = value(served, "relay_seconds_sum")
    assert reads is not None and reads >= 2
    assert total_s is not None and 0 < total_s < PATIENCE_S


async def test_open_streams_are_shown_by_state_and_protocol(
    served: Served, origin: ScriptedOrigin
) -> None:
    origin.frames[:-1] = [Token("w" * 100, n) for n in range(4_000)]
    origin.released = 4_000
    session = (
        b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ) + message(
        encode(Hello(SCHEMA_HASH, "test")) + encode(Open("demo", prompt="Once", credit=1), 1)
    )
    events = (
        f"GET /v1/generate/{STREAM.hex()} HTTP/1.1\r\nHost: localhost\r\n"
        "Accept: text/event-stream\r\n\r\n"
    )
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stalled, ("127.0.0.1", served.port))
        await loop.sock_sendall(stalled, events.encode())
        async with Client.connected(served) as client, asyncio.timeout(PATIENCE_S):
            await client.send(session)
            await until(lambda: value(served, "streams", protocol="ws", state="streaming") == 1)
            await until(lambda: value(served, "streams", protocol="h1", state="stalled") == 1)
            assert value(served, "stalls_total", protocol="h1") == 1
            assert value(served, "connections") == 2
            origin.stop()
            await until(lambda: value(served, "streams", protocol="ws", state="waiting") == 1)
            link = served.context.link.address
            assert value(served, "origin_up", origin=link) == 0
            assert value(served, "origin_losses_total", origin=link) == 1
        await until(lambda: value(served, "streams", protocol="ws", state="waiting") == 0)
    assert value(served, "requests_total", **asked("/v1/ws", "GET", 101) | {"protocol": "ws"}) == 1


async def test_a_stream_that_is_asked_for_again_is_a_resume_of_the_edge() -> None:
    origin = ScriptedOrigin(WORDS)
    origin.released = 2
    async with origin.listening(), serving(origin) as served:
        origins = served.context.link.origins
        origins[0]._backoff = Backoff(0, 0)
        url = f"http://127.0.0.1:{served.port}/v1/generate"
        async with (
            httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
            client.stream("POST", url, json=BODY, headers=SSE) as answer,
            asyncio.timeout(PATIENCE_S),
        ):
            lines = answer.aiter_lines()
            while "id: 1" not in await anext(lines):
                pass
            origin.released = WORDS + 1
            origin.drop_links()
            while "event: end" not in await anext(lines):
                pass
        assert value(served, "resumes_total", by="edge") == 1
        assert value(served, "frames_total", origin=served.context.link.address) == WORDS + 1


async def test_metrics_are_read_by_get_and_head_in_both_formats(
    served: Served, client: httpx.AsyncClient
) -> None:
    traced = SSE | {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    await client.post("/v1/generate", json=BODY, headers=traced)
    plain = await client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(plain.text)}
    assert {"tailrace_edge_requests", "tailrace_edge_streams"} <= names
    assert TRACE not in plain.text
    head = await client.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    modern = await client.get("/metrics", headers={"Accept": OPENMETRICS})
    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    assert f'# {{trace_id="{TRACE}"}}' in modern.text and modern.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({"trusted_proxies": ("127.0.0.1",)}, {}),
        ({}, {"X-Forwarded-For": "203.0.113.5"}),
        ({"processes": 2}, {}),
    ],
    ids=["a proxy", "a proxy that is not named", "several processes"],
)
async def test_where_others_may_ask_or_one_process_is_not_all_no_metrics_are_shown(
    origin: ScriptedOrigin, settings: dict[str, object], headers: dict[str, str]
) -> None:
    async with (
        serving(origin, **settings) as served,
        httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
    ):
        answer = await client.get(f"http://127.0.0.1:{served.port}/metrics", headers=headers)
    assert answer.status_code == 404
    assert "edge.metrics" in answer.json()["error"]["hint"]


async def test_each_answer_has_the_request_id_that_was_given_or_one_of_its_own(
    client: httpx.AsyncClient,
) -> None:
    for path in ("/healthz", f"/v1/generate/{STREAM.hex()}", "/nothing"):
        given = await client.get(path, headers=SSE | {"X-Request-Id": "mine-7"})
        assert given.headers["x-request-id"] == "mine-7"
        made = await client.get(path, headers=SSE | {"X-Request-Id": "not one"})
        assert len(made.headers["x-request-id"]) == 32
