"""Clients that read nothing: what each costs, and for how long."""

import asyncio
import resource
import socket
from pathlib import Path

import pytest

from tailrace.ledger.frame import SCHEMA_HASH, Hello, Open, Token, encode
from tests.bench.edge.readers import message
from tests.edge.scripted_origin import ScriptedOrigin
from tests.edge.server.serving import PATIENCE_S, serving

pytestmark = pytest.mark.anyio

CLIENTS = 200
MOST_KIB = 64
"""Maximum memory for one client, in KiB, with the origin's and the test's own share."""
TOKENS = [Token("w" * 100, n) for n in range(4_000)]
BODY = b'{"model": "demo", "prompt": "Once"}'
FRAMES = (
    b"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
    b"Accept: application/vnd.tailrace.frames\r\n\r\n%b" % (len(BODY), BODY)
)
SESSION = (
    b"GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
) + message(
    encode(Hello(SCHEMA_HASH, "test")) + encode(Open("demo", prompt="Once", credit=1024), 1)
)


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


@pytest.mark.parametrize("asks", [FRAMES, SESSION], ids=["http", "websocket"])
async def test_clients_that_read_nothing_cost_little_and_are_cut_off(asks: bytes) -> None:
    async with (
        ScriptedOrigin(len(TOKENS)).listening() as origin,
        serving(origin, stalled_timeout_s=1.0) as served,
    ):
        origin.frames[:-1] = TOKENS
        begun_kib = most_kib = resident_kib()
        clients = [socket.socket() for _ in range(CLIENTS)]
        try:
            for client in clients:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                client.setblocking(False)
                address = ("127.0.0.1", served.port)
                await asyncio.get_running_loop().sock_connect(client, address)
                await asyncio.get_running_loop().sock_sendall(client, asks)
            async with asyncio.timeout(PATIENCE_S):
                # No connection ends by itself: the edge cuts all of them off.
                while len(origin.sent) < CLIENTS or served.context.connections.all():
                    most_kib = max(most_kib, resident_kib())
                    await asyncio.sleep(0.05)
        finally:
            for client in clients:
                client.close()
    assert (most_kib - begun_kib) / CLIENTS < MOST_KIB
