"""Group commit on PostgreSQL: while one group is stored, the next one forms.

A group is one transaction, which writes the group's number into the owner's row. If a connection
is lost during a commit, that number later tells if the group was stored, so that no group is lost
or stored twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from psycopg import AsyncConnection, errors

from tailrace.ledger.errors import ConfigError, Damaged, LedgerAway, LedgerFailed, TailraceError
from tailrace.ledger.interface import Append, NewStream, ObjectKey, ObjectWrite
from tailrace.ledger.postgres import statements as sql
from tailrace.ledger.postgres.plan import GroupPlan, Item, Object
from tailrace.ledger.postgres.retention import add_partitions
from tailrace.ledger.postgres.rows import Blobs, Flags, Ints, columns
from tailrace.ledger.postgres.schema import SID_BITS
from tailrace.ledger.postgres.server import WRITE_TIMEOUT_S, LastingConnection
from tailrace.ledger.postgres.tail import Residents, StreamHead, went_back
from tailrace.ledger.usage import Usage

MAX_FORMING_BYTES = 4 * 1024 * 1024
"""Maximum bytes of frames and values that wait for the next commit; further writers wait."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that `Writer.close` waits until the forming group is stored."""
MAX_FORMING_ITEMS = 8_192
"""Maximum frames and writes that wait for the next commit."""
MAX_NOTICE_SIDS = 400
"""Maximum streams that a notification names; for more, `lease *` stands for all streams.

PostgreSQL limits the payload of a notification to 8,000 bytes.
"""

Statement = tuple[str, Sequence[object]]


class Stamp(NamedTuple):
    """Identity of a commit: the owner's lease, the group's number, and Unix time in ms."""

    lease: int
    number: int
    now_ms: int


def notice(lease: int, sids: Sequence[int]) -> str:
    """Return the payload of the notification for other origins."""
    if len(sids) > MAX_NOTICE_SIDS:
        return f"{lease} *"
    return " ".join(map(str, (lease, *sids)))


