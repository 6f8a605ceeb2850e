"""A response writer on plain ASGI messages, for servers that do not offer `tailrace.writer`."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Send

from tailrace.edge.flush import FlushBatch
from tailrace.edge.server.deadlines import Deadlines
from tailrace.edge.server.interfaces import NULL_LISTENER, UNSENT_BYTES, Headers, ResponseSource
from tailrace.ledger.process.tasks import cancel


class AsgiWriter:
    """A `ResponseWriter` whose `run` sends the written data as ASGI messages.

    At most UNSENT_BYTES wait in this object, in addition to the server's own buffers. The next
    message is sent when the server's `send` has returned, so back-pressure of the server, if it
    applies any, reaches the origin.
    """

    def __init__(self, batch: FlushBatch, receive: Receive, send: Send) -> None:
        self.batch = batch
        self.deadlines = Deadlines(asyncio.get_running_loop(), batch.flush)
        self._receive, self._send = receive, send
        self._source: ResponseSource = NULL_LISTENER
        self._head: tuple[int, Headers] | None = None
        self._waiting = bytearray()
        self._sending = 0  # bytes of the message for which the server's `send` has not returned
        self._ended = False
        self._broken = False  # the source reset the response, or the client disconnected
        self._changed = asyncio.Event()

    @property
    def writer(self) -> AsgiWriter:
        """Return this object itself, as part of the interface of `tailrace.writer`."""
        return self

    def detach(self, source: ResponseSource) -> None:
        """Let `source` send the response."""
        self._source = source

    # ---- a ResponseWriter ----

    def start(self, status: int, headers: Headers) -> None:
        """Send the head of the response."""
        self._head = status, headers
        self._changed.set()

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        self._waiting += data
        self._changed.set()

    def end(self) -> None:
        """End the response."""
        self._ended = True
        self._changed.set()

    def reset(self) -> None:
        """Break off the response, so that the client sees an incomplete body."""
        self._broken = True
        self._changed.set()

    def writable_bytes(self) -> int:
        """Return how many bytes may be written now."""
        return UNSENT_BYTES - len(self._waiting) - self._sending

    # ---- the task ----

    async def run(self) -> None:
        """Send messages until the response has ended or the client has left.

        If the source resets the response, the last message of the body is never sent. The server
        then breaks off its response to the client, too.
        """
        leaving = asyncio.create_task(self._await_disconnect())
        try:
            await self._pump()
        finally:
            if not (self._ended or self._broken):  # the task was cancelled, or `send` raised
                self._disconnected()
            await cancel([leaving])

    async def _pump(self) -> None:
        whole = False
        while not whole:
            await self._changed.wait()
            self._changed.clear()
            if self._head is not None:
                (status, headers), self._head = self._head, None
                message = {"type": "http.response.start", "status": status}
                await self._send({**message, "headers": list(headers)})
            data, self._waiting = bytes(self._waiting), bytearray()
            whole = self._ended
            if self._broken and not whole:
                return
            if data or whole:
                self._sending = len(data)
                body = {"type": "http.response.body", "body": data, "more_body": not whole}
                await self._send(body)
                self._sending = 0
                self._source.drained()
                self.batch.flush()

    async def _await_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:
            self._disconnected()

    def _disconnected(self) -> None:
        self._broken = True
        self._changed.set()
        self._source.disconnected()
        self.batch.flush()
