"""`GET /v1/ws`: the thin shell that moves a session's messages over a WebSocket."""

from __future__ import annotations

import asyncio

from starlette.websockets import WebSocket

from edge.access.middleware import caller_of
from edge.config import EdgeConfig
from edge.origins.link import Link
from edge.session import Session, Unfinished
from ledger.tasks import first_of

SUBPROTOCOL = "tailrace"
"""A page that says its API key as a subprotocol has to offer another one, which is chosen."""


async def sessions(websocket: WebSocket) -> None:
    """Serve one client until either side closes; its streams are detached then."""
    link: Link = websocket.app.state.link
    config: EdgeConfig = websocket.app.state.config
    offered = websocket.scope.get("subprotocols", ())
    await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
    unfinished = Unfinished(config.max_unfinished_per_connection, link.now)
    caller = caller_of(websocket)
    session = Session(config.max_streams_per_connection, unfinished, caller=caller)
    client = Client(websocket, link, session)
    link.watch(client)
    try:
        await first_of(client.read(), client.write())
    finally:
        link.forget(client)


class Client:
    """One connected client: the `Sink` of its streams.

    Nothing is read while a client leaves its answers unread, and nothing more is taken
    from the session while a message drains, so what waits is bounded by the credit.
    """

    def __init__(self, websocket: WebSocket, link: Link, session: Session) -> None:
        self._websocket = websocket
        self._link = link
        self._session = session
        self._to_write = asyncio.Event()
        self._drained = asyncio.Event()

    def deliver(self, raw: bytes) -> None:
        self._session.deliver(raw)
        self._to_write.set()

    async def read(self) -> None:
        """Until the client closes."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes")
            for raw in self._session.receive(message["text"] if data is None else data):
                self._link.submit(self, raw)
            self._to_write.set()
            while self._session.congested:
                self._drained.clear()
                await self._drained.wait()

    async def write(self) -> None:
        """Until the session closes."""
        while True:
            while (data := self._session.next_message()) is not None:
                await self._websocket.send_bytes(data)
                self._drained.set()
                for raw in self._session.credits():
                    self._link.submit(self, raw)
            if (close := self._session.close) is not None:
                await self._websocket.close(close.code, close.reason)
                return
            self._to_write.clear()
            await self._to_write.wait()
