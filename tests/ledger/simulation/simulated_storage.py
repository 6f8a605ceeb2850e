"""A `Storage` in memory on a disk that crashes: what is lost then is drawn from a seed.

A process that dies leaves what it has written; a machine without power leaves what was
synced and some of what was written after it, in order and never half a commit: that is
what SQLite's WAL makes of torn sectors (test_faults.py shows it with the real one).

Point lookups do not wait, as in `SqliteFile`; reads of many rows and syncs take a while.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import NamedTuple

from tailrace.ledger.branch import Part
from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.interface import ObjectKey, ValueRange
from tailrace.ledger.sqlite.encoding import unpack_batch
from tailrace.ledger.sqlite.storage import Commit, ObjectRow, SegmentRow, Sizes, StreamRow
from tailrace.ledger.usage import Usage, UsageQuery, UsageSums, delivered
from tests.ledger.simulation.simulated_loop import sleep

MAX_DELAY_S = 1.0
"""Maximum duration of a read or of half a sync, in virtual seconds."""


class Crash(Enum):
    """Ways in which a simulated process ends."""

    PROCESS = "SIGKILL"
    POWER = "power cut"


@dataclass(slots=True)
class Tables:
    """State of the tables after the commits so far."""

    streams: dict[int, StreamRow] = field(default_factory=dict)
    parts: dict[int, list[Part]] = field(default_factory=dict)
    segments: dict[int, dict[int, SegmentRow]] = field(default_factory=dict)
    removed: set[int] = field(default_factory=set)  # streams whose segments a branch refers to
    log: dict[int, bytes] = field(default_factory=dict)
    objects: dict[int, ObjectRow] = field(default_factory=dict)
    values: dict[int, dict[str, bytes]] = field(default_factory=dict)
    usage: dict[bytes, Usage] = field(default_factory=dict)

    def apply(self, commit: Commit) -> None:
        for row in commit.streams:
            self.streams[row.sid] = row
        for sid, part in commit.parts:
            self.parts.setdefault(sid, []).append(part)
        for epoch, sid in commit.epochs:
            if sid in self.streams:
                self.streams[sid] = self.streams[sid]._replace(epoch=epoch)
        if commit.log:
            self.log[commit.seq] = commit.log
        self._apply_segments(commit)
        self._apply_usage(commit)
        for expires_ms, sid in commit.ended:
            self._expire(sid, expires_ms, ended=1)
        for expires_ms, sid in commit.touched:
            self._expire(sid, expires_ms)
        self._remove(commit.removed)
        self._apply_objects(commit)
        if commit.keep_from is not None:
            for seq in [seq for seq in self.log if seq < commit.keep_from]:
                del self.log[seq]

    def _remove(self, sids: Sequence[int]) -> None:
        """Remove streams; their segments stay while a branch refers to them."""
        for sid in sids:
            self.streams.pop(sid, None)
            self.parts.pop(sid, None)
        self.removed.update(sids)
        used = {part.sid for parts in self.parts.values() for part in parts}
        for sid in self.removed - used:
            self.segments.pop(sid, None)
        self.removed &= used

    def _apply_segments(self, commit: Commit) -> None:
        for sid, first, beyond in commit.replaced:
            rows = self.segments.get(sid, {})
            for at in [at for at in rows if first <= at < beyond]:
                del rows[at]
        for segment in commit.segments:
            self.segments.setdefault(segment.sid, {})[segment.first] = segment

    def _apply_usage(self, commit: Commit) -> None:
        for row in commit.usage:
            self.usage.setdefault(row.stream, row)
        for tokens, stream in commit.delivered:
            if stream in self.usage:
                self.usage[stream] = delivered(self.usage[stream], tokens)
        for stream in commit.forgotten:
            self.usage.pop(stream, None)

    def _apply_objects(self, commit: Commit) -> None:
        for row in commit.objects:
            self.objects[row.oid] = row
        for oid, name, value in commit.values:
            values = self.values.setdefault(oid, {})
            if name is None:
                values.clear()
            elif value is None:
                values.pop(name, None)
            else:
                values[name] = value

    def _expire(self, sid: int, expires_ms: int, ended: int = 0) -> None:
        row = self.streams.get(sid)
        if row is not None:
            later = max(row.expires_ms, expires_ms) if not ended else expires_ms
            self.streams[sid] = row._replace(ended=ended or row.ended, expires_ms=later)

    def check(self, commit: Commit) -> None:
        """Assert the constraints that would make SQLite refuse the commit."""
        assert commit.seq not in self.log or not commit.log, "log.seq is not unique"
        for new in commit.streams:
            for row in self.streams.values():
                if row.sid in commit.removed:
                    continue
                assert row.sid != new.sid, "stream.sid is not unique"
                assert row.id != new.id, "stream.id is not unique"
                key = new.idempotency_key
                assert key is None or key != row.idempotency_key, "the key is not unique"
        for changed in commit.objects:
            for other in self.objects.values():
                same = (other.kind, other.name) == (changed.kind, changed.name)
                assert not same or other.oid == changed.oid, "the object's name is not unique"


class Written(NamedTuple):
    """A state of the disk: number of commits, and of frames of each stream."""

    commits: int
    frames: dict[bytes, int]


class SimulatedDisk:
    """The disk, which outlives processes: commits written so far, of which `synced` are safe.

    - `frames`: what the log holds of each stream, by its id, according to the log rows alone
    - `safe`: how much of it survives a power cut
    - `violation`: a commit that SQLite would have refused, or a log that doubles or skips an index
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.tables = Tables()
        self.commits: list[Commit] = []
        self.synced = 0
        self.violation: AssertionError | None = None
        self.frames: dict[bytes, list[bytes]] = {}
        self.safe: dict[bytes, int] = {}
        self._ids: dict[int, bytes] = {}
        self._by_sid: dict[int, list[bytes]] = {}  # `frames`, also of streams that were removed

    def write(self, commit: Commit) -> None:
        """From here on it survives the end of the process."""
        try:
            self.tables.check(commit)
            self._read_log(commit)
        except AssertionError as error:
            self.violation = error
            raise
        self.commits.append(commit)

    def _read_log(self, commit: Commit) -> None:
        for row in commit.streams:
            self._ids[row.sid] = row.id
            self._by_sid[row.sid] = self.frames[row.id] = []
        for branch, (source, end) in commit.parts:
            frames = self._by_sid[branch]
            frames += self._by_sid[source][len(frames) : end]
        if commit.log:
            for sid, index, record in unpack_batch(commit.log, where="log"):
                if sid in commit.removed and sid not in self._ids:
                    continue  # the stream was removed before it was created
                frames = self.frames[self._ids[sid]]
                assert index == len(frames), "the log doubles or skips an index"
                frames.append(record.frame)
        for sid in commit.removed:
            self._ids.pop(sid, None)  # the next process may give the number to another stream

    def written(self) -> Written:
        frames = {stream: len(frames) for stream, frames in self.frames.items()}
        return Written(len(self.commits), frames)

    def sync(self, written: Written) -> None:
        """From here on it survives a power cut."""
        self.synced, self.safe = written

    def crash(self, crash: Crash) -> None:
        """Forget what a crash loses; what is left is as if it had always been so."""
        kept = len(self.commits)
        if crash is Crash.POWER:
            kept = self.random.randint(self.synced, kept)
        commits = self.commits[:kept]
        self.tables, self.commits, self.frames = Tables(), [], {}
        self._ids, self._by_sid = {}, {}
        for commit in commits:
            self.write(commit)
            self.tables.apply(commit)
        if crash is Crash.POWER:
            self.sync(self.written())


