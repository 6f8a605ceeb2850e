"""Retention on PostgreSQL: sliding expiries, removal of streams and of their frames.

Frames are in hourly partitions, which are created in advance and dropped as a whole. Dropping a
table costs the same however many rows it has, and leaves no dead rows. So an expired stream loses
only its rows in `stream` and `head`, by which readers find it. Its frames are dropped with their
partition, when all streams of that hour and all branches of them have expired. If a long-lived
stream keeps a partition, frames of expired streams are deleted from it row by row after
LINGER_HOURS.
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
    FORGET_USAGE,
    LEFTOVERS,
    LIVES,
    PARTITIONS,
    PURGE,
    TOUCH,
)
from tailrace.ledger.postgres.tail import PostgresTail, Residents

EXPIRE_STREAMS = 64
"""Maximum streams removed per transaction, to keep each one short."""
FORGET_OBJECTS_AFTER_MS = 3_600_000
"""Time without use after which an object without values and alarm is deleted, in ms."""
TOUCH_NOW_MS = 60_000
"""A read of a stream that expires within this many ms stores the postponed expiry at once.

Otherwise another origin could remove the stream during the read. If the stream expires later than
that, the postponed expiry is stored with the next sweep.
"""
HOUR_MS = 3_600_000
LINGER_HOURS = 3
"""Age of a partition, in hours, from which on frames of expired streams are deleted row by row.

A partition of this age still exists only because it also has frames of streams that are alive, so
it cannot be dropped.
"""
PURGE_ROWS = 2_000
"""Maximum frames deleted in one transaction."""
PURGE_STREAMS = 64
"""Maximum removed streams per query when frames are deleted row by row."""
DROP_LOCK_MS = 5
"""Milliseconds that dropping a partition waits for its lock, and so may delay commits.

After that the partition stays until the next sweep.
"""


def partition_at(now_ms: int) -> int:
    """Return the partition number of streams created at a Unix time in ms; 0 is for objects."""
    return now_ms // HOUR_MS + 1


async def add_partitions(connection: AsyncConnection, numbers: Iterable[int]) -> None:
    """Create missing partitions by ATTACH, because CREATE … PARTITION OF would block commits."""
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
    """Drop partitions of past hours without living streams."""
    rows = await connection.execute(PARTITIONS)
    for (number,) in await rows.fetchall():
        if not 0 < number < partition_at(now_ms) - 1:
            continue
        try:
            await _drop_if_dead(connection, number)
        except errors.LockNotAvailable:
            continue  # commits must not wait for this lock; the next sweep tries again


async def _drop_if_dead(connection: AsyncConnection, number: int) -> None:
    bounds = (number << SID_BITS, (number + 1) << SID_BITS)
    name = sql.Identifier(f"frame_{number}")
    async with connection.transaction():
        # Lock the partition before checking that it is unused: an origin whose clock is behind may
        # still create a stream in it.
        await connection.execute(f"SET LOCAL lock_timeout = {DROP_LOCK_MS}".encode())
        await connection.execute(sql.SQL("LOCK TABLE {}").format(name))
        lives = await connection.execute(LIVES, bounds)
        row = await lives.fetchone()
        if row is None or row[0]:
            return
        await connection.execute(FORGET_EXPIRED, bounds)
        await connection.execute(sql.SQL("DROP TABLE {}").format(name))


async def purge_leftovers(connection: AsyncConnection, now_ms: int) -> None:
    """Delete frames of expired streams row by row, in partitions that will not be dropped soon."""
    old = max(1, partition_at(now_ms) - LINGER_HOURS) << SID_BITS
    while True:
        rows = await connection.execute(LEFTOVERS, (old, PURGE_STREAMS))
        sids = [sid for (sid,) in await rows.fetchall()]
        for sid in sids:
            await purge(connection, sid)
        if len(sids) < PURGE_STREAMS:
            return


async def purge(connection: AsyncConnection, sid: int) -> None:
    """Delete the frames of a removed stream in small transactions.

    Frames that a branch shares stay.
    """
    while (await connection.execute(PURGE, (sid, PURGE_ROWS))).rowcount:
        continue
    await connection.execute(FORGET_EXPIRED, (sid, sid + 1))


class Retention:
    """Retention of one origin: collects new expiries and removes expired streams."""

    def __init__(
        self, pool: Pool, residents: Residents, now_ms: Callable[[], int], usage_s: float
    ) -> None:
        self._pool = pool
        self._residents = residents
        self._now_ms = now_ms
        self._usage_ms = int(usage_s * 1000)
        self._touched: dict[int, int] = {}  # expiries that are not stored yet (Unix ms), by sid

    async def touch(self, tail: PostgresTail) -> None:
        """Postpone the expiry of a stream, because it is read.

        Raises:
            NotFound: The stream has been removed already.
        """
        if not tail.head.ended or tail.info.kind is StreamKind.OBJECT:
            return  # only ended streams expire, and streams of objects never do
        now = self._now_ms()
        self._touched[tail.head.sid] = now + tail.ttl_ms
        # Half of the TTL, because with a TTL below TOUCH_NOW_MS every read would store the expiry.
        if tail.expires_ms - now < min(TOUCH_NOW_MS, tail.ttl_ms // 2):
            await self._slide([tail.head.sid])
            if tail.expires_ms < now + tail.ttl_ms:
                raise unknown_stream(tail.info.stream)

    async def expire(self) -> int:
        """Remove expired streams and return their number."""
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
        """Free the space of removed streams and objects."""
        now = self._now_ms()
        await drop_partitions(connection, now)
        await purge_leftovers(connection, now)
        while await self._forget_objects(connection, now) == EXPIRE_STREAMS:
            continue
        while await self._forget_usage(connection, now) == EXPIRE_STREAMS:
            continue

    async def _forget_usage(self, connection: AsyncConnection, now_ms: int) -> int:
        before = now_ms - self._usage_ms
        return (await connection.execute(FORGET_USAGE, (before, EXPIRE_STREAMS))).rowcount

    async def _forget_objects(self, connection: AsyncConnection, now_ms: int) -> int:
        last_ms = now_ms - FORGET_OBJECTS_AFTER_MS
        return (await connection.execute(FORGET_OBJECTS, (last_ms, EXPIRE_STREAMS))).rowcount
