"""Chats: each remembers the latest stream of a conversation whose id a client has chosen.

The edge sets it when it has opened a stream, and asks for it when a client comes back with only the
chat's id. The messages are the client's to keep.
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
"""Time in ms for which a chat is known after its latest stream began."""


class ChatObject(DurableObject):
    """A chat: remembers the latest stream of a conversation whose id a client has chosen."""

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Set the latest stream; the body of the PUT is its id."""
        if request.method != "PUT":
            raise CallerError(
                "a chat does not support this method", code="method_not_allowed", status=405
            )
        if len(request.body) != STREAM_ID_BYTES:
            raise CallerError("not the id of a stream", field="body")
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
