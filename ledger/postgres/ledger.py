"""The ledger on PostgreSQL 15 or newer, for several origins: `tailrace.ledger.interface.Ledger`.

Acknowledged data is committed with synchronous_commit=on, so it is also on a synchronous standby if
there is one. This holds for every stream. Weaker durability does not release frames earlier,
because only the commit knows if another origin has fenced the producer.

One transaction stores a group of appends. It checks epoch and next index of each stream under
a row lock, so two origins can never write the same index, whatever they remember.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from psycopg import AsyncConnection

from tailrace.ledger.branch import BranchPoint, Part, check_point, inherited, part_at
from tailrace.ledger.errors import CallerError, HeldElsewhere, NotFound, unknown_stream
from tailrace.ledger.interface import (
    ALL_VALUES,
    Alarm,
    Append,
    Appends,
    LedgerSize,
    NewStream,
    ObjectKey,
    ObjectState,
    ObjectWrite,
    Record,
    Refusal,
    StreamInfo,
    StreamKind,
    ValueRange,
    reused_key,
    taken_id,
)
from tailrace.ledger.postgres import statements as sql
from tailrace.ledger.postgres.commit import Writer, key_bytes, notice, ttl_ms
from tailrace.ledger.postgres.lease import Lease, Reached
from tailrace.ledger.postgres.listener import Listener
from tailrace.ledger.postgres.plan import GroupPlan, Item
from tailrace.ledger.postgres.presence import PostgresPresence
from tailrace.ledger.postgres.retention import Retention, add_partitions, partition_at, purge
from tailrace.ledger.postgres.rows import Blobs, Ints, stored_record, stored_sums
from tailrace.ledger.postgres.schema import prepare
from tailrace.ledger.postgres.server import LastingConnection, Pool, Server
from tailrace.ledger.postgres.tail import PostgresTail, Residents, StreamHead
from tailrace.ledger.usage import DEFAULT_USAGE_RETENTION_S, UsageQuery, UsageSums, sql_of


class PostgresLedger:
    """One origin's view of a shared ledger, for one event loop; create it with `open`."""

    objects: PostgresObjects
    presence: PostgresPresence

    def __init__(
        self,
        server: Server,
        now_ms: Callable[[], int],
        owner: str,
        lease_s: float,
        reached: Reached | None,
        usage_s: float,
    ) -> None:
        self._server = server
        self._now_ms = now_ms
        self._pool = Pool(server)
        self._writing, self._leasing = LastingConnection(server), LastingConnection(server)
        self._lease = Lease(self._leasing, owner, lease_s, reached)
        self._residents = Residents(self._pool)
        self._partition = 0  # number of the newest partition that is known to exist
        self._retention = Retention(self._pool, self._residents, now_ms, usage_s)
        self.silent_s, self.expire = server.silent_s, self._retention.expire
        self._writer: Writer
        self._listener: Listener

    @classmethod
    async def open(
        cls,
        dsn: str,
        now_ms: Callable[[], int],
        *,
        owner: str,
        lease_s: float = 3.0,
        reached: Reached | None = None,
        usage_s: float = DEFAULT_USAGE_RETENTION_S,
    ) -> PostgresLedger:
        """Open the ledger in a database, and create its tables if they are missing.

        Args:
            dsn: URL or options for libpq. Of several hosts, the one that accepts writes is used.
            now_ms: Returns Unix time in ms, for creation times and retention.
            owner: A name that is unique to this process.
            lease_s: Lease time of this process in seconds.
            reached: Host and port at which other origins reach this one.
            usage_s: Seconds for which the usage of a stream is kept after its end.

        Raises:
            ConfigError: A setting is wrong.
            LedgerFailed: The server is away.
        """
        server = Server(dsn, f"tailrace {owner}")
        ledger = cls(server, now_ms, owner, lease_s, reached, usage_s)
        try:
            await server.reach()
            await ledger._pool.run(prepare)
            await ledger._begin()
        except BaseException:
            await ledger._disconnect()
            raise
        return ledger

    @property
    def name(self) -> str:
        return f"postgresql:{sha256(self._server.name.encode()).hexdigest()[:16]}"

    async def _begin(self) -> None:
        await self._lease.begin()
        lease = self._lease.number
        self._writer = Writer(self._writing, lease, self._residents, self._now_ms, self._stored)
        self.objects = PostgresObjects(self._pool, self._writer, lease, self._now_ms)
        self.presence = PostgresPresence(self._pool, lease)
        self._listener = Listener(
            self._server, self._pool, self._residents, self.presence, lease, self._writer.fail
        )
        self._lease.keep(self._residents.sweep, self._writer.fail)

    async def close(self) -> None:
        """Store pending work and end the lease, so that other origins need not wait for its end."""
        await self._writer.close()
        await self._listener.close()
        await self._lease.close()
        await self._disconnect()

    async def _disconnect(self) -> None:
        for part in (self._pool, self._writing, self._leasing):
            await part.close()

    # ---- streams ----

    async def create(self, new: NewStream, *others: NewStream) -> tuple[StreamInfo, bool]:
        self._writer.check()
        first, *rest = [await self._row_of(each) for each in (new, *others)]
        tries = 0

        async def work(connection: AsyncConnection) -> bool:
            nonlocal tries
            tries += 1
            if not rest and new.base is None:
                return await _insert(connection, first) is not None
            async with connection.transaction():
                for each, row in zip((new, *others), (first, *rest), strict=True):
                    sid = await _insert(connection, row)
                    if sid is None and each is new:
                        return False
                    if sid is None:
                        raise taken_id()
                    if each.base is not None:
                        await _inherit(connection, sid, each.base)
            return True

        if await self._pool.run(work):
            return await self.info(new.stream), True
        rows = await self._pool.rows(sql.MADE_BY, new.stream)
        if tries > 1 and rows == [(self._lease.number,)]:
            # An earlier try of this process has created the stream, but its answer was lost.
            return await self.info(new.stream), True
        existing = await self._with_key(key_bytes(new), new.request_hash)
        if existing is None:
            raise taken_id()
        return await self.info(existing), False

    async def _row_of(self, new: NewStream) -> tuple[object, ...]:
        """Return the parameters of `sql.CREATE` for a new stream."""
        return (
            await self._partition_of(new),
            new.stream,
            int(new.kind),
            int(new.durability),
            new.recipe.encode(),
            self._now_ms(),
            key_bytes(new),
            new.request_hash,
            self._lease.number,
            ttl_ms(new),
            0 if new.base is None else new.base.end,
            new.identity or None,
        )

    async def made_by(self, idempotency_key: str, request_hash: bytes) -> StreamInfo | None:
        stream = await self._with_key(idempotency_key.encode(), request_hash)
        return None if stream is None else await self.info(stream)

    async def known(self, identity: bytes) -> StreamInfo | None:
        for (stream,) in await self._pool.rows(sql.KNOWN, identity):
            with suppress(NotFound):  # the stream may have been removed since the query
                return await self.info(bytes(stream))
        return None

    async def _partition_of(self, new: NewStream) -> int:
        if new.kind is StreamKind.OBJECT:
            return 0
        number = partition_at(self._now_ms())
        if number > self._partition:
            # Create one partition ahead, so that the first stream of an hour need not wait.
            await self._pool.run(lambda one: add_partitions(one, (number, number + 1)))
            self._partition = number
        return number

    async def _with_key(self, key: bytes | None, request_hash: bytes) -> bytes | None:
        rows = await self._pool.rows(sql.SAME_KEY, key)
        if not rows:
            return None
        [(stream, its_hash)] = rows
        if bytes(its_hash) != request_hash:
            raise reused_key()
        return bytes(stream)

    async def info(self, stream: bytes) -> StreamInfo:
        return (await self._residents.look_up(stream)).snapshot()

    async def take_over(self, stream: bytes) -> int:
        self._writer.check()
        rows = await self._pool.rows(sql.TAKE_OVER, stream, self._lease.number)
        if not rows:
            raise unknown_stream(stream)
        head = StreamHead(*rows[0])
        tail = self._residents.get(stream)
        if tail is not None:
            tail.advance(head, head.next_index, ())
        return head.epoch

    async def unfinished(self) -> list[bytes]:
        rows = await self._pool.rows(sql.UNFINISHED, await self._lease.judged_at())
        return [bytes(stream) for (stream,) in rows]

    async def delete(self, stream: bytes) -> None:
        self._writer.check()
        tail = await self._residents.look_up(stream)
        sid = tail.head.sid

        async def work(connection: AsyncConnection) -> None:
            async with connection.transaction():
                await connection.execute(sql.DROP_STREAMS, (Ints((sid,)),))
                await connection.execute(
                    sql.NOTIFY, (sql.CHANNEL, notice(self._lease.number, [sid]))
                )
            await purge(connection, sid)

        await self._pool.run(work)
        self._residents.lose(tail)

    # ---- writing ----

    async def append(self, batch: Sequence[Append] | Appends) -> list[Refusal]:
        await self._writer.room()
        group = self._writer.forming
        appends = [batch[at] for at in range(len(batch))]
        items = [Item(append) for append in appends]
        for item, append in zip(items, appends, strict=True):
            group.add(item, len(append.record.frame))
        if items:
            await self._writer.commit()
        return [
            Refusal(append, item.error)
            for item, append in zip(items, appends, strict=True)
            if item.error is not None
        ]

    def _stored(self, plan: GroupPlan) -> None:
        """Release the frames of a durable commit to readers."""
        for sid, (head, first, frames) in plan.moves.items():
            tail = self._residents.by_sid(sid)
            if tail is None:
                continue
            tail.unused = 0
            if head.ended:
                tail.expires_ms = self._now_ms() + tail.ttl_ms
            tail.advance(head, first, frames)
        for sid in plan.dropped:
            dropped = self._residents.by_sid(sid)
            if dropped is not None:
                self._residents.lose(dropped)

    # ---- reading ----

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        tail = await self._used(stream)
        sid, limit = part_at(tail.parts, tail.head.sid, start, limit)
        rows = await self._pool.rows(sql.RECORDS, sid, start, limit)
        records = [stored_record(*row) for row in rows]
        await self._residents.note_read(tail, start, [record.frame for record in records])
        return records

    async def frames(self, stream: bytes, start: int, limit: int) -> list[bytes]:
        tail = await self._used(stream)
        frames = tail.take(start, limit)
        if not frames:
            sid, limit = part_at(tail.parts, tail.head.sid, start, limit)
            rows = await self._pool.rows(sql.FRAMES, sid, start, limit)
            frames = [bytes(frame) for (frame,) in rows]
            await self._residents.note_read(tail, start, frames)
        return frames

    def tail(self, stream: bytes) -> PostgresTail:
        tail = self._residents.get(stream)
        if tail is None:
            raise unknown_stream(stream)
        return tail

    def watch(self, stream: bytes, wake: Callable[[], None]) -> None:
        tail = self.tail(stream)
        tail.watchers[wake] = None
        # Read the stream again: another origin may have appended to it after `info` was read, and
        # notifications about a stream are ignored until it has a watcher.
        self._listener.look_at([tail.head.sid])

    def unwatch(self, stream: bytes, wake: Callable[[], None]) -> None:
        tail = self._residents.get(stream)
        if tail is not None and wake in tail.watchers:
            del tail.watchers[wake]

    # ---- usage ----

    async def usage(self, query: UsageQuery) -> UsageSums:
        text, parameters = sql_of(query, "$")
        values = (one.encode() if isinstance(one, str) else one for one in parameters)
        return stored_sums(query, await self._pool.rows(text, *values))

    async def deliver(self, tokens: Mapping[bytes, int]) -> None:
        if tokens:
            self._writer.check()
            await self._pool.rows(sql.SET_DELIVERED, Blobs(tokens), Ints(tokens.values()))

    # ---- retention ----

    async def size(self) -> LedgerSize:
        [(size,)] = await self._pool.rows(sql.TABLE_BYTES)
        return LedgerSize(int(size or 0))

    def shortage(self) -> str | None:
        """Return None, because the free disk space of a database server is not known here."""
        return None

    async def _used(self, stream: bytes) -> PostgresTail:
        """Return the tail of a stream, and restart the stream's retention."""
        tail = self._residents.get(stream) or await self._residents.look_up(stream)
        tail.unused = 0
        await self._retention.touch(tail)
        return tail


