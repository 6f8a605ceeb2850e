"""Chats: which stream is the latest of a conversation whose id a client has chosen.

The edge says so when it has opened one, and asks when a client comes back that knows no more than
the chat's id. What was said is the client's to keep.
"""

from __future__ import annotations

from ledger.errors import CallerError, NotFound
from ledger.frame import STREAM_ID_BYTES
from ledger.objects.object import (
    DurableObject,
    ObjectRequest,
    ObjectResponse,
    ReadableClass,
    ReadContext,
)

CHAT = "chat"
"""The class of objects that are chats, each under its id."""
LATEST = "latest"
KEPT_MS = 86_400_000
"""How long after its latest stream has begun a chat is known. What is over is not gone back to."""


class ChatObject(DurableObject):
    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """PUT: the body is the id of the stream that is the latest from now on."""
        if request.method != "PUT":
            raise CallerError("not a method of a chat", code="method_not_allowed", status=405)
        if len(request.body) != STREAM_ID_BYTES:
            raise CallerError("not the id of a stream", field="body")
        async with self.context.storage.transaction():
            self.context.storage.put(LATEST, request.body)
            self.context.storage.set_alarm(self.context.now_ms() + KEPT_MS)
        return ObjectResponse(204)

    async def alarm(self, retries: int) -> None:
        self.context.storage.delete_all()


async def latest_of(context: ReadContext, _request: ObjectRequest) -> ObjectResponse:
    """GET: the id of the latest stream; NotFound where none is known."""
    found = await context.ledger.objects.get(context.key, (LATEST,))
    if LATEST not in found:
        raise NotFound("no such chat", hint="it never was, or its latest stream is long over")
    return ObjectResponse(200, body=found[LATEST])


CHATS = ReadableClass(make=ChatObject, read=latest_of, reads=frozenset(("GET",)))
