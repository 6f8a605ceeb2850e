"""An edge's server over real loopback sockets, and a client that sends bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self

import h11

from tailrace.edge.assembly import Edge, assemble
from tailrace.edge.config import EdgeConfig
from tailrace.edge.server.context import TcpContext
from tailrace.edge.server.listen import Sockets, listening
from tests.edge.scripted_origin import ScriptedOrigin, is_up

PATIENCE_S = 60.0


class Served(NamedTuple):
    """A running edge, with its ports."""

    port: int
    context: TcpContext
    edge: Edge
    quic_port: int = 0


@asynccontextmanager
async def serving(origin: ScriptedOrigin, **settings: Any) -> AsyncIterator[Served]:
    """Yield the server of one edge, with a link to `origin` that is up."""
    origins = (f"127.0.0.1:{origin.port}",)
    config = EdgeConfig(http=("127.0.0.1:0",), origin=origins, **settings)
    sockets = Sockets.bound(config)
    edge = assemble(config, 65_536)
    context, app = edge.tcp_context(), edge.starlette
    port = sockets.plain[0].getsockname()[1]
    async with app.router.lifespan_context(app), listening(sockets, context, lambda: None):
        await is_up(edge.link)
        quic_port = sockets.quic[0].getsockname()[1] if sockets.quic else 0
        yield Served(port, context, edge, quic_port)
        for connection in context.connections.all():
            connection.abort()
        await context.connections.none.wait()


class Answer(NamedTuple):
    """A response, whole; `ended` is False where its body was broken off."""

    status: int
    headers: dict[str, str]
    body: bytes
    ended: bool = True

    @property
    def error(self) -> str:
        """The code of the error that it tells of."""
        code: str = json.loads(self.body)["error"]["code"]
        return code


class Client:
    """A connection on which a test sends exactly the bytes that it wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._parser = h11.Connection(h11.CLIENT)

    @classmethod
    @asynccontextmanager
    async def connected(cls, served: Served) -> AsyncIterator[Self]:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, method: str = "GET") -> Answer:
        """Return the next response on this connection."""
        parser = h11.Connection(h11.CLIENT)
        request = h11.Request(method=method, target="/", headers=[("Host", "edge")])
        parser.send(request)
        parser.send(h11.EndOfMessage())
        if left := self._parser.trailing_data[0]:  # nothing would be the connection's end
            parser.receive_data(left)
        self._parser = parser
        async with asyncio.timeout(PATIENCE_S):
            return await self._answer(parser)

    async def _answer(self, parser: h11.Connection) -> Answer:
        head: h11.Response | None = None
        body, ended = b"", False
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError:
                break  # the server closed before the end of the body
            if event is h11.NEED_DATA:
                parser.receive_data(await self.reader.read(65_536))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                ended = True
                break
        assert head is not None, "the connection was closed without an answer"
        headers: dict[str, str] = {}
        for name, value in ((n.decode(), v.decode("latin-1")) for n, v in head.headers):
            # Field lines of one name are one list (RFC 9110, 5.3).
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return Answer(head.status_code, headers, body, ended)

    async def rest(self) -> bytes:
        """Return all that comes until the server closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()
