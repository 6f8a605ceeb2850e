"""HTTP/1.1 on connections of ours: limits, deadlines, and whose each byte is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

import pytest

from edge.server.connection import Connection
from tests.edge.scripted_origin import ScriptedOrigin
from tests.edge.server.serving import Client, Served, serving

pytestmark = pytest.mark.anyio

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
NOTHING = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Served]:
    async with ScriptedOrigin(3).listening() as origin, serving(origin) as served:
        yield served


@pytest.fixture(scope="module")
async def hurried() -> AsyncIterator[Served]:
    """With deadlines that a busy machine keeps, and a test can wait for."""
    async with (
        ScriptedOrigin(3).listening() as origin,
        serving(origin, header_timeout_s=4.0, body_timeout_s=4.0) as served,
    ):
        yield served


async def test_a_connection_is_used_again_by_requests_sent_together_and_apart(
    served: Served,
) -> None:
    chunked = b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    posted = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody"
    async with Client.connected(served) as client:
        await client.send(GET + b"\r\n" + posted + NOTHING + GET)
        assert [(await client.answer()).status for _ in range(4)] == [200, 404, 404, 200]
        await client.send(GET)
        assert (await client.answer()).body == b'{"ok":true}'
        await client.send(chunked)
        await client.send(b"2\r\n{}\r\n0\r\n\r\n")
        assert (await client.answer()).error == "invalid_request"
        await client.send(GET)
        assert (await client.answer()).status == 200


class Recorded:
    """A transport, and what it has been given to send."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_what_a_turn_has_for_a_connection_is_sent_in_one_piece(served: Served) -> None:
    body = b'{"model": "demo", "prompt": "Once"}'
    head = b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(body)
    async with Client.connected(served) as client:
        await client.send(GET)
        await client.answer()
        [connection] = served.shared.connections.all()
        recorded = Recorded(cast(Connection, connection)._transport)
        cast(Connection, connection)._transport = cast(asyncio.Transport, recorded)
        await client.send(head + b"Accept: text/event-stream\r\n\r\n" + body)
        answer = await client.answer("POST")
        assert answer.body.count(b"data: ") == 4
        first, last = recorded.written[0], recorded.written[-1]
        assert first.startswith(b"HTTP/1.1 200") and b"retry: 500" in first
        assert b"event: end" in last and last.endswith(b"\r\n0\r\n\r\n")


async def test_an_answer_before_the_whole_body_says_that_it_is_the_last(served: Served) -> None:
    asked = (
        b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nOrigin: http://elsewhere.example\r\n"
        b"Content-Length: 4\r\n\r\n"
    )
    async with Client.connected(served) as client:
        await client.send(asked)
        answer = await client.answer()
        assert answer.error == "foreign_origin"
        assert answer.headers["connection"] == "close"
        await client.send(b"body")  # which is taken, and is no reset
        assert await client.rest() == b""


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00", 400, "bad_request"),
        (b"GET /healthz\r\n\r\n", 400, "bad_request"),
        (b"GET /healthz HTTP/1.1\r\nHost : localhost\r\n\r\n", 400, "bad_request"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n", 400, "bad_request"),
        (
            b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
            b"Content-Length: 2\r\n\r\n",
            400,
            "bad_request",
        ),
        (
            b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            400,
            "bad_request",
        ),
        (
            b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: br\r\n\r\n",
            501,
            "http_error",
        ),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 100, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 20_000, 431, "headers_too_large"),
    ],
)
async def test_what_is_no_request_is_refused_in_the_one_shape_of_errors(
    served: Served, sent: bytes, status: int, code: str
) -> None:
    async with Client.connected(served) as client:
        await client.send(sent + b"\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.error) == (status, code)
        assert answer.headers["connection"] == "close"
        assert len(answer.headers["x-request-id"]) == 32
        assert await client.rest() == b""


@pytest.mark.parametrize(
    ("line", "rest", "status"),
    [
        (b"GET / HTTP/1.1", b" folded: line\r\n\r\n", 400),
        (b"GET / HTTP/1.1", b"A: b\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1", b"A: " + b"b" * 20_000, 431),
        (b"GET / HTTP/1.1", b"A: b\r\n", 408),
        (b"POST /v1/stream/a HTTP/1.1", b"Content-Length: 9\r\n\r\nbody", 408),
        (b"POST /v1/generate HTTP/1.1", b"Content-Length: 9\r\n\r\nbody", 408),
        (b"POST /v1/generate HTTP/1.1", b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
async def test_a_refusal_has_the_id_that_the_request_came_with(
    hurried: Served, line: bytes, rest: bytes, status: int
) -> None:
    async with Client.connected(hurried) as client:
        await client.send(line + b"\r\nHost: localhost\r\nx-Request-ID: mine-7\r\n" + rest)
        answer = await client.answer()
        assert (answer.status, answer.headers["x-request-id"]) == (status, "mine-7")


@pytest.mark.parametrize(
    "sent",
    [
        GET[:20],
        b"POST /v1/stream/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nbody",
        b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n",
        b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
        b"Content-Length: 9\r\n\r\nbody",
    ],
)
async def test_a_request_that_does_not_come_is_answered_408(hurried: Served, sent: bytes) -> None:
    async with Client.connected(hurried) as client:
        await client.send(sent)
        answer = await client.answer()
        assert (answer.status, answer.error) == (408, "request_timeout")
        assert await client.rest() == b""


async def test_200_connections_that_dawdle_are_gone_after_their_time(hurried: Served) -> None:
    async def dawdle(sent: bytes) -> bytes:
        async with Client.connected(hurried) as client:
            await client.send(sent)
            return await client.rest()

    said = await asyncio.gather(*(dawdle(GET[: n % 2 * 9]) for n in range(200)))
    # Who has not begun gets no answer to what was not asked.
    assert all(word == b"" for word in said[::2])
    assert all(word.startswith(b"HTTP/1.1 408") for word in said[1::2])
    await hurried.shared.connections.none.wait()


async def test_there_is_no_way_from_http1_to_http2(served: Served) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    async with Client.connected(served) as client:
        await client.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")
        assert (await client.answer()).status == 200


async def test_a_client_that_leaves_in_the_middle_costs_nothing(served: Served) -> None:
    async with Client.connected(served) as client:
        await client.send(
            b"POST /v1/stream/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nbody"
        )
    await served.shared.connections.none.wait()


async def test_connections_over_the_limit_are_closed_at_once() -> None:
    async with (
        ScriptedOrigin(3).listening() as origin,
        serving(origin, max_connections=2) as served,
    ):
        async with Client.connected(served) as one, Client.connected(served) as two:
            for client in (one, two):
                await client.send(GET)
                await client.answer()
            async with Client.connected(served) as third:
                with suppress(ConnectionResetError):
                    assert await third.rest() == b""
        await served.shared.connections.none.wait()
        async with Client.connected(served) as again:
            await again.send(GET)
            assert (await again.answer()).status == 200
