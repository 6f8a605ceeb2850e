"""An edge that is killed and started again, and a client that was connected to it by HTTP/3."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3_ALPN
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.logger import QuicLogger

from tailrace.up import development_certificate
from tests.e2e.test_stream_calls import streams_only
from tests.edge.quic.test_stateless_reset import tokens_of

pytestmark = pytest.mark.anyio

PATIENCE_S = 30.0
"""Half of what a client waits by itself until it gives a silent connection up."""


class Watching(QuicConnectionProtocol):
    """A client that knows a stateless reset when it sees one, which aioquic's does not."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tokens: set[bytes] = set()
        self.was_reset = asyncio.Event()

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        if isinstance(data, bytes) and data[-16:] in self.tokens:
            self.was_reset.set()
        else:
            super().datagram_received(data, addr)


def close_unread(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close a stream of the server's: from Python 3.12 on a writer that is left open warns."""
    writer.close()


async def test_a_client_learns_at_once_that_its_connection_is_gone(tmp_path: Path) -> None:
    files = development_certificate(tmp_path / "certificate", datetime.now(UTC))
    log = QuicLogger()
    trusted = QuicConfiguration(
        is_client=True, alpn_protocols=H3_ALPN, server_name="localhost", quic_logger=log
    )
    trusted.load_verify_locations(str(files.certificate))
    trusted.verify_mode = ssl.CERT_REQUIRED
    pair = (files.certificate, files.key)
    async with streams_only(tmp_path / "data", certificate=pair) as (_, [edge]):
        where = ("127.0.0.1", edge.tls_port)
        async with connect(
            *where, configuration=trusted, create_protocol=Watching, stream_handler=close_unread
        ) as client:
            assert isinstance(client, Watching)
            await client.ping()
            client.tokens = set(tokens_of(log).values())
            assert len(client.tokens) == 8
            await edge.kill()
            edge.events.clear()
            await edge.ready()
            ping = asyncio.ensure_future(client.ping())  # sent again until it is answered
            async with asyncio.timeout(PATIENCE_S):
                await client.was_reset.wait()
        [broken] = await asyncio.gather(ping, return_exceptions=True)
        assert isinstance(broken, ConnectionError)
