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
from ledger.sqlite.file import SqliteFile
from ledger.sqlite.group import Group, GroupCommit
from ledger.sqlite.objects import SqliteObjects
from ledger.sqlite.record import Entry, pack_batch, unpack_batch
from ledger.sqlite.replay import Replay
from ledger.sqlite.retention import Retention, RetentionSettings
from ledger.sqlite.segment import segments_of
from ledger.sqlite.storage import Commit, Storage, StreamRow, Upkeep
from ledger.sqlite.tail import MAX_TAIL_BATCHES, Space, Tail
from ledger.sqlite.thread import WorkThread

MAX_SEGMENTS_PER_COMMIT = 4
"""Tails that become segments in one commit, so that none takes much longer than others."""
PRUNE_ROWS = 64
"""Log rows that are pruned at once,"""
PRUNE_BYTES = 512 * 1024
"""or as many as have so many bytes, if those are fewer."""
MAX_PRUNE_ROWS = 4 * PRUNE_ROWS
"""What one commit prunes, at most, however much has become prunable."""

_PROCESS = Durability.PROCESS  # a global is found quicker than an enum's member


class SqliteLedger:
    """`ledger.interface.Ledger` over a `Storage`. One event loop, one owner; see `open`."""

    def __init__(
        self,
        storage: Storage,
        now_ms: Callable[[], int],
        retention: RetentionSettings = RetentionSettings(),
        upkeep: Upkeep | None = None,
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
        self._commits = GroupCommit(storage, self._prepare, self._release)
        self.objects = SqliteObjects(self, storage, self._commits)
        self._space = Space(retention.max_stream_bytes)
        self._retention = Retention(
            self, storage, upkeep, self._commits, retention, self._space, now_ms
        )
        self._packing_thread = WorkThread("ledger-packer")
        self._segments = SegmentReader(upkeep, self._packing_thread)
        self._replay = Replay(storage, self._segments)
        self._packer: ColdPacker | None = None
        if upkeep is not None:
            self._packer = ColdPacker(
                self,
                storage,
                upkeep,
                self._commits,
                self._segments,
                self._packing_thread,
                retention,
                now_ms,
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
        retention: RetentionSettings = RetentionSettings(),
    ) -> SqliteLedger:
        """Open the ledger file at `path` and recover it; `now_ms` gives Unix time in ms."""
        file = await SqliteFile.open(path, vfs)
        return await cls.recover(file, now_ms, retention=retention, upkeep=file.upkeep)

    @classmethod
    async def recover(
        cls,
        storage: Storage,
        now_ms: Callable[[], int],
        *,
        retention: RetentionSettings = RetentionSettings(),
        upkeep: Upkeep | None = None,
    ) -> SqliteLedger:
        """A ledger over what `storage` holds; without `upkeep` it packs and frees nothing."""
        ledger = cls(storage, now_ms, retention, upkeep)
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
        await self._packing_thread.close()
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
        if stream in self._tails or await self._storage.stream_by_id(stream) is not None:
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
        self._commits.forming.commit.removed += sids
        self._removing.update(sids)
        if self.packing in sids:
            self.packing = None
        for sid in sids:
            if sid in self._by_sid:
                self._forget(self._by_sid[sid])

    # ---- writing ----

    async def append(self, batch: Sequence[Append]) -> list[Refusal]:
        tails = self._tails
        at_hand = self._commits.ready and tails.keys() >= {append.stream for append in batch}
        refused = [] if at_hand else await self._make_ready(batch)
        if self._accept(batch, refused):
            await self._commits.commit()
        else:
            self._commits.schedule()
        return refused

    def _accept(self, batch: Sequence[Append], refused: list[Refusal]) -> bool:
        """Put a batch into the forming commit; True where its producer must wait for that.

        Every token passes here: what looks long-winded saves a tenth of its whole cost.
        """
        group, find = self._commits.forming, self._tails.get
        add_tail, add_index = group.tails.append, group.indexes.append
        waits, size = False, 0
        for append in batch:
            tail = find(append[0])
            if tail is None:
                continue  # refused as unknown
            try:
                size += tail.accept(append)
            except TailraceError as error:
                refused.append(Refusal(append, error))
                continue
            add_tail(tail)
            add_index(append[2])
            if tail.durability is _PROCESS or self._release_at_once(tail, group):
                waits = True
        group.bytes += size
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

    def _release_at_once(self, tail: Tail, group: Group) -> bool:
        """Release what may be seen before it is stored; True where it must wait for it."""
        if tail.durability is Durability.RELAXED:
            tail.released = tail.accepted
            tail.wake()
            return False
        group.commit.power |= tail.durability is Durability.POWER
        return True

    def _prepare(self, group: Group) -> None:
        """Complete a commit: its log row, and what becomes a segment with it."""
        commit, seq = group.commit, self._seq + 1
        if group.tails:
            self._put_log_row(group, seq)
            self._log_sizes.append(len(commit.log))
        self._note_aged(seq)
        if self._ripe:
            self._put_segments(group)
        oldest = next(iter(self._unstored.values())).oldest_seq if self._unstored else seq + 1
        self._prune(commit, oldest)

    def _put_log_row(self, group: Group, seq: int) -> None:
        tails, indexes, unstored = group.tails, group.indexes, self._unstored
        places = [(t, index - t.first) for t, index in zip(tails, indexes, strict=True)]
        frames = [tail.frames[at] for tail, at in places]
        ids = [tail.ids[at] for tail, at in places]
        sids = [tail.sid for tail in tails]
        for sid, tail in dict(zip(sids, tails, strict=True)).items():
            if self._by_sid.get(sid) is not tail:
                continue  # it has been deleted
            if sid not in unstored:
                tail.oldest_seq = seq
                unstored[sid] = tail
            if tail.ripe:
                self._ripe[sid] = tail
        group.commit.seq = seq
        group.commit.log = pack_batch(sids, indexes, frames, ids)
        self._seq = seq

    def _prune(self, commit: Commit, oldest: int) -> None:
        """Let log rows below `oldest` go, many at a time but never very many."""
        sizes = self._log_sizes
        while self._prunable < oldest and sizes and self._may_prune_more:
            self._prunable_bytes += sizes.popleft()
            self._prunable += 1
        rows = self._prunable - self._pruned
        if rows >= PRUNE_ROWS or self._prunable_bytes >= PRUNE_BYTES or (self._closing and rows):
            commit.keep_from = self._pruned = self._prunable
            self._prunable_bytes = 0

    @property
    def _may_prune_more(self) -> bool:
        rows = self._prunable - self._pruned
        return rows < MAX_PRUNE_ROWS and self._prunable_bytes < PRUNE_BYTES

    def _note_aged(self, seq: int) -> None:
        for tail in self._unstored.values():
            if seq - tail.oldest_seq < MAX_TAIL_BATCHES or len(self._ripe) >= PRUNE_ROWS:
                return
            self._ripe[tail.sid] = tail

    def _put_segments(self, group: Group) -> None:
        """Some ripe tails, as far as they are accepted: the rest of them is in this commit."""
        now = self._now_ms()
        for sid in list(self._ripe)[:MAX_SEGMENTS_PER_COMMIT]:
            tail = self._ripe.pop(sid)
            self._unstored.pop(sid, None)
            if tail.accepted > tail.stored:
                group.commit.segments += segments_of(tail)
                group.segmented.append((tail, tail.accepted))
                self._retention.grew(tail.unstored_bytes)
            if tail.end_accepted:
                group.commit.ended.append((now + tail.ttl_ms, sid))

    def _release(self, group: Group) -> None:
        woken: dict[int, Tail] = {}
        for tail, index in zip(group.tails, group.indexes, strict=True):
            if index >= tail.released:
                tail.released = index + 1
                if tail.watchers:
                    woken[tail.sid] = tail
        for tail in woken.values():
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
        if self._ripe:
            self._commits.schedule()

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
