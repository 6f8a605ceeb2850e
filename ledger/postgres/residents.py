"""The streams of a ledger on PostgreSQL that this process has in memory at the moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ledger.errors import unknown_stream
from ledger.frame import Durability, StreamEnd, tag_of
from ledger.interface import StreamInfo, StreamKind
from ledger.postgres.server import Pool
from ledger.postgres.statements import STREAM
from ledger.postgres.tail import PostgresTail, StreamHead

IDLE_SWEEPS = 10
"""A stream that nobody has used for so many sweeps is forgotten until it is asked for."""


class Residents:
    """Tails by stream id and by sid. What they say may be behind the tables, never before."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tails: dict[bytes, PostgresTail] = {}
        self._by_sid: dict[int, PostgresTail] = {}
        self.get, self.by_sid = self._tails.get, self._by_sid.get

    def watched(self) -> Iterator[PostgresTail]:
        return (tail for tail in list(self._by_sid.values()) if tail.watchers)

    async def look_up(self, stream: bytes) -> PostgresTail:
        """The stream as the tables have it now; `NotFound` if they do not."""
        known = self._tails.get(stream)
        before = known.head.copy() if known is not None else None
        rows = await self._pool.rows(STREAM, stream)
        known = self._tails.get(stream)
        if not rows:
            if known is not None:
                self.lose(known)
            raise unknown_stream(stream)
        [(sid, kind, durability, recipe, created_ms, epoch, at, ended, ttl_ms, expires_ms)] = rows
        head = StreamHead(sid, epoch, at, ended)
        if before is not None:
            head.check_not_before(before)
        if known is not None and known.head.sid == sid:
            known.unused = 0
            known.expires_ms = max(known.expires_ms, expires_ms)
            known.advance(head, at, ())
            return known
        info = StreamInfo(
            stream,
            epoch,
            at,
            ended,
            Durability(durability),
            bytes(recipe).decode(),
            created_ms,
            StreamKind(kind),
        )
        if known is not None:
            self.lose(known)
        tail = PostgresTail(info, head, ttl_ms, expires_ms, first=at)
        self._tails[stream] = self._by_sid[sid] = tail
        return tail

    async def note_read(self, tail: PostgresTail, start: int, frames: Sequence[bytes]) -> None:
        """Keep `released` from being behind what was read; tell the tip from what is deleted."""
        if frames:
            ended = tag_of(frames[-1]) == StreamEnd.tag
            head = StreamHead(tail.head.sid, tail.head.epoch, start + len(frames), ended)
            tail.advance(head, start, frames)
        elif start < tail.released:
            await self.look_up(tail.info.stream)

    def lose(self, tail: PostgresTail) -> None:
        """Forget a stream that is gone; who watches it is told to look."""
        self._tails.pop(tail.info.stream, None)
        self._by_sid.pop(tail.head.sid, None)
        tail.gone = True
        tail.wake()

    def sweep(self) -> None:
        """Forget streams that nobody has used for some time."""
        for tail in list(self._by_sid.values()):
            tail.unused += 1
            if tail.unused > IDLE_SWEEPS and not tail.watchers:
                del self._by_sid[tail.head.sid], self._tails[tail.info.stream]
