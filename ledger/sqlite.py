"""The ledger on one SQLite file (WAL), one writer, group commit.

Each commit is one row in `log`; a stream's tail in memory indexes what it has there.
When a tail is large, old or ended it becomes a segment, and the log before the oldest
tail is pruned. Replay is segments, then tail; recovery rebuilds the tails from the log.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from ledger.errors import Conflict, LedgerFailed, NotFound, TailraceError
from ledger.frame import Durability, Tag, tag_of
from ledger.group import Group, GroupCommit
from ledger.interface import Append, NewStream, Record, Refusal, StreamInfo
from ledger.record import Entry, pack_segment, unpack_segment
from ledger.sqlite_file import SegmentRow, SqliteFile, StreamRow
from ledger.tail import Tail

READ_SEGMENTS = 64
"""Segments fetched per storage read."""
EXPIRE_STREAMS = 64
"""Streams removed per sweep step, to keep each transaction short."""
AGE_CHECK_BATCHES = 64
"""Tails that hold back the log are looked for once in so many commits."""


class SqliteLedger:
    """`ledger.interface.Ledger` on SQLite. Make it with `open`; one event loop, one owner."""

    def __init__(self, file: SqliteFile, now_ms: Callable[[], int]) -> None:
        self._file = file
        self._now_ms = now_ms
        self._tails: dict[bytes, Tail] = {}
        self._by_sid: dict[int, Tail] = {}
        self._touched: dict[int, int] = {}  # sid to expires_ms, not yet in the file
        self._loading = asyncio.Lock()
        self._seq = 0
        self._commits = GroupCommit(self._write)

    @classmethod
    async def open(cls, path: Path, now_ms: Callable[[], int]) -> SqliteLedger:
        """Open the ledger at `path` and recover it; `now_ms` gives Unix time in ms."""
        file = await SqliteFile.open(path)
        ledger = cls(file, now_ms)
        try:
            await ledger._recover()
        except BaseException:
            await ledger.close()
            raise
        return ledger

    async def close(self) -> None:
        await self._commits.close()
        await self._file.close()

    # ---- streams ----

    async def create(self, new: NewStream) -> tuple[StreamInfo, bool]:
        self._commits.check()
        try:
            row = await self._file.insert_stream(new, self._now_ms())
        except sqlite3.IntegrityError:
            return await self._existing(new), False
        return self._keep(row, covered=0).snapshot(), True

    async def _existing(self, new: NewStream) -> StreamInfo:
        row = await self._file.stream_by_key(new.idempotency_key or "")
        if row is None:
            raise Conflict("the stream id is taken", field="stream")
        if row.request_hash != new.request_hash:
            raise Conflict(
                "this idempotency key was used for another request",
                field="idempotency_key",
                hint="use a new key for a new request",
            )
        return await self.info(row.id)

    async def info(self, stream: bytes) -> StreamInfo:
        return (await self._resident(stream)).snapshot()

    async def unfinished(self) -> list[bytes]:
        return [tail.info.stream for tail in self._tails.values() if not tail.end_accepted]

    async def take_over(self, stream: bytes) -> int:
        tail = await self._resident(stream)
        self._commits.check()
        # Fenced in memory first: nothing of the old producer is accepted from here on.
        tail.epoch += 1
        epoch = tail.epoch
        await self._file.set_epoch(tail.sid, epoch)
        return epoch

    # ---- writing ----

    async def append(self, batch: Sequence[Append]) -> list[Refusal]:
        tails = {append.stream: await self._resident(append.stream) for append in batch}
        await self._commits.room()
        group, refused = self._commits.forming, list[Refusal]()
        for append in batch:
            tail = tails[append.stream]
            try:
                tail.accept(append)
            except TailraceError as error:
                refused.append(Refusal(append, error))
                continue
            group.add(tail, append.index, append.record)
            group.power |= tail.info.durability is Durability.POWER
            if tail.info.durability is Durability.RELAXED:
                tail.release(append.record, self._seq + 1)
                tail.wake()
        if group.entries:
            await self._commits.commit(group)
        return refused

    async def _write(self, group: Group) -> None:
        seq = self._seq + 1
        entries = [Entry(tail.sid, index, record) for tail, index, record in group.entries]
        await self._file.insert_log(seq, entries, power=group.power)
        self._seq = seq
        touched: dict[int, Tail] = {}
        for tail, index, record in group.entries:
            if index >= tail.released:
                tail.release(record, seq)
            touched[tail.sid] = tail
        for tail in touched.values():
            tail.wake()
        await self._compact([tail for tail in touched.values() if tail.wants_segment(seq)])

    async def _compact(self, ripe: list[Tail]) -> None:
        """Turn the tails in `ripe` into segments, now and then the aged ones too."""
        if self._seq % AGE_CHECK_BATCHES == 0:
            aged = [t for t in self._by_sid.values() if t.wants_segment(self._seq)]
            ripe += [tail for tail in aged if tail not in ripe]
        if not ripe:
            return
        counts = [len(tail.records) for tail in ripe]
        segments = [
            SegmentRow(tail.sid, tail.first, count, pack_segment(tail.records[:count]))
            for tail, count in zip(ripe, counts, strict=True)
        ]
        now = self._now_ms()
        ended = [(now + tail.ttl_ms, tail.sid) for tail in ripe if tail.ended]
        kept = [t.oldest_seq for t in self._by_sid.values() if t.records and t not in ripe]
        await self._file.compact(segments, ended, min(kept, default=self._seq + 1))
        for tail, count in zip(ripe, counts, strict=True):
            tail.drop(count)
            self._evict_if_idle(tail)

    # ---- reading ----

    def tip(self, stream: bytes, start: int, limit: int) -> list[Record] | None:
        tail = self._tails.get(stream)
        return None if tail is None else tail.take(start, limit)

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        tail = await self._resident(stream)
        self._touch(tail)
        records: list[Record] = []
        while len(records) < limit and start + len(records) < tail.released:
            at, room = start + len(records), limit - len(records)
            live = tail.take(at, room)
            more = live if live is not None else await self._stored(tail, at, room)
            if not more:
                raise LedgerFailed(
                    f"stream {stream.hex()}: index {at} is missing",
                    retryable=False,
                    hint="the file is damaged; restore it from a copy",
                )
            records += more
        return records

    async def _stored(self, tail: Tail, start: int, limit: int) -> list[Record]:
        records: list[Record] = []
        for row in await self._file.segments(tail.sid, start, READ_SEGMENTS):
            if row.first > start + len(records):
                break
            where = f"stream {tail.info.stream.hex()}: segment at index {row.first}"
            skip = start + len(records) - row.first
            records += list(unpack_segment(row.records, where=where))[skip:]
        return records[:limit]

    def watch(self, stream: bytes, wake: Callable[[], None]) -> None:
        self._tails[stream].watchers.append(wake)

    def unwatch(self, stream: bytes, wake: Callable[[], None]) -> None:
        tail = self._tails.get(stream)
        if tail is not None and wake in tail.watchers:
            tail.watchers.remove(wake)
            self._evict_if_idle(tail)

    def released(self, stream: bytes) -> int:
        return self._tails[stream].released

    # ---- retention ----

    async def expire(self) -> int:
        now = self._now_ms()
        for tail in list(self._by_sid.values()):
            if tail.watchers:
                self._touch(tail)
            self._evict_if_idle(tail)
        touched, self._touched = self._touched, {}
        await self._file.touch([(expires_ms, sid) for sid, expires_ms in touched.items()])
        removed = 0
        while sids := await self._file.remove_expired(now, EXPIRE_STREAMS):
            removed += len(sids)
            for sid in sids:
                gone = self._by_sid.pop(sid, None)
                if gone is not None:
                    del self._tails[gone.info.stream]
        return removed

    def _touch(self, tail: Tail) -> None:
        self._touched[tail.sid] = self._now_ms() + tail.ttl_ms

    # ---- residence ----

    async def _resident(self, stream: bytes) -> Tail:
        tail = self._tails.get(stream)
        if tail is not None:
            return tail
        async with self._loading:
            if stream in self._tails:
                return self._tails[stream]
            row = await self._file.stream_by_id(stream)
            if row is None:
                raise NotFound(
                    f"no stream {stream.hex()}",
                    code="unknown_stream",
                    hint="it never was, or its retention has passed",
                )
            return self._keep(row, await self._file.covered(row.sid))

    def _keep(self, row: StreamRow, covered: int) -> Tail:
        durability, ended = Durability(row.durability), bool(row.ended)
        info = StreamInfo(row.id, row.epoch, covered, ended, durability, row.recipe, row.created_ms)
        tail = Tail(
            sid=row.sid,
            info=info,
            first=covered,
            accepted=covered,
            released=covered,
            ttl_ms=row.ttl_ms,
            end_accepted=ended,
            epoch=row.epoch,
        )
        self._tails[row.id] = self._by_sid[row.sid] = tail
        return tail

    def _evict_if_idle(self, tail: Tail) -> None:
        """Forget an ended stream that nobody watches; it is read back when asked for."""
        if tail.ended and not tail.records and not tail.watchers and tail.sid in self._by_sid:
            del self._tails[tail.info.stream], self._by_sid[tail.sid]

    async def _recover(self) -> None:
        for row in await self._file.unfinished():
            self._keep(row, await self._file.covered(row.sid))
        for seq, entries in await self._file.log():
            self._seq = seq
            for entry in entries:
                self._replay(seq, entry)
        await self._compact([tail for tail in self._tails.values() if tail.ended])

    def _replay(self, seq: int, entry: Entry) -> None:
        tail = self._by_sid.get(entry.sid)
        if tail is None or entry.index < tail.accepted:
            return  # a segment holds it already
        if entry.index != tail.accepted:
            raise LedgerFailed(
                f"stream {tail.info.stream.hex()}: the log jumps from index {tail.accepted}"
                f" to {entry.index}",
                retryable=False,
                hint="the file is damaged; restore it from a copy",
            )
        tail.accepted += 1
        tail.end_accepted = tag_of(entry.record.frame) == Tag.STREAM_END
        tail.release(entry.record, seq)
