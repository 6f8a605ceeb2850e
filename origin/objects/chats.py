"""Chats: each remembers the latest stream of a conversation, whose id a client has chosen.

The edge stores the stream's id here when it has opened a stream. When a client returns with only
the chat's id, the edge reads the stream's id from here. The client itself keeps the messages.
"""

from __future__ import annotations

from tailrace.ledger.errors import CallerError, NotFound
from tailrace.ledger.frame import STREAM_ID_BYTES
from tailrace.ledger.objects.object import (
    DurableObject,
    ObjectRequest,
    ObjectResponse,
    ReadableClass,
    ReadContext,
)

LATEST = "latest"

KEPT_MS = 86_400_000
"""Time in ms after the start of its latest stream at which a chat is forgotten."""


class ChatObject(DurableObject):
    """A chat: remembers the id of the latest stream of one conversation."""

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Store the id of the latest stream, which is the body of the PUT."""
        if request.method != "PUT":
            raise CallerError(
                "a chat does not support this method", code="method_not_allowed", status=405
            )
        if len(request.body) != STREAM_ID_BYTES:
            raise CallerError(f"is not the {STREAM_ID_BYTES} bytes of a stream's id", field="body")
        async with self.context.storage.transaction():
            self.context.storage.put(LATEST, request.body)
            self.context.storage.set_alarm(self.context.now_ms() + KEPT_MS)
        return ObjectResponse(204)

    async def alarm(self, retries: int) -> None:
        self.context.storage.delete_all()


async def latest_of(context: ReadContext, _request: ObjectRequest) -> ObjectResponse:
    """Return the id of the latest stream. Raises NotFound if none is known."""
    found = await context.ledger.objects.get(context.key, (LATEST,))
    if LATEST not in found:
        raise NotFound(
            "no such chat", hint="it has had no stream, or its latest stream has expired"
        )
    return ObjectResponse(200, body=found[LATEST])


CHATS = ReadableClass(make=ChatObject, read=latest_of, reads=frozenset(("GET",)))
