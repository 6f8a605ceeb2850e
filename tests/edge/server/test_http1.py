"""HTTP/1.1 on connections of ours: limits, deadlines, and whose each byte is."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tailrace.edge.server.connection import Connection
from tailrace.edge.server.http1 import MAX_EMPTY_LINES
from tailrace.ledger.frame import FRAMES_TYPE
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.detached import detached
from tests.edge.server.serving import Answer, Client, Served, serving

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
        [connection] = served.context.connections.all()
        recorded = Recorded(cast(Connection, connection)._transport)
        cast(Connection, connection)._transport = cast(asyncio.Transport, recorded)
        await client.send(head + b"Accept: text/event-stream\r\n\r\n" + body)
        answer = await client.answer("POST")
        assert answer.body.count(b"data: ") == 4
        first, last = recorded.written[0], recorded.written[-1]
        assert first.startswith(b"HTTP/1.1 200") and b"retry: " in first
        assert b"event: end" in last and last.endswith(b"\r\n0\r\n\r\n")


FOREIGN = b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nOrigin: http://elsewhere.example\r\n"


async def test_the_rest_of_a_short_body_is_skipped_behind_an_early_answer(served: Served) -> None:
    async with Client.connected(served) as client:
        await client.send(FOREIGN + b"Content-Length: 4\r\n\r\n")
        answer = await client.answer()
        assert answer.error == "foreign_origin"
        assert "connection" not in answer.headers
        await client.send(b"body" + GET)
        assert (await client.answer()).body == b'{"ok":true}'


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 99999999",
        b"Transfer-Encoding: chunked",
        b"Content-Length: 4\r\nExpect: 100-continue",  # the client may never send it
    ],
)
async def test_an_answer_before_the_end_of_a_body_that_is_not_skipped_is_the_last(
    served: Served, framing: bytes
) -> None:
    asked = FOREIGN + framing + b"\r\n\r\n"
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


async def test_a_body_that_does_not_come_is_refused_in_the_shape_of_the_api(
    hurried: Served,
) -> None:
    async def refused(path: str, accept: str = "*/*") -> Answer:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n"
        async with Client.connected(hurried) as client:
            await client.send(f"{head}X-Request-Id: mine-7\r\nContent-Length: 9\r\n\r\n".encode())
            return await client.answer("POST")

    chat, page, message, frames = await asyncio.gather(
        refused("/v1/chat/completions"),
        refused("/api/chat"),
        refused("/v1/messages"),
        refused("/v1/chat/completions", FRAMES_TYPE),
    )
    assert {each.status for each in (chat, page, message, frames)} == {408}
    assert json.loads(chat.body)["error"].keys() == {"message", "type", "param", "code"}
    assert chat.headers["x-should-retry"] == "true"
    assert page.headers["content-type"].startswith("text/plain")
    assert page.body == b"the request's body took too long"
    assert json.loads(message.body)["type"] == "error"
    assert json.loads(message.body)["request_id"] == "mine-7" == message.headers["request-id"]
    assert json.loads(frames.body)["error"]["retryable"] is True


async def test_200_connections_that_dawdle_are_gone_after_their_time(hurried: Served) -> None:
    async def dawdle(sent: bytes) -> bytes:
        async with Client.connected(hurried) as client:
            await client.send(sent)
            return await client.rest()

    said = await asyncio.gather(*(dawdle(GET[: n % 2 * 9]) for n in range(200)))
    # A client that has sent no byte gets no answer.
    assert all(word == b"" for word in said[::2])
    assert all(word.startswith(b"HTTP/1.1 408") for word in said[1::2])
    await hurried.context.connections.none.wait()


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
    await served.context.connections.none.wait()


async def test_connections_over_the_limit_are_told_so_and_closed() -> None:
    async with (
        ScriptedOrigin(3).listening() as origin,
        serving(origin, max_connections=2) as served,
    ):
        async with Client.connected(served) as one, Client.connected(served) as two:
            for client in (one, two):
                await client.send(GET)
                await client.answer()
            async with Client.connected(served) as third:
                answer = await third.answer()
                assert (answer.status, answer.error) == (503, "overloaded")
                assert int(answer.headers["retry-after"]) >= 1
                assert await third.rest() == b""
        await served.context.connections.none.wait()
        async with Client.connected(served) as again:
            await again.send(GET)
            assert (await again.answer()).status == 200


async def test_a_refusal_has_no_id_of_the_request_behind_it(served: Served) -> None:
    folded = b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\r\n c\r\n\r\n"
    behind = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: of-another\r\n\r\n"
    async with Client.connected(served) as client:
        await client.send(folded + behind)
        answer = await client.answer()
        assert answer.status == 400
        assert answer.headers["x-request-id"] != "of-another"


@pytest.mark.parametrize("version", ["0.9", "1.2", "1.9", "2.0", "3.0"])
async def test_other_versions_of_http_are_not_served(served: Served, version: str) -> None:
    async with Client.connected(served) as client:
        await client.send(f"GET /healthz HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
        answer = await client.answer()
        assert (answer.status, answer.error) == (505, "http_error")
        assert await client.rest() == b""


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/healthz", "localhost", 200),
        ("HTTP://localhost:80/healthz?a=b", "localhost", 200),
        ("https://localhost/healthz", "elsewhere.example", 200),  # the target's host counts
        ("http://localhost", "localhost", 200),
        ("http://elsewhere.example/healthz", "localhost", 421),
        ("http://user@localhost/healthz", "localhost", 404),
        ("ftp://localhost/healthz", "localhost", 404),
    ],
)
async def test_an_absolute_target_is_taken_as_the_path_of_its_host(
    served: Served, target: str, host: str, status: int
) -> None:
    async with Client.connected(served) as client:
        for _ in range(2):
            await client.send(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert (await client.answer()).status == status


async def test_an_absolute_target_takes_the_fast_way_too(served: Served) -> None:
    head = f"GET http://localhost/v1/generate/{STREAM.hex()} HTTP/1.1\r\nHost: localhost\r\n"
    async with Client.connected(served) as client:
        await client.send(head.encode() + b"Accept: text/event-stream\r\n\r\n")
        assert (await client.answer()).body.count(b"data: ") == 4


CHUNKED = b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"2;a=\rb\r\n{}\r\n0\r\n\r\n",
        b"2 \r\n{}\r\n0\r\n\r\n",
        b"2\n{}\r\n0\r\n\r\n",
        b"2\r\n{}\n0\r\n\r\n",
        b"00000000000000002\r\n{}\r\n0\r\n\r\n",
        b"+2\r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}}0\r\n\r\n",
        b"2\r\n{}\r\n0\r\na: b\n\r\n",
        b"\r\n",
    ],
)
async def test_chunks_that_another_server_may_read_otherwise_are_refused(
    served: Served, body: bytes
) -> None:
    async with Client.connected(served) as client:
        await client.send(CHUNKED + body)
        answer = await client.answer()
        assert (answer.status, answer.error) == (400, "bad_request")
        assert await client.rest() == b""


async def test_what_is_behind_chunks_is_the_next_request(served: Served) -> None:
    body = b'B;a="b"\r\n{"prompt": \r\n4;c=d\r\n"x"}\r\n000\r\na: b\r\n\r\n'
    async with Client.connected(served) as client:
        sent = CHUNKED + body + GET
        for at in range(0, len(sent), 7):
            await client.send(sent[at : at + 7])
        assert (await client.answer()).error == "invalid_request"
        assert (await client.answer()).body == b'{"ok":true}'
        await client.send(sent)
        assert (await client.answer()).error == "invalid_request"
        assert (await client.answer()).body == b'{"ok":true}'


@pytest.mark.parametrize("sent", [GET.replace(b"\r\n", b"\n"), GET.replace(b"\r\nH", b"\nH")])
async def test_a_line_ends_with_cr_and_lf(served: Served, sent: bytes) -> None:
    async with Client.connected(served) as client:
        await client.send(sent)
        assert (await client.answer()).error == "bad_request"


async def test_empty_lines_do_not_keep_a_connection(hurried: Served) -> None:
    async with Client.connected(hurried) as client:
        await client.send(b"\r\n" * MAX_EMPTY_LINES + GET)
        assert (await client.answer()).status == 200
        await client.send(b"\r\n" * (MAX_EMPTY_LINES + 1))
        assert (await client.answer()).error == "bad_request"
    # One now and then, each before the time of a head is over: that time begins with the first.
    async with Client.connected(hurried) as client:

        async def trickle() -> None:
            for _ in range(MAX_EMPTY_LINES):
                await client.send(b"\r\n")
                await asyncio.sleep(1.0)

        trickling = asyncio.create_task(trickle())
        began = asyncio.get_running_loop().time()
        assert await client.rest() == b""
        assert asyncio.get_running_loop().time() - began < MAX_EMPTY_LINES
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


@pytest.mark.parametrize("view", ["text/event-stream", "application/vnd.tailrace.frames"])
async def test_http_1_0_takes_the_fast_way_and_ends_with_its_connection(
    served: Served, view: str
) -> None:
    body = b'{"model": "demo", "prompt": "Once"}'
    fields = f"Accept: {view}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    said = []
    for line in (b"POST /v1/generate HTTP/1.0\r\n", b"POST /v1/generate HTTP/1.1\r\nHost: a\r\n"):
        with detached() as sources:
            async with Client.connected(served) as client:
                await client.send(line.replace(b"Host: a", b"Host: localhost") + fields)
                answer = await client.answer("POST")
        assert answer.ended and len(sources) == 1
        said.append(answer)
    old, new = said
    assert old.body.count(b"w") == new.body.count(b"w") > 0
    assert old.headers["connection"] == "close"
    assert "transfer-encoding" not in old.headers
