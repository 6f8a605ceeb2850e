"""The object store of a ledger file: values and alarms in the ledger's group commits.

A ledger file has one owner, so a claim need not be written to fence other processes. The new epoch
is stored with the object's next write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.ledger.errors import CallerError, NotFound, TailraceError
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import (
    ALL_VALUES,
    Alarm,
    ObjectKey,
    ObjectState,
    ObjectWrite,
    StreamKind,
    ValueRange,
    stale_object,
)
from tailrace.ledger.sqlite.capacity import ROW_BYTES
from tailrace.ledger.sqlite.group import GroupCommit
from tailrace.ledger.sqlite.open_streams import Residents
from tailrace.ledger.sqlite.retention import Retention
from tailrace.ledger.sqlite.storage import ObjectRow, Storage, ValueChange
from tailrace.ledger.sqlite.tail import Tail

MAX_OWNED = 65_536
"""Maximum claimed objects in memory; the owner of an evicted one must claim the object again."""


@dataclass(slots=True)
class Owned:
    """A claimed object; `stored` is True once the file has a row for the object."""

    oid: int
    epoch: int
    alarm: Alarm | None
    stored: bool


class SqliteObjects:
    """The object store of a ledger file, which uses the ledger's storage and its group commit."""

    def __init__(
        self,
        residents: Residents,
        storage: Storage,
        commits: GroupCommit,
        retention: Retention,
    ) -> None:
        self._residents = residents
        self._storage = storage
        self._commits = commits
        self._retention = retention
        self._owned: dict[ObjectKey, Owned] = {}
        self._oid = 0
        self._epoch = 0  # the highest epoch given so far, so that each owner gets a new one

    def begin_after(self, last_oid: int) -> None:
        """Give new objects local ids above `last_oid`."""
        self._oid = last_oid

    # ---- owners ----

    async def claim(self, key: ObjectKey) -> ObjectState:
        owned = self._owned.get(key)
        if owned is None:
            row = await self._storage.object_row(key)
            # Another claim may have added the object during the read of its row.
            owned = self._owned.get(key) or self._adopt(key, row)
        epoch = owned.epoch = self._epoch = max(self._epoch, owned.epoch) + 1
        if not self._commits.settled:
            # Wait until the former owner's writes are stored, so that the new owner reads them.
            await self._commits.commit()
        return ObjectState(epoch, owned.alarm)

    async def seize(self, key: ObjectKey) -> None:
        """Do nothing, because a file has only one owner."""

    def _adopt(self, key: ObjectKey, row: ObjectRow | None) -> Owned:
        if row is None:
            self._oid += 1
            owned = Owned(self._oid, 0, None, stored=False)
        else:
            owned = Owned(row.oid, row.epoch, _alarm(row), stored=True)
        self._owned[key] = owned
        if len(self._owned) > MAX_OWNED:
            del self._owned[next(iter(self._owned))]
        return owned

    async def owns(self, key: ObjectKey, epoch: int) -> bool:
        owned = self._owned.get(key)
        return owned is not None and owned.epoch == epoch

    # ---- reading ----

    async def get(self, key: ObjectKey, names: Sequence[str]) -> dict[str, bytes]:
        oid = await self._oid_of(key)
        return {} if oid is None else dict(await self._storage.values(oid, names))

    async def list(self, key: ObjectKey, wanted: ValueRange = ALL_VALUES) -> dict[str, bytes]:
        oid = await self._oid_of(key)
        return {} if oid is None else dict(await self._storage.value_range(oid, wanted))

    async def due(self, now_ms: int, limit: int) -> Sequence[tuple[ObjectKey, Alarm]]:
        rows = await self._storage.alarms(now_ms, limit)
        return [
            (ObjectKey(row.kind, row.name), alarm)
            for row in rows
            if (alarm := _alarm(row)) is not None
        ]

    async def names(self, kind: str, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        return await self._storage.object_names(kind, after, limit)

    async def _oid_of(self, key: ObjectKey) -> int | None:
        owned = self._owned.get(key)
        if owned is not None:
            return owned.oid
        row = await self._storage.object_row(key)
        return None if row is None else row.oid

    # ---- writing ----

    async def write(self, write: ObjectWrite) -> None:
        await self._commits.room()
        await self._require_room(write, self._owner(write))
        tails = await self._tails_of(write)
        owned = self._owner(write)  # checked again: the owner may have changed during the awaits
        # No await from here on, so that the whole write is in one commit.
        self._owned[write.key] = self._owned.pop(write.key)  # to the end, to be evicted last
        self._put_streams(write, tails)
        self._put_values(write, owned)
        self._retention.objects_grew(_size(write))
        if write.durability is Durability.RELAXED:
            self._commits.schedule()
            return
        if write.durability is Durability.POWER:
            self._commits.forming.commit.power = True
        await self._commits.commit()

    async def _require_room(self, write: ObjectWrite, owned: Owned) -> None:
        """Check that there is space if a write adds values.

        A write that also removes values is allowed, so that an object can always be deleted. A
        write that only overwrites values, with no longer ones, is allowed, too. Creates and appends
        of streams are checked elsewhere.

        Raises:
            LedgerFull: Objects have used their share of the ledger.
        """
        kind, room = StreamKind.OBJECT, self._retention
        if room.has_room(kind):
            return
        await room.find_room(kind)
        if not room.is_spent(kind) or write.clear or write.deletes or write.drops:
            return
        before = dict(await self._storage.values(owned.oid, list(write.puts)))
        if any(len(value) > len(before.get(name, b"")) for name, value in write.puts.items()):
            room.require_room(kind)

    def _owner(self, write: ObjectWrite) -> Owned:
        owned = self._owned.get(write.key)
        if owned is None or owned.epoch != write.epoch:
            raise stale_object(write.key, write.epoch)
        return owned

    async def _tails_of(self, write: ObjectWrite) -> dict[bytes, Tail]:
        created = {new.stream for new in write.creates}
        if any(new.kind is not StreamKind.OBJECT or new.idempotency_key for new in write.creates):
            raise CallerError(
                "a stream of an object must have the kind StreamKind.OBJECT and no idempotency key",
                field="creates",
            )
        wanted = {append.stream for append in write.appends} - created
        appended = {stream: await self._residents.get(stream) for stream in wanted}
        for stream in write.drops:
            try:
                appended[stream] = await self._residents.get(stream)
            except NotFound:
                continue  # the stream is removed already
        for stream in created:
            self._retention.require_room(StreamKind.OBJECT)
            await self._residents.refuse_taken(stream)
        return appended

    def _put_streams(self, write: ObjectWrite, tails: dict[bytes, Tail]) -> None:
        group = self._commits.forming
        before = {stream: tail.accepted for stream, tail in tails.items()}
        made = {new.stream: self._residents.add(new, group.commit) for new in write.creates}
        tails = tails | made
        try:
            for append in write.appends:
                tails[append.stream].accept(append.epoch, append.index, *append.record)
        except TailraceError:
            for stream, index in before.items():
                tails[stream].withdraw(index)
            for tail in made.values():
                self._residents.drop(tail, group.commit)
            raise
        group.commit.power |= any(new.durability is Durability.POWER for new in write.creates)
        for append in write.appends:
            tail, (frame, ids, extra) = tails[append.stream], append.record
            group.add((tail,), (append.index,), (frame,), (ids,), (extra,))
            group.size += len(frame)
            group.commit.power |= tail.durability is Durability.POWER
        for stream in write.drops:
            if stream in tails:
                self._residents.drop(tails[stream], group.commit)

    def _put_values(self, write: ObjectWrite, owned: Owned) -> None:
        group = self._commits.forming
        values, oid = group.commit.values, owned.oid
        if write.clear:
            values.append(ValueChange(oid, None, None))
        values += [ValueChange(oid, name, None) for name in write.deletes]
        for name, value in write.puts.items():
            values.append(ValueChange(oid, name, value))
            group.size += len(value)
        if write.sets_alarm:
            owned.alarm = write.alarm
        if write.sets_alarm or not owned.stored:
            owned.stored = True
            at_ms, retries = owned.alarm or (None, 0)
            row = ObjectRow(oid, write.key.kind, write.key.name, owned.epoch, at_ms, retries)
            group.commit.objects.append(row)


def _size(write: ObjectWrite) -> int:
    """Return the approximate bytes that a write stores."""
    values = sum(len(name) + len(value) + ROW_BYTES for name, value in write.puts.items())
    frames = sum(len(append.record.frame) for append in write.appends)
    return values + frames + len(write.creates) * ROW_BYTES


def _alarm(row: ObjectRow) -> Alarm | None:
    return None if row.alarm_ms is None else Alarm(row.alarm_ms, row.alarm_retries)
