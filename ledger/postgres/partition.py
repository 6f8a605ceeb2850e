"""The hourly partitions of the frames: made before they are needed, dropped when all is gone.

Dropping a table costs the same whatever it holds, and leaves no dead rows behind. So a
stream that expires only loses its rows in `stream` and `head`, by which readers find it; its
frames go with their partition when the last stream of that hour has gone. A partition that
a long-lived stream holds on to is cleaned row by row after LINGER_HOURS, a little at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from psycopg import AsyncConnection, errors, sql

from ledger.postgres.schema import SID_BITS
from ledger.postgres.statements import FORGET_EXPIRED, LEFTOVERS, LIVES, PARTITIONS, PURGE

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
            row = await found.fetchone()
            if row is not None and row[0] is not None:
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


async def drop_partitions(connection: AsyncConnection, now_ms: int) -> int:
    """Drop those of past hours in which no stream lives; returns how many."""
    dropped = 0
    rows = await connection.execute(PARTITIONS)
    for (number,) in await rows.fetchall():
        if not 0 < number < partition_at(now_ms) - 1:
            continue
        try:
            dropped += await _drop_if_dead(connection, number)
        except errors.LockNotAvailable:
            continue  # commits come first
    return dropped


async def _drop_if_dead(connection: AsyncConnection, number: int) -> bool:
    bounds = (number << SID_BITS, (number + 1) << SID_BITS)
    name = sql.Identifier(f"frame_{number}")
    async with connection.transaction():
        # Before it is asked who lives: an origin whose clock is behind may create a stream in it.
        await connection.execute(f"SET LOCAL lock_timeout = {DROP_LOCK_MS}".encode())
        await connection.execute(sql.SQL("LOCK TABLE {}").format(name))
        lives = await connection.execute(LIVES, bounds)
        row = await lives.fetchone()
        if row is None or row[0]:
            return False
        await connection.execute(FORGET_EXPIRED, bounds)
        await connection.execute(sql.SQL("DROP TABLE {}").format(name))
    return True


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
