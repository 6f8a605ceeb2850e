"""Sliding retention on PostgreSQL: what slides, what is gone, and when its frames go.

Frames lie in hourly partitions, made before they are needed, dropped when all is gone. Dropping
a table costs the same whatever it holds, and leaves no dead rows behind. So a stream that expires
only loses its rows in `stream` and `head`, by which readers find it; its frames go with their
partition when the last stream of that hour has gone. A partition that a long-lived stream holds on
to is cleaned row by row after LINGER_HOURS, a little at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from psycopg import AsyncConnection, errors, sql

from tailrace.ledger.errors import unknown_stream
from tailrace.ledger.interface import StreamKind
from tailrace.ledger.postgres.rows import Ints
from tailrace.ledger.postgres.schema import SID_BITS
from tailrace.ledger.postgres.server import Pool
from tailrace.ledger.postgres.statements import (
    DROP_STREAMS,
    EXPIRED,
    FORGET_EXPIRED,
    FORGET_OBJECTS,
    LEFTOVERS,
    LIVES,
    PARTITIONS,
    PURGE,
    TOUCH,
)
from tailrace.ledger.postgres.tail import PostgresTail, Residents

EXPIRE_STREAMS = 64
"""Streams removed per transaction, to keep each one short."""
FORGET_OBJECTS_AFTER_MS = 3_600_000
"""An object without values and alarm is forgotten when nobody has used it for so long."""
TOUCH_NOW_MS = 60_000
"""A read of a stream that has less than this to live is stored before the read goes on, as
another origin may sweep; other reads are stored with the next sweep."""
HOUR_MS = 3_600_000
LINGER_HOURS = 3
"""Hours for which a partition may hold frames of expired streams because others in it live."""
PURGE_ROWS = 2_000
"""Frames that are deleted in one transaction."""
PURGE_STREAMS = 64
"""Streams that are looked at in one go when frames are deleted row by row."""
DROP_LOCK_MS = 5
"""How long dropping a partition may hold up commits while it waits for them; else next time."""


def partition_at(now_ms: int) -> int:
    """The number of the partition of streams created at this time (Unix ms); 0 is for objects."""
    return now_ms // HOUR_MS + 1


async def add_partitions(connection: AsyncConnection, numbers: Iterable[int]) -> None:
    """Make those that are missing. Attaching lets commits go on; CREATE … PARTITION OF does not."""
    for number in numbers:
        async with connection.transaction():
            await connection.execute(
                "SELECT pg_advisory_xact_lock(hashtext('tailrace partitions'))"
            )
            found = await connection.execute("SELECT to_regclass($1)::text", (f"frame_{number}",))
            if await found.fetchone() != (None,):
                continue
            names = {
                "name": sql.Identifier(f"frame_{number}"),
                "first": sql.Literal(str(number << SID_BITS)),
                "after": sql.Literal(str((number + 1) << SID_BITS)),
            }
            for statement in (
                "CREATE TABLE {name} (LIKE frame INCLUDING ALL)",
                "ALTER TABLE frame ATTACH PARTITION {name} FOR VALUES FROM ({first}) TO ({after})",
            ):
                await connection.execute(sql.SQL(statement).format(**names))


async def drop_partitions(connection: AsyncConnection, now_ms: int) -> None:
    """Drop those of past hours in which no stream lives."""
    rows = await connection.execute(PARTITIONS)
    for (number,) in await rows.fetchall():
        if not 0 < number < partition_at(now_ms) - 1:
            continue
        try:
            await _drop_if_dead(connection, number)
        except errors.LockNotAvailable:
            continue  # commits come first


async def _drop_if_dead(connection: AsyncConnection, number: int) -> None:
    bounds = (number << SID_BITS, (number + 1) << SID_BITS)
    name = sql.Identifier(f"frame_{number}")
    async with connection.transaction():
        # Before it is asked who lives: an origin whose clock is behind may create a stream in it.
        await connection.execute(f"SET LOCAL lock_timeout = {DROP_LOCK_MS}".encode())
        await connection.execute(sql.SQL("LOCK TABLE {}").format(name))
        lives = await connection.execute(LIVES, bounds)
        row = await lives.fetchone()
        if row is None or row[0]:
            return
        await connection.execute(FORGET_EXPIRED, bounds)
        await connection.execute(sql.SQL("DROP TABLE {}").format(name))


async def purge_leftovers(connection: AsyncConnection, now_ms: int) -> None:
    """Delete frames of expired streams, row by row, where their partition will not go soon."""
    old = max(1, partition_at(now_ms) - LINGER_HOURS) << SID_BITS
    while True:
        rows = await connection.execute(LEFTOVERS, (old, PURGE_STREAMS))
        sids = [sid for (sid,) in await rows.fetchall()]
        for sid in sids:
            await purge(connection, sid)
        if len(sids) < PURGE_STREAMS:
            return


async def purge(connection: AsyncConnection, sid: int) -> None:
    """Delete the frames of a stream that is gone, in small transactions."""
    while (await connection.execute(PURGE, (sid, PURGE_ROWS))).rowcount:
        continue
    await connection.execute(FORGET_EXPIRED, (sid, sid + 1))


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
