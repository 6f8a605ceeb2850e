"""The ledger in one SQLite file: WAL, one writer, group commit.

Each commit is one row in `log`. The newest frames of a stream, its tail, are in the log and in
memory. A tail that is large, old or ended becomes a segment, in the transaction of some commit. Log
rows that no tail needs any more are deleted. A replay reads segments, then the tail. Recovery
rebuilds the tails from the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from socket import gethostname
from typing import Any

import structlog

from tailrace.ledger.branch import BranchPoint, Part, check_point, inherited
from tailrace.ledger.errors import (
    Damaged,
    LedgerAway,
    LedgerFailed,
    LedgerFull,
    NotFound,
    TailraceError,
    unknown_stream,
)
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import (
    Append,
    Appends,
    LedgerSize,
    NewStream,
    Record,
    Refusal,
    SharedPresence,
    StreamInfo,
    StreamKind,
    reused_key,
    taken_id,
)
from tailrace.ledger.sqlite.commit_log import Log, Recovery
from tailrace.ledger.sqlite.compaction import Compactor
from tailrace.ledger.sqlite.disk.disk_sync import SyncOf, sync_of
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.group import Group, GroupCommit
from tailrace.ledger.sqlite.objects import SqliteObjects
from tailrace.ledger.sqlite.open_streams import Residents
from tailrace.ledger.sqlite.replay import Replay
from tailrace.ledger.sqlite.retention import Retention, RetentionSettings
from tailrace.ledger.sqlite.storage import Commit, Storage, StreamRow
from tailrace.ledger.sqlite.tail import Tail
from tailrace.ledger.usage import UsageQuery, UsageSums

_POWER = Durability.POWER  # reading a global is faster than reading a member of an enum
_PROCESS = Durability.PROCESS

log = structlog.get_logger("ledger")


class SqliteLedger:
    """A ledger over a `Storage`, for one event loop and one owner; create it with `open`."""

    def __init__(
        self,
        storage: Storage,
        now_ms: Callable[[], int],
        retention: RetentionSettings = RetentionSettings(),
    ) -> None:
        self.name = "file:"
        self.presence: SharedPresence | None = None
        self._storage = storage
        self._creating = asyncio.Lock()
        # Streams whose creation is not stored yet, by their idempotency key.
        self._keys: dict[str, NewStream] = {}
        self._residents = Residents(storage, retention.max_stream_bytes, now_ms)
        self._log = Log(self._residents, now_ms)
        self._commits = GroupCommit(storage, self._log.prepare, self._tidy, self._release)
        self.silent_s = self._commits.silent_s
        self._retention = Retention(self._residents, storage, self._commits, retention, now_ms)
        self.objects = SqliteObjects(self._residents, storage, self._commits, self._retention)
        self._replay = Replay(storage)
        self._packer = Compactor(self._residents, storage, self._commits, retention, now_ms)
        self._sweeping = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        path: Path,
        now_ms: Callable[[], int],
        *,
        vfs: str | None = None,
        wal_sync: SyncOf = sync_of,
        retention: RetentionSettings = RetentionSettings(),
    ) -> SqliteLedger:
        """Open the ledger file at `path` and recover it.

        `now_ms` returns Unix time in ms. If that time jumps ahead, streams expire early, so a
        system clock should be smoothed as in `origin.steady_clock`. `vfs` and `wal_sync` are those
        of `SqliteFile.open`.
        """
        file = await SqliteFile.open(path, vfs, wal_sync)
        ledger = await cls.recover(file, now_ms, retention=retention)
        place = f"{gethostname()}:{path.resolve()}"
        ledger.name = f"file:{sha256(place.encode()).hexdigest()[:16]}"
        return ledger

    @classmethod
    async def recover(
        cls,
        storage: Storage,
        now_ms: Callable[[], int],
        *,
        retention: RetentionSettings = RetentionSettings(),
    ) -> SqliteLedger:
        """Create a ledger from the content of `storage`."""
        ledger = cls(storage, now_ms, retention)
        try:
            await ledger._recover()
        except (Exception, asyncio.CancelledError):
            await ledger.close()
            raise
        return ledger

    async def close(self) -> None:
        """Store due tails as segments, so that the next start is quicker; then close the file."""
        self._log.closes = True
        with suppress(LedgerFailed):  # the waiters of the failed write have got the error already
            while self._residents.due_tails:
                await self._commits.commit()
            await self._commits.commit()
        await self._storage.close()

    # ---- streams ----

    async def create(self, new: NewStream, *others: NewStream) -> tuple[StreamInfo, bool]:
        await self._commits.room()
        await self._retention.find_room(new.kind)
        async with self._creating:
            existing = await self._with_key(new.idempotency_key, new.request_hash)
            if existing is None:
                self._retention.require_room(new.kind)
                if len({each.stream for each in (new, *others)}) <= len(others):
                    raise taken_id()
                for each in (new, *others):
                    await self._residents.refuse_taken(each.stream)
                bases = {each.base for each in (new, *others)} - {None}
                parts = {base: await self._parts(base) for base in bases if base is not None}
                for base in parts:  # a stream may have been deleted while another was looked up
                    self.tail(base.stream)
                # No await from here on, so that all streams are in the same commit.
                commit = self._commits.forming.commit
                for each in (new, *others):
                    inherits = () if each.base is None else parts[each.base]
                    self._residents.add(each, commit, inherits)
                    commit.power |= each.durability is Durability.POWER
                if new.idempotency_key is not None:
                    self._keys[new.idempotency_key] = new
        # Wait even if the stream existed, because it may not be durable yet.
        await self._commits.commit()
        return await self.info(existing or new.stream), existing is None

    async def _parts(self, base: BranchPoint) -> tuple[Part, ...]:
        """Wait until all records that a branch inherits are in segments; return the branch's parts.

        Raises:
            NotFound: The stream to branch is unknown.
            BeyondEnd: The stream to branch has fewer records.
            Conflict: The branch would have too many parts.
        """
        tail = await self._residents.get(base.stream)
        check_point(base.end, tail.released, ended=tail.ended)
        while tail.stored < base.end and not tail.gone:
            self._residents.due_tails[tail.sid] = tail
            await self._commits.commit()
        return inherited(tail.parts, tail.sid, base.end)

    async def made_by(self, idempotency_key: str, request_hash: bytes) -> StreamInfo | None:
        stream = await self._with_key(idempotency_key, request_hash)
        if stream is None:
            return None
        await self._commits.commit()  # the stream may not be durable yet
        return await self.info(stream)

    async def known(self, identity: bytes) -> StreamInfo | None:
        stream = await self._storage.answer(identity)
        if stream is None:
            return None
        try:
            return await self.info(stream)
        except NotFound:
            return None  # the stream is being removed

    async def _with_key(self, idempotency_key: str | None, request_hash: bytes) -> bytes | None:
        """Return the id of the stream that was created with the key, or None."""
        first: NewStream | StreamRow | None = self._keys.get(idempotency_key or "")
        if first is None and idempotency_key is not None:
            first = await self._storage.stream_by_key(idempotency_key)
        if first is None:
            return None
        if first.request_hash != request_hash:
            raise reused_key()
        return first.stream if isinstance(first, NewStream) else first.id

    async def info(self, stream: bytes) -> StreamInfo:
        return (await self._residents.get(stream)).snapshot()

    async def unfinished(self) -> list[bytes]:
        rows = await self._storage.unfinished(StreamKind.GENERATION)
        tails = self._residents.by_sid
        return [id_ for sid, id_ in rows if sid not in tails or not tails[sid].end_accepted]

    async def take_over(self, stream: bytes) -> int:
        tail = await self._residents.get(stream)
        self._commits.check()
        # Raise the epoch in memory first, so that appends of the old producer are refused at once.
        tail.epoch += 1
        tail.in_commit += 1
        epoch = tail.epoch
        forming = self._commits.forming
        forming.taken_over.append(tail)
        forming.commit.epochs.append((epoch, tail.sid))
        forming.commit.power = True
        await self._commits.commit()
        return epoch

    async def delete(self, stream: bytes) -> None:
        tail = await self._residents.get(stream)
        self._residents.drop(tail, self._commits.forming.commit)
        if tail.durability is _POWER:
            self._commits.forming.commit.power = True  # a power cut must not undo the removal
        await self._commits.commit()

    # ---- writing ----

    async def append(self, batch: Sequence[Append] | Appends) -> list[Refusal]:
        refused: list[Refusal] = []
        step = Appends.of(batch)
        if self._retention.holds:
            await self._retention.until_disk_has_room()
        tails = list(map(self._residents.tails.get, step.streams))
        absent: dict[bytes, TailraceError] = {}
        if not all(tails) or not self._commits.ready:
            absent = await self._make_ready(step.streams)
            tails = list(map(self._residents.tails.get, step.streams))
        if self._accept(step, tails, absent, refused):
            await self._commits.commit()
        else:
            self._commits.schedule()
        if refused and any(isinstance(refusal.error, LedgerFull) for refusal in refused):
            return await self._append_again(refused, absent)
        return refused

    async def _append_again(
        self, refused: list[Refusal], absent: dict[bytes, TailraceError]
    ) -> list[Refusal]:
        """Retry refused appends, after an attempt to make space; return those refused again."""
        try:
            await self._retention.find_room(StreamKind.GENERATION)
        except (Damaged, LedgerAway) as error:
            # The producer may try again. Raised here, the error would end the streams of others.
            log.warning("ledger.room_not_found", error=str(error))
            return refused
        step, still = Appends.of([refusal.append for refusal in refused]), list[Refusal]()
        tails = list(map(self._residents.tails.get, step.streams))
        if self._accept(step, tails, absent, still):
            await self._commits.commit()
        return still

    def _accept(
        self,
        step: Appends,
        tails: Sequence[Tail | None],
        absent: dict[bytes, TailraceError],
        refused: list[Refusal],
    ) -> bool:
        """Add appends to the forming group; return True if the producer must wait for the commit.

        `absent` has the error of each stream without a tail. This code runs for every token, so it
        calls few functions, which saves a tenth of an append's time.
        """
        group = self._commits.forming
        power, size, at, relaxed = False, 0, -1, 0
        missed: set[int] = set()
        records = step.frames, step.ids, step.extras
        rows = zip(tails, step.epochs, step.indexes, *records, strict=True)
        for tail, epoch, index, frame, ids, extra in rows:
            at += 1
            try:
                if tail is None:
                    stream = step.streams[at]
                    raise absent.get(stream) or unknown_stream(stream)
                size += tail.accept(epoch, index, frame, ids, extra)
            except TailraceError as error:
                refused.append(Refusal(step[at], error))
                missed.add(at)
                continue
            if tail.durability is not _PROCESS:
                if tail.durability is _POWER:
                    power = True
                else:  # durability RELAXED: readers may see the frame at once
                    relaxed += 1
                    tail.released = tail.accepted
                    tail.wake()
        columns: tuple[Sequence[Any], ...] = (tails, step.indexes, *records)
        if missed:
            columns = tuple([x for n, x in enumerate(c) if n not in missed] for c in columns)
        group.add(*columns)
        group.size += size
        if power:
            group.commit.power = True
        return at + 1 > len(missed) + relaxed

    async def _make_ready(self, streams: Sequence[bytes]) -> dict[bytes, TailraceError]:
        """Wait until the forming group has room, and load the streams that are not in memory.

        Return the error for each stream that cannot be loaded: it is unknown, its row is
        damaged, or the file cannot be read now. Appends to other streams are not affected.
        """
        absent: dict[bytes, TailraceError] = {}
        while True:
            await self._commits.room()
            known = self._residents.tails.keys() | absent.keys()
            away = [stream for stream in streams if stream not in known]
            if not away:
                return absent
            for stream in away:
                try:
                    await self._residents.get(stream)
                except (NotFound, Damaged, LedgerAway) as error:
                    absent[stream] = error

    def _tidy(self, group: Group, commit: Commit) -> None:
        self._log.tidy(group, commit)
        self._retention.committing()

    def _release(self, group: Group) -> bool:
        """Release a stored group to its readers; return True if some tails are still due."""
        self._log.release(group)
        self._residents.removing.difference_update(group.commit.removed)
        for row in group.commit.streams:
            self._keys.pop(row.idempotency_key or "", None)
        return bool(self._residents.due_tails)

    # ---- reading ----

    def tail(self, stream: bytes) -> Tail:
        tail = self._residents.tails.get(stream)
        if tail is None:
            raise unknown_stream(stream)
        return tail

    async def frames(self, stream: bytes, start: int, limit: int) -> list[bytes]:
        tail = await self._residents.get(stream)
        self._residents.touch(tail)
        return await self._replay.frames(tail, start, limit)

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        tail = await self._residents.get(stream)
        self._residents.touch(tail)
        return await self._replay.records(tail, start, limit)

    def watch(self, stream: bytes, wake: Callable[[], None]) -> None:
        self.tail(stream).watchers[wake] = None

    def unwatch(self, stream: bytes, wake: Callable[[], None]) -> None:
        tail = self._residents.tails.get(stream)
        if tail is not None and wake in tail.watchers:
            del tail.watchers[wake]
            if tail.ended and tail.idle:
                self._residents.forget(tail)

    # ---- usage ----

    async def usage(self, query: UsageQuery) -> UsageSums:
        # Usage is stored with the last segment of an ended stream, so first store all segments that
        # are due.
        self._log.stores_all = True
        await self._commits.commit()
        return await self._storage.usage(query)

    async def deliver(self, tokens: Mapping[bytes, int]) -> None:
        commit = self._commits.forming.commit
        for stream, count in tokens.items():
            tail = self._residents.tails.get(stream)
            if tail is not None:  # the usage of the stream may not be stored yet
                tail.delivered_tokens = max(tail.delivered_tokens, count)
            commit.delivered.append((count, stream))
        await self._commits.commit()

    # ---- retention ----

    async def size(self) -> LedgerSize:
        sizes = self._storage.maintenance.sizes()
        return LedgerSize(
            sizes.used_bytes, sizes.free_bytes, sizes.wal_bytes, sizes.disk_free_bytes
        )

    def shortage(self) -> str | None:
        return self._retention.shortage()

    async def expire(self) -> int:
        async with self._sweeping:
            removed = await self._retention.sweep()
            await self._retention.clean_up()
            if await self._packer.sweep():
                await self._retention.clean_up()
        return removed

    # ---- recovery ----

    async def _recover(self) -> None:
        residents = self._residents
        residents.last_sid, last_oid = await self._storage.last_numbers()
        self.objects.begin_after(last_oid)
        recovery = Recovery(self._storage, residents)
        await recovery.run()
        self._log.begin(recovery.rows, recovery.sizes)
        residents.fit()
        if recovery.damaged:
            self._log.begin_anew(self._commits.forming, recovery.segments)
            await self._commits.commit()
        await self._retention.measure()
        if residents.due_tails:
            self._commits.schedule()  # ended streams become segments, so that they can expire
