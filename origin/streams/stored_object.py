"""The base of objects that keep one stream: streams themselves, and chats."""

from __future__ import annotations

from tailrace.ledger.objects.object import DurableObject, ObjectContext
from tailrace.origin.streams.state import StoredStream


class StoredStreamObject(DurableObject):
    """An object whose state is one stream, which it reads from its storage when it is needed."""

    def __init__(self, context: ObjectContext) -> None:
        super().__init__(context)
        self._state: StoredStream | None = None
        self._loaded = False

    async def _load(self) -> None:
        """Set `_state` to the stored stream, or to None if there is none; read it only once."""
        if not self._loaded:
            await self.context.block_concurrency_while(self._read_state)

    async def _read_state(self) -> None:
        if not self._loaded:
            self._state = await StoredStream.load(self.context)
            self._loaded = True
