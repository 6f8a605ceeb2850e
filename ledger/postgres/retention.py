"""Sliding retention on PostgreSQL: what slides, what is gone, and when its frames go."""

from __future__ import annotations

from collections.abc import Callable

from psycopg import AsyncConnection

from ledger.errors import unknown_stream
from ledger.interface import StreamKind
from ledger.postgres.partition import drop_partitions, purge_leftovers
from ledger.postgres.residents import Residents
from ledger.postgres.rows import Ints
from ledger.postgres.server import Pool
from ledger.postgres.statements import DROP_STREAMS, EXPIRED, FORGET_OBJECTS, TOUCH
from ledger.postgres.tail import PostgresTail

EXPIRE_STREAMS = 64
"""Streams removed per transaction, to keep each one short."""
FORGET_OBJECTS_AFTER_MS = 3_600_000
"""An object without values and alarm is forgotten when nobody has used it for so long."""
TOUCH_NOW_MS = 60_000
"""A read of a stream that has less than this to live is stored before the read goes on, as
another origin may sweep; other reads are stored with the next sweep."""


class Retention:
    """Expiries in memory that the tables do not have yet, and the sweep."""

    def __init__(self, pool: Pool, residents: Residents, now_ms: Callable[[], int]) -> None:
        self._pool = pool
        self._residents = residents
        self._now_ms = now_ms
        self._touched: dict[int, int] = {}  # sid to expires_ms

    async def touch(self, tail: PostgresTail) -> None:
        """Slide the expiry of a stream that is read; `NotFound` if it is gone already."""
        if not tail.head.ended or tail.info.kind is StreamKind.OBJECT:
            return  # its retention begins with its end, or is its object's business
        now = self._now_ms()
        self._touched[tail.head.sid] = now + tail.ttl_ms
        # By half of its time at the latest, or a short one would be stored at each read.
        if tail.expires_ms - now < min(TOUCH_NOW_MS, tail.ttl_ms // 2):
            await self._slide([tail.head.sid])
            if tail.expires_ms < now + tail.ttl_ms:
                raise unknown_stream(tail.info.stream)

    async def expire(self) -> int:
        """Remove what has had its time; returns how many streams."""
        for tail in self._residents.watched():
            await self.touch(tail)
        await self._slide(list(self._touched))
        removed = 0
        while sids := await self._pool.run(self._remove_some):
            removed += len(sids)
            for sid in sids:
                gone = self._residents.by_sid(sid)
                if gone is not None:
                    self._residents.lose(gone)
        await self._pool.run(self._clean)
        return removed

    async def _slide(self, sids: list[int]) -> None:
        """Store the new expiries of these streams."""
        expiries = {sid: self._touched[sid] for sid in sids if sid in self._touched}
        if not expiries:
            return
        rows = await self._pool.rows(TOUCH, Ints(expiries), Ints(expiries.values()))
        stored = {sid for (sid,) in rows}
        for sid, expires_ms in expiries.items():
            if self._touched.get(sid) == expires_ms:
                del self._touched[sid]
            tail = self._residents.by_sid(sid)
            if sid in stored and tail is not None:
                tail.expires_ms = max(tail.expires_ms, expires_ms)

    async def _remove_some(self, connection: AsyncConnection) -> list[int]:
        async with connection.transaction():
            rows = await connection.execute(EXPIRED, (self._now_ms(), EXPIRE_STREAMS))
            sids = [sid for (sid,) in await rows.fetchall()]
            if sids:
                await connection.execute(DROP_STREAMS, (Ints(sids),))
        return sids

    async def _clean(self, connection: AsyncConnection) -> None:
        """Take back the space of what is gone."""
        now = self._now_ms()
        await drop_partitions(connection, now)
        await purge_leftovers(connection, now)
        while await self._forget_objects(connection, now) == EXPIRE_STREAMS:
            continue

    async def _forget_objects(self, connection: AsyncConnection, now_ms: int) -> int:
        last_ms = now_ms - FORGET_OBJECTS_AFTER_MS
        return (await connection.execute(FORGET_OBJECTS, (last_ms, EXPIRE_STREAMS))).rowcount
