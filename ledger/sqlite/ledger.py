"""The ledger on one SQLite file (WAL), one writer, group commit.

Each commit is one row in `log`; a stream's tail in memory indexes what it has there.
When a tail is large, old or ended it becomes a segment, in the transaction of some commit,
and the log before the oldest tail is pruned. Replay is segments, then tail; recovery
rebuilds the tails from the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ledger.errors import (
    Conflict,
    LedgerFailed,
    NotFound,
    TailraceError,
    damaged_stream,
    unknown_stream,
)
from ledger.frame import Durability
from ledger.interface import Append, NewStream, Record, Refusal, StreamInfo, StreamKind
from ledger.sqlite.cold_packer import ColdPacker
from ledger.sqlite.cold_reader import SegmentReader
from ledger.sqlite.compactor import Compactor
from ledger.sqlite.compactor_process import CompactorProcess
from ledger.sqlite.disk_sync import SyncOf, sync_of
from ledger.sqlite.file import SqliteFile
from ledger.sqlite.group import Group, GroupCommit
from ledger.sqlite.objects import SqliteObjects
from ledger.sqlite.record import Entry, pack_batch, unpack_batch
from ledger.sqlite.replay import Replay
from ledger.sqlite.retention import Retention, RetentionSettings
from ledger.sqlite.segment import segments_of
from ledger.sqlite.storage import Commit, Storage, StreamRow, Upkeep
from ledger.sqlite.tail import MAX_TAIL_BATCHES, Space, Tail

SEGMENT_COMMITS = 64
"""Commits over which the segments are spread that are due now,"""
MAX_SEGMENTS_PER_COMMIT = 4
"""but so many at most with one, so that none takes much longer than others."""
PRUNE_ROWS = 64
"""Log rows that are pruned at once,"""
PRUNE_BYTES = 512 * 1024
"""or as many as have so many bytes, if those are fewer."""
MAX_PRUNE_ROWS = 4 * PRUNE_ROWS
"""What one commit prunes, at most, however much has become prunable."""

_POWER = Durability.POWER  # a global is found quicker than an enum's member
_RELAXED = Durability.RELAXED


class SqliteLedger:
    """`ledger.interface.Ledger` over a `Storage`. One event loop, one owner; see `open`."""

    def __init__(
        self,
        storage: Storage,
        now_ms: Callable[[], int],
        retention: RetentionSettings = RetentionSettings(),
        upkeep: Upkeep | None = None,
        compactor: Compactor | None = None,
    ) -> None:
        self._storage = storage
        self._upkeep = upkeep
        self._now_ms = now_ms
        self._tails: dict[bytes, Tail] = {}
        self._by_sid: dict[int, Tail] = {}
        self._unstored: dict[int, Tail] = {}  # by sid; in the order of their oldest log row
        self._ripe: dict[int, Tail] = {}
        self._touched: dict[int, int] = {}  # sid to expires_ms, not yet in the file
        self._creating = asyncio.Lock()
        self._keys: dict[str, NewStream] = {}  # of streams that are not durable yet
        self._loading = asyncio.Lock()
        self._removing: set[int] = set()  # sids that go with a commit under way
        self._seq = 0
        self._sid = 0
        self._seen_seq = 0
        self._pruned = 1  # log rows below it are gone
        self._prunable = 1  # those below it may go
        self._prunable_bytes = 0
        self._log_sizes: deque[int] = deque()  # of the rows from `_prunable` on
        self._closing = False
        self._commits = GroupCommit(storage, self._prepare, self._tidy, self._release)
        self.objects = SqliteObjects(self, storage, self._commits)
        self._space = Space(retention.max_stream_bytes)
        self._retention = Retention(
            self, storage, upkeep, self._commits, retention, self._space, now_ms
        )
        self._compactor = compactor or CompactorProcess()  # which begins when it is needed
        segments = SegmentReader(upkeep)
        self._replay = Replay(storage, segments)
        self._packer: ColdPacker | None = None
        if upkeep is not None:
            self._packer = ColdPacker(
                self, storage, upkeep, self._commits, segments, self._compactor, retention, now_ms
            )
        self._sweeping = asyncio.Lock()
        self.packing: int | None = None  # the sid that is packed now; None once it is removed

    @classmethod
    async def open(
        cls,
        path: Path,
        now_ms: Callable[[], int],
        *,
        vfs: str | None = None,
        wal_sync: SyncOf = sync_of,
        retention: RetentionSettings = RetentionSettings(),
        compactor: Compactor | None = None,
    ) -> SqliteLedger:
        """Open the ledger file at `path` and recover it; `now_ms` gives Unix time in ms.

        `vfs` and `wal_sync` are those of `SqliteFile.open`, `compactor` is that of `recover`.
        """
        file = await SqliteFile.open(path, vfs, wal_sync)
        return await cls.recover(
            file, now_ms, retention=retention, upkeep=file.upkeep, compactor=compactor
        )

    @classmethod
    async def recover(
        cls,
        storage: Storage,
        now_ms: Callable[[], int],
        *,
        retention: RetentionSettings = RetentionSettings(),
        upkeep: Upkeep | None = None,
        compactor: Compactor | None = None,
    ) -> SqliteLedger:
        """A ledger over what `storage` holds; without `upkeep` it packs and frees nothing.

        What it packs is packed by `compactor`, or by a process of its own.
        """
        ledger = cls(storage, now_ms, retention, upkeep, compactor)
        try:
            await ledger._recover()
        except BaseException:
            await ledger.close()
            raise
        return ledger

    async def close(self) -> None:
        """Store what is ripe, so that the next start has less to recover."""
        self._closing = True
        with suppress(LedgerFailed):  # who waited for a failed write has had its error
            while self._ripe:
                await self._commits.commit()
            await self._commits.commit()
        await self._compactor.close()
        await self._storage.close()

    # ---- streams ----

    async def create(self, new: NewStream) -> tuple[StreamInfo, bool]:
        await self._commits.room()
        await self._retention.find_room()
        async with self._creating:
            existing = await self._with_same_key(new)
            if existing is None:
                await self.refuse_taken(new.stream)
                self.add_stream(new)
                if new.idempotency_key is not None:
                    self._keys[new.idempotency_key] = new
                if new.durability is Durability.POWER:
                    self._commits.forming.commit.power = True
        # An existing stream may not be durable yet either.
        await self._commits.commit()
        return await self.info(existing or new.stream), existing is None

    async def _with_same_key(self, new: NewStream) -> bytes | None:
        """The id of the stream that the idempotency key has made already."""
        if new.idempotency_key is None:
            return None
        first = self._keys.get(new.idempotency_key)
        if first is not None:
            stream, request_hash = first.stream, first.request_hash
        else:
            row = await self._storage.stream_by_key(new.idempotency_key)
            if row is None:
                return None
            stream, request_hash = row.id, row.request_hash
        if request_hash != new.request_hash:
            raise Conflict(
                "this idempotency key was used for another request",
                field="idempotency_key",
                hint="use a new key for a new request",
            )
        return stream

    async def refuse_taken(self, stream: bytes) -> None:
        """`Conflict` if there is a stream of this id, `LedgerFull` if there is no room for it."""
        self._retention.require_room()
        row = None if stream in self._tails else await self._storage.stream_by_id(stream)
        if stream in self._tails or (row is not None and self.exists(row.sid)):
            raise Conflict("the stream id is taken", field="stream")

    def add_stream(self, new: NewStream) -> Tail:
        """Put a new stream into the forming commit."""
        self._sid += 1
        now, ttl_ms = self._now_ms(), int(new.ttl_s * 1000)
        row = StreamRow(
            sid=self._sid,
            id=new.stream,
            kind=int(new.kind),
            epoch=1,
            ended=0,
            durability=int(new.durability),
            recipe=new.recipe,
            created_ms=now,
            ttl_ms=ttl_ms,
            expires_ms=now + ttl_ms,
            idempotency_key=new.idempotency_key,
            request_hash=new.request_hash,
        )
        self._commits.forming.commit.streams.append(row)
        tail = self._keep(row, covered=0)
        tail.fit(self._space)
        return tail

    async def info(self, stream: bytes) -> StreamInfo:
        return (await self.resident(stream)).snapshot()

    async def unfinished(self) -> list[bytes]:
        rows = await self._storage.unfinished(StreamKind.GENERATION)
        tails = self._by_sid
        return [r.id for r in rows if r.sid not in tails or not tails[r.sid].end_accepted]

    async def take_over(self, stream: bytes) -> int:
        tail = await self.resident(stream)
        self._commits.check()
        # Fenced in memory first: nothing of the old producer is accepted from here on.
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
        self.drop_stream(await self.resident(stream))
        await self._commits.commit()

    def drop_stream(self, tail: Tail) -> None:
        """Put the removal of a stream into the forming commit."""
        self.remove([tail.sid])
        tail.wake()

    def remove(self, sids: Sequence[int]) -> None:
        """Forget streams now; their rows go with the forming commit."""
        self._commits.forming.commit.remove(sids)
        self._removing.update(sids)
        if self.packing in sids:
            self.packing = None
        for sid in sids:
            if sid in self._by_sid:
                self._forget(self._by_sid[sid])

    # ---- writing ----

    async def append(self, batch: Sequence[Append]) -> list[Refusal]:
        find, refused = self._tails.get, list[Refusal]()
        tails = [find(append[0]) for append in batch]
        if None in tails or not self._commits.ready:
            refused = await self._make_ready(batch)
            tails = [find(append[0]) for append in batch]
        if self._accept(batch, tails, refused):
            await self._commits.commit()
        else:
            self._commits.schedule()
        return refused

    def _accept(
        self, batch: Sequence[Append], tails: list[Tail | None], refused: list[Refusal]
    ) -> bool:
        """Put a batch into the forming commit; True where its producer must wait for that.

        Every token passes here: what looks long-winded saves a tenth of its whole cost.
        """
        group = self._commits.forming
        add_tail, add_append = group.tails.append, group.appends.append
        waits, power, size = False, False, 0
        for append, tail in zip(batch, tails, strict=True):
            if tail is None:
                continue  # refused as unknown
            try:
                size += tail.accept(append)
            except TailraceError as error:
                refused.append(Refusal(append, error))
                continue
            add_tail(tail)
            add_append(append)
            if tail.durability is _RELAXED:
                tail.released = tail.accepted
                tail.wake()
                continue
            waits = True
            if tail.durability is _POWER:
                power = True
        group.bytes += size
        if power:
            group.commit.power = True
        return waits

    async def _make_ready(self, batch: Sequence[Append]) -> list[Refusal]:
        """Wait for room and until every stream is resident; refuse those that are unknown."""
        unknown: dict[bytes, NotFound] = {}
        while True:
            if not self._commits.has_room:
                await self._commits.room()
            self._commits.check()
            tails = self._tails
            away = [a.stream for a in batch if a.stream not in tails and a.stream not in unknown]
            if not away:
                return [Refusal(a, unknown[a.stream]) for a in batch if a.stream in unknown]
            for stream in away:
                try:
                    await self.resident(stream)
                except NotFound as error:
                    unknown[stream] = error

    def _prepare(self, group: Group) -> None:
        """Put the log row into a group's commit; everything else can be stored behind it."""
        if not group.tails:
            return
        commit = group.commit
        self._seq += 1
        _, _, indexes, records = zip(*group.appends, strict=True)
        frames, ids = zip(*records, strict=True)
        commit.seq = self._seq
        commit.log = pack_batch([tail.sid for tail in group.tails], indexes, frames, ids)
        self._log_sizes.append(len(commit.log))

    def _tidy(self, group: Group, commit: Commit) -> None:
        """Note where a group's frames lie, and put into `commit` what becomes a segment now."""
        if group.tails:
            self._note(group)
        self._note_aged(self._seq)
        if self._ripe:
            self._put_segments(group, commit)
        unstored = self._unstored
        self._prune(commit, next(iter(unstored.values())).oldest_seq if unstored else self._seq + 1)

    def _note(self, group: Group) -> None:
        """Of every tail: until where the group releases it, and in which log row it lies."""
        seq, unstored, by_sid = group.commit.seq, self._unstored, self._by_sid
        pairs = zip(group.tails, group.appends, strict=True)
        last = {tail.sid: (tail, append[2] + 1) for tail, append in pairs}
        group.reached = list(last.values())
        for sid, (tail, _) in last.items():
            if by_sid.get(sid) is not tail:
                continue  # it has been deleted
            if sid not in unstored:
                tail.oldest_seq = seq
                unstored[sid] = tail
            if tail.ripe:
                self._ripe[sid] = tail

    def _prune(self, commit: Commit, oldest: int) -> None:
        """Let log rows below `oldest` go, many at a time but never very many."""
        sizes, end = self._log_sizes, min(oldest, self._pruned + MAX_PRUNE_ROWS)
        while self._prunable < end and sizes and self._prunable_bytes < PRUNE_BYTES:
            self._prunable_bytes += sizes.popleft()
            self._prunable += 1
        rows = self._prunable - self._pruned
        if rows >= PRUNE_ROWS or self._prunable_bytes >= PRUNE_BYTES or (self._closing and rows):
            commit.keep_from = self._pruned = self._prunable
            self._prunable_bytes = 0

    def _note_aged(self, seq: int) -> None:
        # With fewer, short streams that come faster than one for each commit would pile up.
        most = MAX_SEGMENTS_PER_COMMIT * SEGMENT_COMMITS
        for tail in self._unstored.values():
            if seq - tail.oldest_seq < MAX_TAIL_BATCHES or len(self._ripe) >= most:
                return
            self._ripe[tail.sid] = tail

    def _put_segments(self, group: Group, commit: Commit) -> None:
        """Some ripe tails, as far as they are accepted: the rest of them is in this group."""
        now = self._now_ms()
        due = min(MAX_SEGMENTS_PER_COMMIT, -(-len(self._ripe) // SEGMENT_COMMITS))
        for sid in list(islice(self._ripe, due)):
            tail = self._ripe.pop(sid)
            self._unstored.pop(sid, None)
            if tail.accepted > tail.stored:
                commit.segments += segments_of(tail)
                group.segmented.append((tail, tail.accepted))
                self._retention.grew(tail.unstored_bytes)
            if tail.end_accepted:
                commit.ended.append((now + tail.ttl_ms, sid))

    def _release(self, group: Group) -> bool:
        """Show a stored group to its readers; whether tails are left that should be stored."""
        for tail, until in group.reached:
            if until > tail.released:
                tail.released = until
                if tail.watchers:
                    tail.wake()
        for tail, until in group.segmented:
            tail.was_stored(until)
            if tail.end_accepted and tail.idle:
                self._forget(tail)
        for tail in group.taken_over:
            tail.in_commit -= 1
        self._removing.difference_update(group.commit.removed)
        for row in group.commit.streams:
            self._keys.pop(row.idempotency_key or "", None)
        return bool(self._ripe)

    # ---- reading ----

    def tip(self, stream: bytes, start: int, limit: int) -> list[bytes] | None:
        tail = self._tails.get(stream)
        return None if tail is None else tail.take(start, limit)

    async def frames(self, stream: bytes, start: int, limit: int) -> list[bytes]:
        tail = await self.resident(stream)
        self._touch(tail)
        return await self._replay.frames(tail, start, limit)

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        tail = await self.resident(stream)
        self._touch(tail)
        return await self._replay.records(tail, start, limit)

    def watch(self, stream: bytes, wake: Callable[[], None]) -> None:
        self._tails[stream].watchers.append(wake)

    def unwatch(self, stream: bytes, wake: Callable[[], None]) -> None:
        tail = self._tails.get(stream)
        if tail is not None and wake in tail.watchers:
            tail.watchers.remove(wake)
            if tail.ended and tail.idle:
                self._forget(tail)

    def released(self, stream: bytes) -> int:
        tail = self._tails.get(stream)
        if tail is None:
            raise unknown_stream(stream)
        return tail.released

    # ---- retention ----

    async def expire(self) -> int:
        async with self._sweeping:
            removed = await self._retention.sweep()
            await self._retention.clean_up()
            if self._packer is not None and await self._packer.sweep():
                await self._retention.clean_up()
        return removed

    async def slide(self) -> None:
        """Store the new expiries of the streams that were read, and what else is forming."""
        touched, self._touched = self._touched, {}
        self._commits.forming.commit.touched += [(ms, sid) for sid, ms in touched.items()]
        await self._commits.commit()

    def sweep_memory(self) -> None:
        """Store and forget what nobody has used since the last sweep; what is watched slides.

        Of a watched stream that rests, its place is kept and no frame: its readers are at the
        tip, most likely, and one that is not asks storage.
        """
        for tail in list(self._by_sid.values()):
            if tail.watchers:
                self._touch(tail)
            if tail.was_used():
                continue
            if tail.idle:
                self._forget(tail)
            elif tail.accepted > tail.stored:
                self._ripe[tail.sid] = tail
            else:
                tail.was_stored(tail.stored)

    def was_touched(self, sid: int) -> bool:
        return sid in self._touched

    def is_watched(self, sid: int) -> bool:
        return sid in self._by_sid and bool(self._by_sid[sid].watchers)

    def is_quiet(self) -> bool:
        """Whether nothing was appended since it was asked last."""
        before, self._seen_seq = self._seen_seq, self._seq
        return before == self._seq

    def exists(self, sid: int) -> bool:
        return sid not in self._removing

    def long_running(self, frames: int) -> list[tuple[int, int]]:
        """(sid, index that segments reach) of resident unended streams with so many frames."""
        tails = self._by_sid.values()
        return [(t.sid, t.stored) for t in tails if t.stored >= frames and not t.end_accepted]

    def fit(self) -> None:
        for tail in self._by_sid.values():
            tail.fit(self._space)

    def _touch(self, tail: Tail) -> None:
        if not tail.ended or tail.info.kind is StreamKind.OBJECT:
            return  # its retention begins with its end, or is its object's business
        self._touched[tail.sid] = self._now_ms() + tail.ttl_ms

    # ---- residence ----

    async def resident(self, stream: bytes) -> Tail:
        tail = self._tails.get(stream)
        if tail is None:
            async with self._loading:
                tail = self._tails.get(stream)
                if tail is None:
                    row = await self._storage.stream_by_id(stream)
                    if row is None or row.sid in self._removing:
                        raise unknown_stream(stream)
                    covered = await self._storage.covered(row.sid)
                    size = await self._stored_bytes(row)
                    tail = self._keep(row, covered)
                    tail.stored_bytes = size
                    tail.fit(self._space)
        tail.used = True
        return tail

    def _keep(self, row: StreamRow, covered: int) -> Tail:
        info = StreamInfo(
            row.id,
            row.epoch,
            covered,
            bool(row.ended),
            Durability(row.durability),
            row.recipe,
            row.created_ms,
            StreamKind(row.kind),
        )
        tail = Tail.at(row.sid, info, row.ttl_ms)
        self._tails[row.id] = self._by_sid[row.sid] = tail
        return tail

    def _forget(self, tail: Tail) -> None:
        if self._tails.get(tail.info.stream) is tail:
            del self._tails[tail.info.stream]
        for index in (self._by_sid, self._unstored, self._ripe):
            index.pop(tail.sid, None)

    async def _stored_bytes(self, row: StreamRow) -> int:
        """What a stream that may still grow has in segments."""
        if row.ended or self._upkeep is None:
            return 0
        return await self._upkeep.stored_bytes(row.sid)

    # ---- recovery ----

    async def _recover(self) -> None:
        self._sid, last_oid = await self._storage.last_numbers()
        self.objects.begin_after(last_oid)
        for seq, blob in await self._storage.log():
            where = f"{self._storage.name}: log row {seq}"
            entries = list(unpack_batch(blob, where=where))
            await self._load({entry.sid for entry in entries})
            for entry in entries:
                self._recover_entry(seq, entry)
            if not self._log_sizes:
                self._pruned = self._prunable = seq
            self._log_sizes.append(len(blob))
            self._seq = seq
        self.fit()
        await self._retention.measure()
        if self._ripe:
            self._commits.schedule()  # the retention of what has ended begins now, not some day

    async def _load(self, sids: set[int]) -> None:
        self._sid = max(self._sid, *sids)
        for row in await self._storage.streams_by_sid([s for s in sids if s not in self._by_sid]):
            tail = self._keep(row, await self._storage.covered(row.sid))
            tail.stored_bytes = await self._stored_bytes(row)

    def _recover_entry(self, seq: int, entry: Entry) -> None:
        tail = self._by_sid.get(entry.sid)
        if tail is None or entry.at < tail.accepted:
            return  # it was removed, or a segment holds it already
        if entry.at != tail.accepted:
            jump = f"the log jumps from index {tail.accepted} to {entry.at}"
            raise damaged_stream(tail.info.stream, jump)
        tail.accept(Append(tail.info.stream, tail.epoch, entry.at, entry.record))
        tail.released = tail.accepted
        if tail.sid not in self._unstored:
            tail.oldest_seq = seq
            self._unstored[tail.sid] = tail
        if tail.ripe:
            self._ripe[tail.sid] = tail
