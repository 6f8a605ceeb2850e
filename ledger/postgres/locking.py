"""The pessimistic commit: lock the rows of a group, look at them, decide, write; one transaction.

For groups in which objects write, for streams of which memory does not know the last state,
and after a connection was lost with a commit under way. Two round trips, by pipelining.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from psycopg import AsyncConnection

from ledger.errors import LedgerFailed
from ledger.interface import Append, NewStream, ObjectKey, ObjectWrite
from ledger.postgres import statements as sql
from ledger.postgres.plan import Created, GroupPlan, Item, Object
from ledger.postgres.rows import Blobs, Flags, Ints, columns
from ledger.postgres.tail import StreamHead, went_back

MAX_NOTICE_SIDS = 400
"""Streams that a notice names; a payload has at most 8,000 bytes. Above it, it says: all."""

Statement = tuple[str, Sequence[object]]


class Stamp(NamedTuple):
    """Who commits what when: the owner's lease, the group's number, Unix time in ms."""

    lease: int
    number: int
    now_ms: int


def notice(lease: int, sids: Sequence[int]) -> str:
    """What the listeners of other origins are told of a commit."""
    if len(sids) > MAX_NOTICE_SIDS:
        return f"{lease} *"
    return " ".join(map(str, (lease, *sids)))


async def commit_locked(
    connection: AsyncConnection, items: Sequence[Item], tried: list[GroupPlan], stamp: Stamp
) -> GroupPlan:
    """Store the group and return what was stored and refused.

    `tried` holds the plan of an earlier try whose commit may have gone through. If it has,
    that plan is returned; the transaction then only waits until a standby has it too.
    """
    async with connection.pipeline(), connection.transaction():
        plan = await _look(connection, items, stamp)
        if plan is None:
            return tried[-1]
        tried[:] = [plan]
        for statement, parameters in _statements(plan, stamp):
            await connection.execute(statement, parameters, prepare=True)
    return plan


async def _look(
    connection: AsyncConnection, items: Sequence[Item], stamp: Stamp
) -> GroupPlan | None:
    """Lock what the group touches and plan it; None where it has been committed before."""
    writes = [item.change for item in items if isinstance(item.change, ObjectWrite)]
    keys = sorted({write.key for write in writes})
    streams = sorted(set(_streams(items)))
    created = sum(len(write.creates) for write in writes)
    owner = await connection.execute(sql.LOCK_OWNER, (stamp.lease,), prepare=True)
    kinds, names = (Blobs(part.encode() for part in column) for column in columns(keys) or ((), ()))
    objects = await connection.execute(
        sql.LOCK_OBJECTS, (kinds, names, stamp.lease), prepare=True, binary=True
    )
    heads = await connection.execute(sql.LOCK_HEADS, (Blobs(streams),), prepare=True, binary=True)
    numbers = await connection.execute(sql.NEW_NUMBERS, (created,), prepare=True)
    known = await owner.fetchone()
    if known is None:
        raise replaced()
    if known[0] >= stamp.number:
        return None
    if known[0] < stamp.number - 1:
        raise went_back(f"commit {stamp.number - 1}")
    plan = GroupPlan(
        {bytes(row[0]): StreamHead(*row[1:]) for row in await heads.fetchall()},
        {
            ObjectKey(bytes(kind).decode(), bytes(name).decode()): Object(oid, epoch)
            for kind, name, oid, epoch in await objects.fetchall()
        },
        iter([row[0] for row in await numbers.fetchall()]),
    )
    for item in items:
        plan.take(item)
    return plan


def replaced() -> LedgerFailed:
    return LedgerFailed(
        "another process has opened the ledger as the same owner, or this one was away too long",
        retryable=False,
        hint="give every origin its own name, then start this one again",
    )


def _streams(items: Iterable[Item]) -> Iterable[bytes]:
    for item in items:
        change = item.change
        if isinstance(change, Append):
            yield change.stream
        else:
            yield from (new.stream for new in change.creates)
            yield from (append.stream for append in change.appends)
            yield from change.drops


# ---- the statements of a plan ----


def _statements(plan: GroupPlan, stamp: Stamp) -> Iterable[Statement]:
    yield sql.NUMBER_COMMIT, (stamp.lease, stamp.number)
    if plan.created:
        yield from _creates(plan.created, stamp)
    if plan.rows:
        sids, indexes, ids, frames = columns(plan.rows)
        yield sql.INSERT_FRAMES, (Ints(sids), Ints(indexes), Blobs(ids), Blobs(frames))
    if plan.moves:
        sids, _, _, after, ended = columns(plan.moved())
        yield sql.MOVE_HEADS, (Ints(sids), Ints(after), Flags(ended), stamp.now_ms)
    if plan.dropped:
        yield sql.DROP_STREAMS, (Ints(plan.dropped),)
    yield from _objects([found for found in plan.objects.values() if found.written], stamp)
    if plan.touched:
        yield sql.NOTIFY, (sql.CHANNEL, notice(stamp.lease, plan.touched))


def _creates(created: Sequence[Created], stamp: Stamp) -> Iterable[Statement]:
    sids = Ints(made.sid for made in created)
    news = [made.new for made in created]
    ttls = [ttl_ms(new) for new in news]
    yield (
        sql.INSERT_STREAMS,
        (
            sids,
            Blobs(new.stream for new in news),
            Ints(new.kind for new in news),
            Ints(new.durability for new in news),
            Blobs(new.recipe.encode() for new in news),
            Ints(stamp.now_ms for _ in news),
            Blobs(key_bytes(new) for new in news),
            Blobs(new.request_hash for new in news),
        ),
    )
    expiries = Ints(stamp.now_ms + ttl for ttl in ttls)
    kinds = Ints(new.kind for new in news)
    yield sql.INSERT_HEADS, (stamp.lease, sids, Ints(ttls), expiries, kinds)


def _objects(written: Sequence[Object], stamp: Stamp) -> Iterable[Statement]:
    cleared = [found.oid for found in written if found.clear]
    if cleared:
        yield sql.CLEAR_VALUES, (Ints(cleared),)
    values = list(
        chain.from_iterable(
            ((found.oid, name.encode(), value) for name, value in found.values.items())
            for found in written
        )
    )
    deleted = [(oid, name) for oid, name, value in values if value is None]
    if deleted:
        oids, names = columns(deleted)
        yield sql.DELETE_VALUES, (Ints(oids), Blobs(names))
    put = [row for row in values if row[2] is not None]
    if put:
        oids, names, contents = columns(put)
        yield sql.PUT_VALUES, (Ints(oids), Blobs(names), Blobs(contents))
    if written:
        alarms = [found.alarm or (-1, 0) for found in written]
        yield (
            sql.TOUCH_OBJECTS,
            (
                Ints(found.oid for found in written),
                Flags(found.sets_alarm for found in written),
                Ints(at_ms for at_ms, _ in alarms),
                Ints(retries for _, retries in alarms),
                stamp.now_ms,
            ),
        )


def ttl_ms(new: NewStream) -> int:
    return int(new.ttl_s * 1000)


def key_bytes(new: NewStream) -> bytes | None:
    return None if new.idempotency_key is None else new.idempotency_key.encode()
