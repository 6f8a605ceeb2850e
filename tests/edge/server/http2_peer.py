"""A client of HTTP/2 that a test leads step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)

from tests.edge.server.serving import PATIENCE_S


class HasPort(Protocol):
    """A server with a TCP port."""

    @property
    def port(self) -> int: ...


class Peer:
    """A connection on which a test does what no good client does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        config = H2Configuration(client_side=True, header_encoding="latin-1")
        self.h2 = H2Connection(config)
        self.h2.initiate_connection()
        self.bodies: dict[int, bytearray] = {}
        self.statuses: dict[int, str] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.goaway: ConnectionTerminated | None = None
        self.closed = False

    @classmethod
    @asynccontextmanager
    async def of(cls, served: HasPort) -> AsyncIterator[Self]:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, *, ended: bool = True
    ) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        fields = [
            (":method", method),
            (":scheme", "http"),
            (":authority", "localhost"),
            (":path", path),
            *((name.lower(), value) for name, value in (headers or {}).items()),
        ]
        self.h2.send_headers(stream_id, fields, end_stream=ended)
        return stream_id

    async def until(self, done: Any, *, acknowledge: bool = True) -> None:
        """Send what waits, and read until `done`, or until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            while not done() and not self.closed:
                self.writer.write(self.h2.data_to_send())
                if not (data := await self.reader.read(65_536)):
                    self.closed = True
                    return
                for event in self.h2.receive_data(data):
                    self._note(event, acknowledge)
        self.writer.write(self.h2.data_to_send())

    def _note(self, event: Event, acknowledge: bool) -> None:
        if isinstance(event, ResponseReceived):
            fields = {str(name): str(value) for name, value in event.headers or ()}
            self.statuses[event.stream_id] = fields[":status"]
        elif isinstance(event, DataReceived):
            assert event.stream_id is not None
            self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data or b"")
            if acknowledge:
                size = event.flow_controlled_length or 0
                self.h2.acknowledge_received_data(size, event.stream_id)
        elif isinstance(event, StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, StreamReset):
            self.resets[event.stream_id] = int(event.error_code or 0)
        elif isinstance(event, ConnectionTerminated):
            self.goaway = event