class PostgresObjects:
    """The object store of the ledger; writes of objects are part of the ledger's group commits.

    Epochs of objects come from one sequence, so that an object that was deleted and created again
    never gets an old epoch. `lease` is this process's lease.
    """

    def __init__(self, pool: Pool, writer: Writer, lease: int, now_ms: Callable[[], int]) -> None:
        self._pool = pool
        self._writer = writer
        self._lease = lease
        self._now_ms = now_ms

    # ---- owners ----

    async def claim(self, key: ObjectKey) -> ObjectState:
        self._writer.check()
        while not (
            rows := await self._pool.rows(sql.CLAIM, *_address(key), self._lease, self._now_ms())
        ):
            for name, link in await self._pool.rows(sql.HOLDER, *_address(key)):
                held = HeldElsewhere(
                    f"{key.kind} {key.name!r} is held by origin {bytes(name).decode()}",
                    hint="ask that origin, or retry when its lease has expired",
                )
                held.address = None if link is None else bytes(link).decode()
                raise held
        [(epoch, alarm_ms, retries)] = rows
        return ObjectState(epoch, None if alarm_ms is None else Alarm(alarm_ms, retries))

    async def seize(self, key: ObjectKey) -> None:
        self._writer.check()
        await self._pool.rows(sql.SEIZE, *_address(key), self._lease)

    async def owns(self, key: ObjectKey, epoch: int) -> bool:
        return await self._pool.rows(sql.OBJECT_EPOCH, *_address(key), self._lease) == [(epoch,)]

    # ---- reading ----

    async def get(self, key: ObjectKey, names: Sequence[str]) -> dict[str, bytes]:
        wanted = Blobs(name.encode() for name in names)
        return _values(await self._pool.rows(sql.GET_VALUES, *_address(key), wanted))

    async def list(self, key: ObjectKey, wanted: ValueRange = ALL_VALUES) -> dict[str, bytes]:
        first, beyond = wanted.first.encode(), wanted.beyond
        last = None if beyond is None else beyond.encode()
        statement = sql.LIST_VALUES.format(order="DESC" if wanted.reverse else "ASC")
        return _values(await self._pool.rows(statement, *_address(key), first, last, wanted.limit))

    async def due(self, now_ms: int, limit: int) -> Sequence[tuple[ObjectKey, Alarm]]:
        rows = await self._pool.rows(sql.DUE, now_ms, self._lease, limit)
        return [
            (ObjectKey(bytes(kind).decode(), bytes(name).decode()), Alarm(alarm_ms, retries))
            for kind, name, alarm_ms, retries in rows
        ]

    async def names(self, kind: str, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        rows = await self._pool.rows(sql.OBJECT_NAMES, kind.encode(), after.encode(), limit)
        return [bytes(name).decode() for (name,) in rows]

    # ---- writing ----

    async def write(self, write: ObjectWrite) -> None:
        if any(new.kind is not StreamKind.OBJECT for new in write.creates):
            raise CallerError(
                "a stream of an object must have the kind StreamKind.OBJECT", field="creates"
            )
        await self._writer.room()
        item = Item(write)
        self._writer.forming.add(item, _size(write))
        await self._writer.commit()
        if item.error is not None:
            raise item.error


async def _insert(connection: AsyncConnection, row: tuple[object, ...]) -> int | None:
    """Insert a new stream; return its sid, or None if its id or its idempotency key is taken."""
    made = await (await connection.execute(sql.CREATE, row, prepare=True)).fetchone()
    return None if made is None else int(made[0])


async def _inherit(connection: AsyncConnection, sid: int, base: BranchPoint) -> None:
    """Make the new stream `sid` a branch that begins at `base`.

    Raises:
        NotFound: The stream to branch is unknown.
        BeyondEnd: The stream to branch has fewer records.
        Conflict: The branch would have too many parts.
    """
    found = await (await connection.execute(sql.BRANCHED, (base.stream,))).fetchone()
    if found is None:
        raise unknown_stream(base.stream)
    source, next_index, ended, sources, ends = found
    check_point(base.end, next_index, ended=ended)
    parts = inherited(list(map(Part, sources, ends)), source, base.end)
    columns = Ints(part.sid for part in parts), Ints(part.end for part in parts)
    await connection.execute(sql.INSERT_PARTS, (sid, *columns))


def _address(key: ObjectKey) -> tuple[bytes, bytes]:
    return key.kind.encode(), key.name.encode()


def _values(rows: Sequence[tuple[Any, ...]]) -> dict[str, bytes]:
    return {bytes(name).decode(): bytes(value) for name, value in rows}


def _size(write: ObjectWrite) -> int:
    frames = sum(len(append.record.frame) for append in write.appends)
    return frames + sum(map(len, write.puts.values()))
