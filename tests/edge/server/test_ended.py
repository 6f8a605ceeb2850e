"""A connection that has ended leaves nothing that a collection of garbage would have to find."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tailrace.edge.server.asgi import AsgiRequest
from tailrace.edge.server.connection import Connection
from tailrace.edge.server.deadlines import Deadline
from tailrace.edge.server.http1 import Http1
from tailrace.edge.server.http2 import Http2
from tailrace.edge.server.stream_reader import StreamReader
from tailrace.edge.server.websocket import WebSocket
from tailrace.ledger.frame import SCHEMA_HASH, Hello, Open, encode
from tests.bench.edge.readers import message
from tests.edge.scripted_origin import ScriptedOrigin, until
from tests.edge.server.serving import PATIENCE_S, serving

pytestmark = pytest.mark.anyio

OURS = {Connection, Deadline, Http1, Http2, AsgiRequest, StreamReader, WebSocket}
BODY = b'{"model": "demo", "prompt": "Once"}'
POST = b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % len(BODY)
SESSION = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
) + message(encode(Hello(SCHEMA_HASH, "test")) + encode(Open("demo", prompt="Once"), 1))


def ours() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in OURS]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(POST + b"Accept: text/event-stream\r\n\r\n" + BODY, id="a stream"),
        pytest.param(POST + b"\r\n" + BODY, id="a document"),
        pytest.param(b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", id="a refusal"),
        pytest.param(SESSION, id="a session"),
        pytest.param(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", id="HTTP/2"
        ),
    ],
)
async def test_a_connection_that_has_ended_is_no_garbage(asked: bytes) -> None:
    async with ScriptedOrigin(3).listening() as origin, serving(origin) as served:
        gc.collect()
        gc.disable()
        try:
            before = len(ours())
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(asked)
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.read(65_536)
            assert len(ours()) > before
            writer.close()
            async with asyncio.timeout(PATIENCE_S):
                await served.context.connections.none.wait()
                await until(lambda: len(ours()) <= before)
        finally:
            gc.enable()