class BoundlessDisk:
    """`ledger/sqlite/storage.py`'s Maintenance with room for all, where nothing is packed."""

    written_bytes = 0

    def check(self) -> None: ...

    def sizes(self) -> Sizes:
        return Sizes(0, 0, 0, 0, 0, 0, garbage=False)

    async def object_bytes(self) -> int:
        return 0

    async def stored_bytes(self, sid: int) -> int:
        return 0

    async def to_pack(self, before_ms: int, limit: int) -> list[int]:
        return []

    async def checkpoint(self, *, cut: bool) -> None: ...

    async def fetch(self, *, reclaim: int, vacuum: int) -> None: ...

    async def wait_for_checkpoint(self) -> None: ...


class SimulatedStorage:
    """`ledger.sqlite.storage.Storage`, one process's way to a `SimulatedDisk`.

    `fails_at`: the commit (counted from here) that is refused; it may be stored all the
    same. `misread`: how often a read of segments fails, 0 to 1.
    """

    name = "simulated"

    def __init__(
        self, disk: SimulatedDisk, *, fails_at: int | None = None, misread: float = 0.0
    ) -> None:
        self._disk = disk
        self._random = disk.random
        self._fails_at = fails_at
        self._misread = misread
        self._commits = 0
        self.failed: LedgerFailed | None = None
        self.maintenance = BoundlessDisk()
        # Whoever opens a file must sync what a killed process has left unsynced.
        disk.sync(disk.written())

    # ---- writing ----

    waits = False

    def commit(self, commit: Commit) -> None:
        self._maybe_fail(commit)
        self._disk.write(commit)
        self._disk.tables.apply(commit)

    def commit_durably(self, commit: Commit, behind: Callable[[], Commit]) -> Awaitable[None]:
        """Commit as `SqliteFile` does.

        A log row alone is written at once, and the rest after it.
        """
        if commit.only_log:
            self.commit(commit)
            written = self._disk.written()
            self._store_behind(behind())
            return self._sync(written)
        return self._commit_in_thread(commit, behind())

    async def _commit_in_thread(self, commit: Commit, behind: Commit) -> None:
        await self._delay()
        self._maybe_fail(commit)
        self._disk.write(commit)
        await self._sync(self._disk.written())
        self._disk.tables.apply(commit)
        await self._delay()
        self._store_behind(behind)

    async def _sync(self, written: Written) -> None:
        """Sync what was written before; later writes may still be lost."""
        await self._delay()
        self._disk.sync(written)
        await self._delay()

    def _store_behind(self, commit: Commit) -> None:
        if not commit.empty:
            self.commit(commit)

    def _maybe_fail(self, commit: Commit) -> None:
        self._commits += 1
        if self.failed is None and self._commits == self._fails_at:
            self.failed = LedgerFailed("the disk is full")
            if self._random.random() < 0.5:
                self._disk.write(commit)
        if self.failed is not None:
            raise self.failed

    async def _delay(self) -> None:
        if self._random.random() < 0.7:
            await sleep(self._random.random() * MAX_DELAY_S)

    # ---- reading ----

    async def stream_by_sid(self, sid: int) -> StreamRow | None:
        return self._disk.tables.streams.get(sid)

    async def stream_by_id(self, stream: bytes) -> StreamRow | None:
        return next((row for row in self._rows() if row.id == stream), None)

    async def stream_by_key(self, idempotency_key: str) -> StreamRow | None:
        return next((row for row in self._rows() if row.idempotency_key == idempotency_key), None)

    async def unfinished(self, kind: int) -> list[tuple[int, bytes]]:
        await self._delay()
        rows = [row for row in self._rows() if not row.ended and row.kind == kind]
        return [(r.sid, r.id) for r in sorted(rows, key=lambda row: (row.created_ms, row.sid))]

    async def covered(self, sid: int) -> int:
        segments = self._disk.tables.segments.get(sid, {})
        return max((row.first + row.length for row in segments.values()), default=0)

    async def parts(self, sid: int) -> tuple[Part, ...]:
        return tuple(self._disk.tables.parts.get(sid, ()))

    async def answer(self, identity: bytes) -> bytes | None:
        return None

    async def segments(self, sid: int, start: int, limit: int) -> list[SegmentRow]:
        await self._delay()
        if self._random.random() < self._misread:
            raise LedgerFailed("the disk cannot read this")
        rows = sorted(self._disk.tables.segments.get(sid, {}).values())
        await self._delay()
        at = max(0, bisect_right([row.first for row in rows], start) - 1)
        return rows[at : at + limit]

    async def log_rows(self) -> list[int]:
        await self._delay()
        return sorted(self._disk.tables.log)

    async def log(self, rows: Sequence[int]) -> list[bytes]:
        await self._delay()
        return [self._disk.tables.log[seq] for seq in rows]

    async def last_numbers(self) -> tuple[int, int]:
        tables = self._disk.tables
        return max([0, *tables.streams, *tables.segments]), max([0, *tables.objects])

    async def expired(self, kind: int, now_ms: int, limit: int) -> list[int]:
        rows = [r for r in self._rows() if r.ended and r.kind == kind and r.expires_ms <= now_ms]
        return [row.sid for row in sorted(rows, key=lambda row: row.expires_ms)][:limit]

    async def usage(self, query: UsageQuery) -> UsageSums:
        await self._delay()
        sums = UsageSums(query)
        for row in self._disk.tables.usage.values():
            sums.add_usage(row)
        return sums

    async def old_usage(self, before_ms: int, limit: int) -> list[bytes]:
        rows = self._disk.tables.usage.values()
        return [row.stream for row in rows if row.ended_ms < before_ms][:limit]

    async def object_row(self, key: ObjectKey) -> ObjectRow | None:
        rows = self._disk.tables.objects.values()
        return next((row for row in rows if (row.kind, row.name) == key), None)

    async def values(self, oid: int, names: Sequence[str]) -> list[tuple[str, bytes]]:
        values = self._disk.tables.values.get(oid, {})
        return [(name, values[name]) for name in names if name in values]

    async def value_range(self, oid: int, wanted: ValueRange) -> list[tuple[str, bytes]]:
        await self._delay()
        values = self._disk.tables.values.get(oid, {})
        found = sorted(filter(wanted.__contains__, values), reverse=wanted.reverse)
        return [(name, values[name]) for name in found[: wanted.limit]]

    async def alarms(self, now_ms: int, limit: int) -> list[ObjectRow]:
        due = [r for r in self._alarmed() if r.alarm_ms is not None and r.alarm_ms <= now_ms]
        return sorted(due, key=lambda row: (row.alarm_ms, row.oid))[:limit]

    async def object_names(self, kind: str, after: str, limit: int) -> list[str]:
        await self._delay()
        values = self._disk.tables.values
        names = (
            row.name
            for row in self._disk.tables.objects.values()
            if row.kind == kind and (row.alarm_ms is not None or values.get(row.oid))
        )
        return sorted((n for n in names if n.encode() > after.encode()), key=str.encode)[:limit]

    async def close(self) -> None:
        """Nothing is open."""

    def _rows(self) -> Iterator[StreamRow]:
        return iter(self._disk.tables.streams.values())

    def _alarmed(self) -> Iterator[ObjectRow]:
        return (row for row in self._disk.tables.objects.values() if row.alarm_ms is not None)
