"""Which protocol is spoken behind TLS (RFC 7301)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tailrace.edge.server.client_hello import NotWhole, offered_protocols
from tailrace.edge.server.connection import Connection
from tailrace.up import development_certificate
from tests.edge.scripted_origin import ScriptedOrigin
from tests.edge.server.serving import PATIENCE_S, serving

pytestmark = pytest.mark.anyio

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def secure(folder: Path) -> AsyncIterator[int]:
    """Yield the port of an edge that speaks TLS."""
    files = development_certificate(folder, datetime.now(UTC))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with ScriptedOrigin(3).listening() as origin, serving(origin) as served:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(served.context, context), "127.0.0.1", 0
        )
        with closing(server):
            yield server.sockets[0].getsockname()[1]


def client(*protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ((), None),
        (("http/1.1",), "http/1.1"),
        (("foo", "http/1.1"), "http/1.1"),
        (("http/1.1", "h2"), "h2"),
    ],
)
async def test_a_protocol_of_ours_is_chosen(
    tmp_path: Path, offered: tuple[str, ...], chosen: str | None
) -> None:
    async with secure(tmp_path) as port, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client(*offered))
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == chosen
        if chosen != "h2":
            writer.write(GET)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("offered", [("foo",), ("h3",), ("acme-tls/1", "http/1.0")])
async def test_a_client_that_offers_none_of_ours_is_told_so(
    tmp_path: Path, offered: tuple[str, ...]
) -> None:
    async with secure(tmp_path) as port, asyncio.timeout(PATIENCE_S):
        with pytest.raises(ssl.SSLError, match=r"(?i)no.application.protocol"):
            await asyncio.open_connection("127.0.0.1", port, ssl=client(*offered))
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client())
        writer.close()


def hello(*protocols: str) -> bytes:
    """Return the ClientHello of Python's own client."""
    dispatcher, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    shaking = client(*protocols).wrap_bio(dispatcher, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        shaking.do_handshake()
    return outgoing.read()


def test_a_hello_is_read_whole_or_not_at_all() -> None:
    sent = hello("h3", "x")
    assert offered_protocols(sent) == [b"h3", b"x"]
    assert offered_protocols(hello()) is None
    for cut in range(len(sent)):
        with pytest.raises(NotWhole):
            offered_protocols(sent[:cut])


def test_a_hello_in_two_records_is_put_together() -> None:
    sent = hello("h3")
    kind, body = sent[:3], sent[5:]
    parts = [body[:100], body[100:]]
    records = b"".join(kind + len(part).to_bytes(2, "big") + part for part in parts)
    assert offered_protocols(records) == [b"h3"]


def test_what_is_no_hello_is_left_to_openssl() -> None:
    sent = hello("h3")
    assert offered_protocols(b"GET / HTTP/1.1\r\n") is None
    for at in range(5, len(sent)):
        damaged = bytearray(sent)
        damaged[at] ^= 0xFF
        try:
            offered_protocols(bytes(damaged))
        except NotWhole:
            assert at in (6, 7, 8)  # in the bytes of its length
