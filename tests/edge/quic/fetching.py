"""A client over real sockets that asks for one thing after another."""

from __future__ import annotations

import asyncio

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived
from aioquic.quic.events import QuicEvent

from tests.edge.quic.net import head


class Fetching(QuicConnectionProtocol):
    """A client; `body` is what came of its requests, `ended` when the last has."""

    def begin(self) -> None:
        self.http3 = H3Connection(self._quic)
        self.body = b""
        self.came = asyncio.Event()

    def quic_event_received(self, event: QuicEvent) -> None:
        if not hasattr(self, "http3"):
            self.begin()
        for each in self.http3.handle_event(event):
            if isinstance(each, DataReceived):
                self.body += each.data
                self.came.set()

    async def get(self, path: bytes) -> bytes:
        """Return the first of the body that comes."""
        if not hasattr(self, "http3"):
            self.begin()
        self.came.clear()
        stream = self._quic.get_next_available_stream_id()
        self.http3.send_headers(stream, head(path), end_stream=True)
        self.transmit()
        async with asyncio.timeout(60):
            await self.came.wait()
        return self.body
