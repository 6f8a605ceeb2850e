"""The bounded queue of items between two stages of a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from tailrace.origin.pipelines.stage import Item, Prompt
from tailrace.origin.producer import Data, Reasoning, Revision, Text

MAX_QUEUED_ITEMS = 64
"""Maximum number of items that wait between two stages of one stream."""
MAX_QUEUED_BYTES = 64 << 10
"""Size in bytes from which a queue takes no further item. A single item may exceed it."""
OTHER_ITEM_BYTES = 64
"""Assumed size in bytes of an item that is neither text nor data."""


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """Follows items through the queues; stages do not see it.

    `arrived` is set when the pipeline's reader takes it: then all stages behind the one that sent
    it have processed all items before it, and their outputs were given.
    """

    arrived: asyncio.Event = field(default_factory=asyncio.Event)


Queued = Item | Barrier


def size_of(item: Queued) -> int:
    """Return the approximate size of an item, in bytes."""
    match item:
        case Text(text=text) | Reasoning(text=text) | Revision(text=text):
            return len(text)
        case Data(data=data):
            return len(data)
        case Prompt():
            return sum(map(len, item.texts))
        case _:
            return OTHER_ITEM_BYTES


class ItemQueue:
    """A queue with one writer and one reader; the writer waits while it is full."""

    def __init__(self, most_items: int = MAX_QUEUED_ITEMS) -> None:
        """Begin empty; `most_items` is the maximum number of items."""
        self._items: deque[Queued] = deque()
        self._bytes = 0
        self._most_items = most_items
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Let the reader get an error instead of the next item."""
        self._error = error
        self._changed.set()

    @property
    def is_full(self) -> bool:
        """True if the writer must wait."""
        return len(self._items) >= self._most_items or self._bytes >= MAX_QUEUED_BYTES

    async def put(self, item: Queued) -> None:
        """Add an item, as soon as there is room."""
        while self.is_full:
            self._changed.clear()
            await self._changed.wait()
        self._items.append(item)
        self._bytes += size_of(item)
        self._changed.set()

    async def get(self) -> Queued:
        """Return the oldest item, as soon as there is one; raise the error of `fail`."""
        while not self._items and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        item = self._items.popleft()
        self._bytes -= size_of(item)
        self._changed.set()
        return item
