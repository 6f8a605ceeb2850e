"""Every request that no route of ours claims: Hypercorn as a library, before the application.

What HTTP/1.1 has in its corners (100-continue, chunks, trailers, HTTP/1.0) is Hypercorn's and
h11's to know. It gets one request at a time, from the bytes that the client has sent, and writes
to the connection that we own; nothing of it listens, accepts or keeps a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import time
from typing import Any, cast

import h11
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import ConnectionState

from tailrace.edge.access.middleware import ADMITTED
from tailrace.edge.errors import error_response, refusal
from tailrace.edge.server.dispatch import Application
from tailrace.edge.server.interfaces import Admitted, Transport
from tailrace.edge.telemetry.request_metrics import id_field
from tailrace.ledger.errors import TailraceError

REST_WAITING_BYTES = 64 << 10
"""Of a request's body, until the application takes it; then the client is not read."""


class Rest:
    """Hypercorn's side of a server: its settings, and what it asks the application by."""

    def __init__(self, application: Application, config: Config) -> None:
        self.application = application
        self.config = config
        self.app = ASGIWrapper(cast(Any, application.app))
        self.context = WorkerContext(None)
        self._headers: list[tuple[bytes, bytes]] = []
        self._headers_of_s = 0  # the second that they are of

    async def drain(self) -> None:
        """Responses under way are the last of their connections."""
        await self.context.terminated.set()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those of every answer: Date, and what the settings add; not to be changed."""
        if (second := int(time())) != self._headers_of_s:
            self._headers, self._headers_of_s = self.config.response_headers("h11"), second
        return self._headers

    def error_answer(self, error: TailraceError, head: bytes) -> bytes:
        """A whole answer of HTTP/1.1 to what `head` began, after which the connection is closed."""
        answer = error_response(error)
        connection = h11.Connection(h11.SERVER)
        fields = [*answer.raw_headers, *self.headers(), id_field(head), (b"connection", b"close")]
        parts = (
            connection.send(h11.Response(status_code=error.status, headers=fields)),
            connection.send(h11.Data(data=bytes(answer.body))),
        )
        return b"".join(part or b"" for part in parts)


class AppRequest:
    """One request with Hypercorn.

    `done` is called when the response has ended and the connection goes on, with what of the
    bytes was not the request's; otherwise the connection is closed. `admitted` is the request if
    the access rules have been applied already.
    """

    def __init__(
        self,
        rest: Rest,
        client: Transport,
        done: Callable[[bytes], None],
        admitted: Admitted | None = None,
    ) -> None:
        self._rest = rest
        self._admitted = admitted
        self._client = client
        self._done = done
        self._waiting = bytearray()
        self._head = b""
        self._news = asyncio.Event()
        self._drained = asyncio.Event()
        self._answering = False  # the response has begun
        self._closes = False  # and it says that it is the connection's last
        self._over = False
        self._gone = False
        self._protocol: ProtocolWrapper | None = None
        rest.application.spawn(self._run())

    # ---- what the connection says ----

    def receive(self, data: bytes) -> None:
        if self._over:
            return
        self._head = self._head or data  # which comes first, and whole
        self._waiting += data
        self._news.set()
        if len(self._waiting) > REST_WAITING_BYTES:
            self._client.pause_reading()

    def drained(self) -> None:
        self._drained.set()

    def disconnected(self) -> None:
        self._gone = True
        self._news.set()
        self._drained.set()

    def cut(self, error: TailraceError) -> None:
        """End it for what the client did not send: with an answer where none has begun."""
        if self._answering:
            self._client.abort()
        else:
            self._client.write(self._rest.error_answer(error, self._head))
            self._client.close(lingers=True)

    @property
    def body_is_whole(self) -> bool:
        """Whether no more of this request is to come, as far as its protocol can tell."""
        connection = self._h11()
        return connection is None or connection.their_state not in (h11.IDLE, h11.SEND_BODY)

    # ---- Hypercorn's side ----

    async def _run(self) -> None:
        try:
            await self._serve()
        finally:
            if not (self._over or self._gone):
                self._client.close()  # it was cancelled, or failed
            if self._admitted is not None:
                self._admitted.done()
            self._protocol = None  # it knows this one: garbage that would wait to be found

    async def _serve(self) -> None:
        rest = self._rest
        async with TaskGroup(asyncio.get_running_loop()) as tasks:
            self._protocol = ProtocolWrapper(
                rest.app,
                rest.config,
                rest.context,
                tasks,
                ConnectionState({} if self._admitted is None else {ADMITTED: self._admitted}),
                self._client.secure,
                self._client.peer,
                self._client.server,
                self._send,
                "http/1.1",
            )
            await self._protocol.initiate()
            while not (self._over or self._gone):
                if self._waiting:
                    data, self._waiting = bytes(self._waiting), bytearray()
                    self._client.resume_reading()
                    await self._protocol.handle(RawData(data))
                else:
                    self._news.clear()
                    await self._news.wait()
            if self._gone:
                await self._protocol.handle(Closed())

    async def _send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            if self._closes:  # what comes of the body still is nobody's
                self._over = True
                self._news.set()
            self._client.close(lingers=self._closes)
        elif isinstance(event, Updated) and event.idle and self._h11() is not None:
            self._end()

    async def _write(self, data: bytes) -> None:
        if self._gone:
            return
        if not self._answering and data and not data.startswith(b"HTTP/1.1 100"):
            self._answering = True
            data = self._said(data)
        self._client.write(data)
        while self._client.writable_bytes() < 1 and not self._gone:
            self._drained.clear()
            await self._drained.wait()

    def _said(self, data: bytes) -> bytes:
        """The response's head; for h11's refusal of what came, which is bare, one in our words."""
        connection = self._h11()
        if connection is not None and connection.their_state is h11.ERROR:
            return self._rest.error_answer(refusal(int(data[9:12])), self._head)
        if self.body_is_whole:
            return data
        # Hypercorn closes behind it; who is not told might send the next request into that.
        self._closes = True
        return data.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)

    def _end(self) -> None:
        """The response has ended, and the connection may be used again."""
        if self._over:
            return
        self._over = True
        self._news.set()
        connection = self._h11()
        if self._closes or (connection is not None and connection.trailing_data[0]):
            # What came behind chunks h11 has taken in already, and it would go on with that.
            self._client.close(lingers=self._closes)
        else:
            self._done(bytes(self._waiting))

    def _h11(self) -> h11.Connection | None:
        protocol = self._protocol.protocol if self._protocol is not None else None
        if not isinstance(protocol, H11Protocol):
            return None
        return protocol.connection if isinstance(protocol.connection, h11.Connection) else None
