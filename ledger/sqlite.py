"""The ledger on one SQLite file (WAL), one writer, group commit.

Each commit is one row in `log`; a stream's tail in memory indexes what it has there.
When a tail is large, old or ended it becomes a segment, in the transaction of some commit,
and the log before the oldest tail is pruned. Replay is segments, then tail; recovery
rebuilds the tails from the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ledger.errors import Conflict, Damaged, LedgerFailed, NotFound, TailraceError
from ledger.frame import Durability
from ledger.group import Group, GroupCommit
from ledger.interface import Append, NewStream, Record, Refusal, StreamInfo, StreamKind
from ledger.record import Entry, pack_batch, pack_segment, segment_frames, segment_ids, unpack_batch
from ledger.sqlite_file import SqliteFile
from ledger.sqlite_objects import SqliteObjects
from ledger.storage import SegmentRow, Storage, StreamRow
from ledger.tail import MAX_TAIL_BATCHES, Tail

READ_SEGMENTS = 64
"""Segments fetched per storage read."""
MAX_SEGMENTS_PER_COMMIT = 16
"""Tails that become segments in one commit, so that none takes much longer than others."""
PRUNE_ROWS = 64
"""Log rows that are pruned at once."""
EXPIRE_STREAMS = 64
"""Streams removed per commit, to keep each one short."""


class SqliteLedger:
    """`ledger.interface.Ledger` over a `Storage`. One event loop, one owner; see `open`."""

    def __init__(self, storage: Storage, now_ms: Callable[[], int]) -> None:
        self._storage = storage
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
        self._pruned = 0  # log rows below it are gone
        self._closing = False
        self._commits = GroupCommit(storage, self._prepare, self._release)
        self.objects = SqliteObjects(self, storage, self._commits)

    @classmethod
    async def open(
        cls, path: Path, now_ms: Callable[[], int], *, vfs: str | None = None
    ) -> SqliteLedger:
        """Open the ledger file at `path` and recover it; `now_ms` gives Unix time in ms."""
        return await cls.recover(await SqliteFile.open(path, vfs), now_ms)

    @classmethod
    async def recover(cls, storage: Storage, now_ms: Callable[[], int]) -> SqliteLedger:
        """A ledger over what `storage` holds."""
        ledger = cls(storage, now_ms)
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
        await self._storage.close()

    # ---- streams ----

    async def create(self, new: NewStream) -> tuple[StreamInfo, bool]:
        await self._commits.room()
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
        """`Conflict` if there is a stream of this id."""
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
        return self._keep(row, covered=0)

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
        self._remove([tail.sid])
        tail.wake()

    def _remove(self, sids: Sequence[int]) -> None:
        """Forget streams now; their rows go with the forming commit."""
        self._commits.forming.commit.removed += sids
        self._removing.update(sids)
        for sid in sids:
            if sid in self._by_sid:
                self._forget(self._by_sid[sid])

    # ---- writing ----

    async def append(self, batch: Sequence[Append]) -> list[Refusal]:
        refused = await self._make_ready(batch)
        group, tails = self._commits.forming, self._tails
        waits = False
        for append in batch:
            tail = tails.get(append.stream)
            if tail is None:
                continue  # refused as unknown
            try:
                tail.accept(append)
            except TailraceError as error:
                refused.append(Refusal(append, error))
                continue
            group.add(tail, append.index, len(append.record.frame))
            waits |= self._release_at_once(tail, group)
        if waits:
            await self._commits.commit()
        else:
            self._commits.schedule()
        return refused

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
        durability = tail.info.durability
        if durability is Durability.RELAXED:
            tail.released = tail.accepted
            tail.wake()
            return False
        if durability is Durability.POWER:
            group.commit.power = True
        return True

    def _prepare(self, group: Group) -> None:
        """Complete a commit: its log row, and what becomes a segment with it."""
        commit, seq = group.commit, self._seq + 1
        if group.tails:
            self._put_log_row(group, seq)
        self._note_aged(seq)
        if self._ripe:
            self._put_segments(group)
        oldest = next(iter(self._unstored.values())).oldest_seq if self._unstored else seq + 1
        if oldest - self._pruned >= (1 if self._closing else PRUNE_ROWS):
            commit.keep_from = self._pruned = oldest

    def _put_log_row(self, group: Group, seq: int) -> None:
        tails, indexes = group.tails, group.indexes
        frames, ids, unstored = [], [], self._unstored
        for tail, index in zip(tails, indexes, strict=True):
            at = index - tail.first
            frames.append(tail.frames[at])
            ids.append(tail.ids[at])
            if self._by_sid.get(tail.sid) is not tail:
                continue  # it has been deleted
            if tail.sid not in unstored:
                tail.oldest_seq = seq
                unstored[tail.sid] = tail
            if tail.ripe:
                self._ripe[tail.sid] = tail
        group.commit.seq = seq
        group.commit.log = pack_batch([tail.sid for tail in tails], indexes, frames, ids)
        self._seq = seq

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
            frames, ids = tail.unstored()
            if frames:
                row = SegmentRow(sid, tail.stored, len(frames), 0, pack_segment(frames, ids))
                group.commit.segments.append(row)
                group.segmented.append((tail, tail.accepted))
            if tail.end_accepted:
                group.commit.ended.append((now + tail.ttl_ms, sid))

    def _release(self, group: Group) -> None:
        touched: dict[int, Tail] = {}
        for tail, index in zip(group.tails, group.indexes, strict=True):
            if index >= tail.released:
                tail.released = index + 1
                touched[tail.sid] = tail
        for tail in touched.values():
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
        frames: list[bytes] = []
        while len(frames) < limit and start + len(frames) < tail.released:
            at, room = start + len(frames), limit - len(frames)
            found = tail.take(at, room)
            if found is None:
                rows = await self._stored(tail, at)
                found = [frame for row in rows for frame in _frames_of(tail, row, at)]
            frames += found or await self._missing(tail, at)
        return frames[:limit]

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        tail = await self.resident(stream)
        self._touch(tail)
        records: list[Record] = []
        while len(records) < limit and start + len(records) < tail.released:
            at, room = start + len(records), limit - len(records)
            found = tail.records(at, room)
            if found is None:
                rows = await self._stored(tail, at)
                found = [record for row in rows for record in _records_of(tail, row, at)]
            records += found or await self._missing(tail, at)
        return records[:limit]

    async def _stored(self, tail: Tail, start: int) -> list[SegmentRow]:
        """Consecutive segments, the first of which holds index `start`."""
        try:
            found = await self._storage.segments(tail.sid, start, READ_SEGMENTS)
        except Damaged as error:
            raise damaged(tail.info.stream, f"index {start} on: {error.message}") from error
        rows, at = [], start
        for row in found:
            if not row.first <= at < row.first + row.length:
                break
            rows.append(row)
            at = row.first + row.length
        return rows

    async def _missing(self, tail: Tail, at: int) -> NoReturn:
        stream = tail.info.stream
        if await self._storage.stream_by_id(stream) is None:
            raise unknown_stream(stream)
        raise damaged(stream, f"index {at} is missing")

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
        now = self._now_ms()
        self._sweep_memory()
        removed = 0
        while True:
            await self._slide()
            sids = await self._storage.expired(StreamKind.GENERATION, now, EXPIRE_STREAMS)
            if not sids:
                return removed
            # One that was read a moment ago slides in the next round.
            gone = [sid for sid in sids if sid not in self._touched]
            self._remove(gone)
            removed += len(gone)

    async def _slide(self) -> None:
        """Store the new expiries of the streams that were read."""
        touched, self._touched = self._touched, {}
        self._commits.forming.commit.touched += [(ms, sid) for sid, ms in touched.items()]
        await self._commits.commit()

    def _sweep_memory(self) -> None:
        """Forget the tails that nobody has used since the last sweep; the busy ones slide."""
        for tail in list(self._by_sid.values()):
            if tail.watchers:
                self._touch(tail)
            elif tail.used:
                tail.used = False
            elif tail.idle:
                self._forget(tail)
            elif tail.accepted == tail.released:
                self._ripe[tail.sid] = tail

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
                    tail = self._keep(row, await self._storage.covered(row.sid))
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

    # ---- recovery ----

    async def _recover(self) -> None:
        self._sid, last_oid = await self._storage.last_numbers()
        self.objects.begin_after(last_oid)
        for seq, blob in await self._storage.log():
            where = f"{self._storage.name}: log row {seq}"
            entries = list(unpack_batch(blob, where=where))
            await self._load({entry.sid for entry in entries})
            for entry in entries:
                self._replay(seq, entry)
            self._pruned = self._pruned or seq
            self._seq = seq

    async def _load(self, sids: set[int]) -> None:
        self._sid = max(self._sid, *sids)
        for row in await self._storage.streams_by_sid([s for s in sids if s not in self._by_sid]):
            self._keep(row, await self._storage.covered(row.sid))

    def _replay(self, seq: int, entry: Entry) -> None:
        tail = self._by_sid.get(entry.sid)
        if tail is None or entry.at < tail.accepted:
            return  # it was removed, or a segment holds it already
        if entry.at != tail.accepted:
            jump = f"the log jumps from index {tail.accepted} to {entry.at}"
            raise damaged(tail.info.stream, jump)
        tail.accept(Append(tail.info.stream, tail.epoch, entry.at, entry.record))
        tail.released = tail.accepted
        if tail.sid not in self._unstored:
            tail.oldest_seq = seq
            self._unstored[tail.sid] = tail
        if tail.ripe:
            self._ripe[tail.sid] = tail


def unknown_stream(stream: bytes) -> NotFound:
    return NotFound(
        f"no stream {stream.hex()}",
        code="unknown_stream",
        hint="it never was, or its retention has passed",
    )


def damaged(stream: bytes, what: str) -> Damaged:
    return Damaged(
        f"stream {stream.hex()}: {what}", hint="the file is damaged; restore it from a copy"
    )


def _frames_of(tail: Tail, row: SegmentRow, start: int) -> list[bytes]:
    """The frames of a segment from index `start` on."""
    where = f"stream {tail.info.stream.hex()}: segment at index {row.first}"
    return segment_frames(row.records, where=where)[max(0, start - row.first) :]


def _records_of(tail: Tail, row: SegmentRow, start: int) -> list[Record]:
    frames = _frames_of(tail, row, start)
    ids = segment_ids(row.records)[max(0, start - row.first) :]
    return [Record(*pair) for pair in zip(frames, ids, strict=True)]
