"""Chats: each is a small durable stream, whose records name the streams of its turns.

A client chooses the id of a chat. When the edge has opened a stream for a turn, it has the chat
append the stream's id, and only then shows the stream to the client. A reader of the chat gets the
earlier turns and each new one, and reads their tokens from their own streams. The clients
themselves keep the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import STREAM_ID_BYTES, Durability
from tailrace.ledger.interface import Ledger
from tailrace.ledger.objects.object import (
    ObjectContext,
    ObjectRequest,
    ObjectResponse,
    ReadableClass,
)
from tailrace.origin.objects.chat_presence import Presence
from tailrace.origin.objects.chat_reads import read_chat
from tailrace.origin.streams.config import Create, StreamConfig
from tailrace.origin.streams.json_messages import JSON_TYPE
from tailrace.origin.streams.state import StoredStream
from tailrace.origin.streams.stored_object import StoredStreamObject

TURN = "turn:"
"""Prefix of the keys under which a chat stores the number of each stream's turn; the stream's id in
hex follows. The chat looks there first, so that a repeated request does not list a stream twice."""
KEPT_MS = 86_400_000
"""Time in ms after the start of its latest turn at which a chat is forgotten."""


class ChatObject(StoredStreamObject):
    """A chat: appends the streams of its turns to a ledger stream of its own."""

    def __init__(self, context: ObjectContext, begun: Callable[[], None]) -> None:
        """Create the object; `begun` is called for each turn that was appended."""
        super().__init__(context)
        self._begun = begun

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Handle PUT: create the chat, and append the stream whose id is the body, if any."""
        if request.method != "PUT":
            raise CallerError(
                "a chat does not support this method", code="method_not_allowed", status=405
            )
        if len(request.body) not in (0, STREAM_ID_BYTES):
            raise CallerError(f"is not the {STREAM_ID_BYTES} bytes of a stream's id", field="body")
        await self._load()
        state = self._state or await self._create()
        self.context.storage.set_alarm(self.context.now_ms() + KEPT_MS)
        if request.body:
            await self._append(state, request.body.hex())
        return ObjectResponse(204)

    async def alarm(self, retries: int) -> None:
        """Forget the chat."""
        await self._load()
        async with self.context.storage.transaction():
            self.context.storage.delete_all()
            if self._state is not None:
                self.context.storage.drop_stream(self._state.config.stream)
        self._state = None

    async def _create(self) -> StoredStream:
        storage, stream = self.context.storage, self.context.random(STREAM_ID_BYTES)
        config = StreamConfig(stream, JSON_TYPE, Create())
        async with storage.transaction():
            state = StoredStream.create(storage, config, self.context.now_ms(), Durability.PROCESS)
        self._state = state
        return state

    async def _append(self, state: StoredStream, stream: str) -> None:
        """Append a turn, unless its stream is listed already."""
        storage = self.context.storage
        if await storage.get(TURN + stream) is not None:
            return
        number = state.tip.index
        record = {"turn": number, "stream": stream, "started_ms": self.context.now_ms()}
        async with state.change():
            state.append([json.dumps(record, separators=(",", ":")).encode()], closes=False)
            storage.put(TURN + stream, str(number).encode())
        self._begun()


class Chats:
    """The chats of an origin: `kind` is the class of their objects, `presence` counts followers.

    `begun` is called for each turn that is appended to a chat.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.begun: Callable[[], None] = _nothing
        self.presence = Presence(ledger.presence)
        self.kind = ReadableClass(
            make=partial(ChatObject, begun=self._count),
            read=partial(read_chat, self.presence),
            reads=frozenset(("GET",)),
        )

    def _count(self) -> None:
        self.begun()


def _nothing() -> None:
    pass