async def commit_locked(
    connection: AsyncConnection, items: Sequence[Item], tried: list[GroupPlan], stamp: Stamp
) -> GroupPlan:
    """Commit a group pessimistically: lock its rows, read them, plan the changes, write them.

    This is for groups with writes of objects, for streams whose state in memory may be outdated,
    and for a retry after the connection was lost during a commit. Statements are pipelined, so a
    commit takes two round trips. `tried` has the plan of an earlier try whose outcome is unknown.
    If that try was committed, this function returns that plan, and its own transaction changes
    nothing: it only waits until a standby has the earlier commit, too.
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
    """Lock and read the rows of a group, and return its plan.

    Return None if an earlier try has committed the group.
    """
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
        raise went_back(f"commit {stamp.number - 1} of this origin")
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
        "another process has opened the ledger as the same owner, or this origin was away too long",
        retryable=False,
        hint="give every origin a name of its own, then restart this origin",
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
        sids, indexes, *blobs = columns(plan.rows)
        yield sql.INSERT_FRAMES, (Ints(sids), Ints(indexes), *map(Blobs, blobs))
    if plan.moves:
        sids, _, _, after, ended = columns(plan.moved())
        yield sql.MOVE_HEADS, (Ints(sids), Ints(after), Flags(ended), stamp.now_ms)
    if plan.usage:
        yield sql.INSERT_USAGE, _usage(plan.usage)
    if plan.dropped:
        yield sql.DROP_STREAMS, (Ints(plan.dropped),)
    yield from _objects([found for found in plan.objects.values() if found.written], stamp)
    if plan.touched:
        yield sql.NOTIFY, (sql.CHANNEL, notice(stamp.lease, plan.touched))


def _usage(rows: Sequence[Usage]) -> list[Blobs | Ints]:
    """Return rows of usage as columns; texts are stored as bytes."""
    packed: list[Blobs | Ints] = []
    for column in columns(rows):
        if isinstance(column[0], int):
            packed.append(Ints(column))
        else:
            texts = (one.encode() if isinstance(one, str) else one for one in column)
            packed.append(Blobs(texts))
    return packed


def _creates(created: Sequence[tuple[int, NewStream]], stamp: Stamp) -> Iterable[Statement]:
    sids, news = Ints(sid for sid, _ in created), [new for _, new in created]
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
    values = [(o.oid, name.encode(), value) for o in written for name, value in o.values.items()]
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


@dataclass(slots=True)
class Group:
    """The items of one commit; the future `done` completes when they are durable and released."""

    done: asyncio.Future[None]
    items: list[Item] = field(default_factory=list)
    bytes: int = 0

    def add(self, item: Item, size: int) -> None:
        self.items.append(item)
        self.bytes += size


class Writer:
    """Stores this origin's groups in order; calls `release` with the plan of each durable group."""

    def __init__(
        self,
        connection: LastingConnection,
        lease: int,
        residents: Residents,
        now_ms: Callable[[], int],
        release: Callable[[GroupPlan], None],
    ) -> None:
        self._connection = connection
        self._lease = lease
        self._residents = residents
        self._now_ms = now_ms
        self._release = release
        self._failure: TailraceError | None = None
        self._number = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closing = False
        self._under_way = self._new_group()
        self.forming = self._new_group()
        self._task = asyncio.create_task(self._run(), name="ledger-writer")

    # ---- for writers ----

    def check(self) -> None:
        """Raise the failure that stopped the writer, if any."""
        if self._failure is not None:
            raise self._failure

    async def room(self) -> None:
        """Wait until the forming group has room; raise the failure that stopped the writer."""
        while not self._room.is_set():
            await self._room.wait()
        self.check()

    async def commit(self) -> None:
        """Wait until the forming group is durable and released."""
        group = self.forming
        if group.bytes >= MAX_FORMING_BYTES or len(group.items) >= MAX_FORMING_ITEMS:
            self._room.clear()
        self._work.set()
        # Shielded, because a cancelled waiter must not cancel the commit for the others.
        await asyncio.shield(group.done)

    def fail(self, error: TailraceError) -> None:
        """Stop storing and releasing: current and later waiters get this error.

        It stays unknown if a commit in progress stores its group, so the group's producers may
        send the same records again.
        """
        self._failure = self._failure or error
        for group in (self._under_way, self.forming):
            if not group.done.done():
                group.done.set_exception(self._failure)
                # Mark the exception as retrieved, or asyncio logs it if there is no waiter.
                group.done.exception()
        self._room.set()
        self._work.set()

    async def close(self) -> None:
        """Store the forming group, then stop. Waits at most CLOSE_TIMEOUT_S for the server."""
        self._closing = True
        self._work.set()
        _, late = await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_S)
        why = "was closed while its server was away" if late else "is closed"
        self.fail(LedgerFailed(f"the ledger {why}"))
        self._task.cancel()
        await asyncio.wait({self._task})

    # ---- the writer ----

    def _new_group(self) -> Group:
        return Group(asyncio.get_running_loop().create_future())

    async def _run(self) -> None:
        while not (self._closing and not self.forming.items):
            await self._work.wait()
            if self._failure is not None:
                return  # `fail` has given the error to the waiters, which may send their data again
            self._work.clear()
            # No await between these two assignments, so no item is added between them and lost.
            self._under_way, self.forming = self.forming, self._new_group()
            self._room.set()
            if self._under_way.items:
                await self._store(self._under_way)

    async def _store(self, group: Group) -> None:
        try:
            plan = await self._commit(group.items)
            if self._failure is None:
                for item, refusal in plan.refused:
                    item.error = refusal
                self._release(plan)
                group.done.set_result(None)
        except (LedgerFailed, ConfigError) as error:
            self.fail(error)
        except (LedgerAway, Damaged) as error:
            # The server was away for so long that the lease has expired, so retrying cannot help.
            self.fail(LedgerFailed(error.message, hint=error.hint))
        except BaseException as error:
            # Fail the group even after an unexpected error, or its waiters would wait for ever.
            self.fail(LedgerFailed(f"the commit could not be made: {error!r}"))
            raise

    async def _commit(self, items: list[Item]) -> GroupPlan:
        self._number += 1
        stamp, tried = Stamp(self._lease, self._number, self._now_ms()), list[GroupPlan]()

        async def work(connection: AsyncConnection) -> GroupPlan:
            self.check()
            try:
                return await self._try(connection, items, tried, stamp)
            except errors.CheckViolation:
                # The partition of these frames is missing: another origin, whose clock is hours
                # ahead, has dropped it.
                await add_partitions(connection, {sid >> SID_BITS for sid, *_ in tried[-1].rows})
                return await commit_locked(connection, items, tried, stamp)

        return await self._connection.run(work, WRITE_TIMEOUT_S)

    async def _try(
        self, connection: AsyncConnection, items: list[Item], tried: list[GroupPlan], stamp: Stamp
    ) -> GroupPlan:
        """Store the group, optimistically at the first try.

        `tried` has the plan of the last try, whose outcome is unknown.
        """
        if not tried:
            plan = self._optimistic_plan(items)
            if plan is not None:
                tried.append(plan)
                if await _commit_optimistically(connection, plan, stamp):
                    return plan
        return await commit_locked(connection, items, tried, stamp)

    def _optimistic_plan(self, items: list[Item]) -> GroupPlan | None:
        """Return a plan made from the heads in memory; None if the tables must be read."""
        heads = {}
        for item in items:
            if not isinstance(item.change, Append):
                return None
            tail = self._residents.get(item.change.stream)
            if tail is None:
                return None
            heads[item.change.stream] = tail.head
        plan = GroupPlan(heads)
        for item in items:
            plan.take(item)
        return None if plan.refused else plan


async def _commit_optimistically(
    connection: AsyncConnection, plan: GroupPlan, stamp: Stamp
) -> bool:
    """Commit with one statement, which checks that the rows are as the plan assumes.

    If any row differs, the statement stores nothing, and the result is False.
    """
    sids, epochs, firsts, after, ended = columns(plan.moved())
    parameters = (
        *(Ints(sids), Ints(epochs), Ints(firsts), Ints(after), Flags(ended), stamp.now_ms),
        *(Ints(column) for column in columns(plan.rows)[:2]),
        *(Blobs(column) for column in columns(plan.rows)[2:]),
        *(stamp.lease, stamp.number, sql.CHANNEL, notice(stamp.lease, plan.touched)),
    )
    statement = sql.COMMIT
    if plan.usage:
        statement, parameters = sql.COMMIT_WITH_USAGE, (*parameters, *_usage(plan.usage))
    try:
        await connection.execute(statement, parameters, prepare=True)
    except errors.DivisionByZero:
        return False
    return True
