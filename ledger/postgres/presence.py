"""The numbers of readers that the origins of a ledger on PostgreSQL publish for each other.

They are rows of an unlogged table. Each row has the lease of its origin, and does not count once
that lease has expired. So the readers of a dead origin disappear from the sums without a write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tailrace.ledger.interface import PublishedReaders
from tailrace.ledger.postgres.rows import Blobs, Ints
from tailrace.ledger.postgres.server import Pool
from tailrace.ledger.postgres.statements import (
    PRESENCE_CHANNEL,
    PUBLISH_READERS,
    PUBLISHED_READERS,
)

MAX_NOTICE_STREAMS = 200
"""Maximum streams that a notification names; with more, it says that any number may have changed.

PostgreSQL limits the payload of a notification to 8,000 bytes, and an id takes 33 bytes.
"""
ANY = "*"
"""Stands for all streams in a notification."""


class PostgresPresence:
    """One origin's view of the published numbers of readers, as a `SharedPresence`."""

    def __init__(self, pool: Pool, lease: int) -> None:
        self._pool = pool
        self._lease = lease
        self._changed: Callable[[Sequence[bytes] | None], None] = _ignore

    async def publish(self, readers: Mapping[bytes, int]) -> None:
        named = ANY if len(readers) > MAX_NOTICE_STREAMS else " ".join(map(bytes.hex, readers))
        await self._pool.rows(
            PUBLISH_READERS,
            self._lease,
            Blobs(readers),
            Ints(readers.values()),
            PRESENCE_CHANNEL,
            f"{self._lease} {named}",
        )

    async def read(self, streams: Sequence[bytes]) -> dict[bytes, PublishedReaders]:
        rows = await self._pool.rows(PUBLISHED_READERS, Blobs(streams), self._lease)
        return {bytes(stream): PublishedReaders(own, others) for stream, own, others in rows}

    def watch(self, changed: Callable[[Sequence[bytes] | None], None]) -> None:
        self._changed = changed

    def notice(self, named: str) -> None:
        """Handle a notification of another origin, which names streams or is ANY."""
        self._changed(None if named == ANY else [bytes.fromhex(each) for each in named.split()])


def _ignore(_: Sequence[bytes] | None) -> None:
    pass
