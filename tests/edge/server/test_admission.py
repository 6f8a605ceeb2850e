"""The access rules are applied once for a request, and before anything is kept of its body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tailrace.edge.access.bodies import BodyBudget
from tailrace.edge.access.keys import KeyRing, Limits
from tailrace.ledger.errors import Overloaded
from tailrace.ledger.telemetry.traces import Traces
from tests.edge.access.test_authenticator import KEY, api_key
from tests.edge.scripted_origin import ScriptedOrigin, until
from tests.edge.server.detached import detached
from tests.edge.server.http2_peer import Peer
from tests.edge.server.serving import Client, Served, serving

pytestmark = pytest.mark.anyio

EVENTS = "Accept: text/event-stream\r\n"
GENERATE, COMPLETIONS = "/v1/generate", "/v1/completions"
WITH_KEY = f"Authorization: Bearer {KEY}\r\n"
BODY = b'{"model": "demo", "prompt": "Once"}'
BURST = 4


def posted(path: str, body: bytes, headers: str = EVENTS + WITH_KEY) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@asynccontextmanager
async def with_keys(limits: Limits | None = None) -> AsyncIterator[Served]:
    """Yield an edge that asks for API keys, on a clock that stands still."""
    async with ScriptedOrigin(3).listening() as origin, serving(origin) as served:
        authenticator = served.context.rules.authenticator
        authenticator.ring = KeyRing([api_key()], {"acme": limits or Limits()})
        authenticator.clock = lambda: 0.0
        yield served


@pytest.mark.parametrize(
    "path", [GENERATE, COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
async def test_nothing_of_a_body_is_awaited_of_whom_no_key_speaks_for(path: str) -> None:
    body = b" " * 1000 + b'{"stream": true}'
    asked = posted(path, body, EVENTS)
    async with with_keys() as served, Client.connected(served) as client:
        await client.send(asked[:-900])
        answer = await client.answer()
        assert (answer.status, served.edge.starlette.state.bodies.used_bytes) == (401, 0)
        # The rest of the body is dropped, and the connection goes on.
        await client.send(asked[-900:] + posted(GENERATE, BODY))
        assert (await client.answer()).status == 200


async def test_the_same_over_http2() -> None:
    async with with_keys() as served, Peer.of(served) as peer:
        headers = {"accept": "text/event-stream", "content-length": "1000"}
        stream = peer.ask("POST", GENERATE, headers, ended=False)
        await peer.until(lambda: stream in peer.ended)
        assert peer.statuses[stream] == "401"


TWO_PROMPTS = {"model": "demo", "prompt": ["Once", "Twice"], "stream": True}
TWO_CHOICES = {"model": "demo", "prompt": "Once", "stream": True, "n": 2}
ONE = {"model": "demo", "prompt": "Once", "stream": True}


@pytest.mark.parametrize("asked", [TWO_PROMPTS, TWO_CHOICES, ONE], ids=["prompts", "n", "one"])
async def test_a_request_counts_once_whoever_answers_it(asked: dict[str, object]) -> None:
    body = json.dumps(asked).encode()
    async with with_keys(Limits(requests_per_s=BURST / 2)) as served:
        async with Client.connected(served) as client:
            statuses = []
            for _ in range(BURST + 1):
                await client.send(posted(COMPLETIONS, body))
                statuses.append((await client.answer()).status)
            assert statuses == [200] * BURST + [429]
        async with Peer.of(served) as peer:
            served.context.rules.authenticator.clock = lambda: 1000.0
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            for n in range(BURST + 1):
                stream = peer.ask("POST", COMPLETIONS, headers, ended=False)
                peer.h2.send_data(stream, body, end_stream=True)
                await peer.until(lambda stream=stream: stream in peer.ended)
                assert peer.statuses[stream] == ("429" if n == BURST else "200")
        await until(lambda: not served.context.rules.authenticator._under_way)


async def test_whoever_leaves_within_a_body_is_not_counted_any_more() -> None:
    async with with_keys(Limits(max_concurrent=1)) as served:
        authenticator = served.context.rules.authenticator
        for path in (GENERATE, COMPLETIONS):
            async with Client.connected(served) as client:
                await client.send(posted(path, BODY)[:-5])
                await until(lambda: bool(served.edge.starlette.state.bodies.used_bytes))
                assert authenticator._under_way["acme"] == 1
            await until(lambda: not authenticator._under_way)
            assert served.edge.starlette.state.bodies.used_bytes == 0


async def test_each_request_has_one_span_and_each_span_ends() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    begun: list[ReadableSpan] = []
    async with with_keys() as served:
        counts = served.context.counts
        assert counts is not None
        counts.traces = Traces(provider)
        begin = counts.traces._tracer.start_span

        def noted(*given: object, **named: object) -> object:
            begun.append(span := begin(*given, **named))  # type: ignore[arg-type]
            return span

        counts.traces._tracer.start_span = noted  # type: ignore[method-assign,assignment]
        async with Client.connected(served) as client:
            for asked in (TWO_PROMPTS, ONE):
                await client.send(posted(COMPLETIONS, json.dumps(asked).encode()))
                assert (await client.answer()).status == 200
        await until(lambda: len(exporter.get_finished_spans()) == len(begun))
    assert len(begun) == 2


@pytest.mark.parametrize(
    ("settings", "fast"),
    [
        (b'"n": 1', True),
        (b'"n" : 1', True),
        (b'"n":null', True),
        (b'"n":  null', True),
        (b'"n": 2', True),
        (b'"n":10', True),
        (b'"n": 16', True),
        (b'"n": "2"', False),  # refused
    ],
)
async def test_choices_take_the_fast_way_however_they_are_written(
    settings: bytes, fast: bool
) -> None:
    body = b'{"model": "demo", "prompt": "Once", "stream": true, %b}' % settings
    async with with_keys() as served:
        with detached() as sources:
            async with Client.connected(served) as client:
                await client.send(posted(COMPLETIONS, body))
                await client.answer()
    assert len(sources) == fast


# ---- the bodies of all connections together ----


def test_a_budget_of_bodies_is_kept() -> None:
    budget = BodyBudget(100)
    budget.take(60)
    with pytest.raises(Overloaded):
        budget.take(41)
    budget.take(40)
    budget.give(100)
    assert budget.used_bytes == 0


@pytest.mark.parametrize("headers", [EVENTS + WITH_KEY, WITH_KEY], ids=["a route's", "the app's"])
async def test_bodies_beyond_the_budget_are_refused_until_there_is_room(headers: str) -> None:
    body = BODY + b" " * 3000
    asked = posted(GENERATE, body, headers)
    async with with_keys() as served:
        bodies = served.edge.starlette.state.bodies
        bodies.most_bytes = 4000
        async with Client.connected(served) as first, Client.connected(served) as second:
            await first.send(asked[:-100])
            await until(lambda: bodies.used_bytes == len(body) - 100)
            await second.send(asked)
            answer = await second.answer()
            assert (answer.status, answer.error) == (503, "overloaded")
            assert 1 <= int(answer.headers["retry-after"]) <= 5
            await first.send(asked[-100:])
            assert (await first.answer()).status == 200
        await until(lambda: bodies.used_bytes == 0)


async def test_bodies_over_http2_are_in_the_budget() -> None:
    async with with_keys() as served, Peer.of(served) as peer:
        served.edge.starlette.state.bodies.most_bytes = 4000
        headers = {"accept": "text/event-stream", "authorization": f"Bearer {KEY}"}
        waiting = peer.ask("POST", GENERATE, headers, ended=False)
        peer.h2.send_data(waiting, BODY + b" " * 3000)
        await peer.until(lambda: served.edge.starlette.state.bodies.used_bytes > 3000)
        refused = peer.ask("POST", GENERATE, headers, ended=False)
        peer.h2.send_data(refused, BODY + b" " * 3000)
        await peer.until(lambda: refused in peer.ended)
        assert peer.statuses[refused] == "503"
        peer.h2.end_stream(waiting)
        await peer.until(lambda: waiting in peer.ended)
        assert peer.statuses[waiting] == "200"
        assert served.edge.starlette.state.bodies.used_bytes == 0
