"""The interface of the storage below a ledger: atomic commits and reads.

A `Commit` has all changes of one group commit. A storage applies a commit entirely or not at all.
The ledger decides what a commit has, and never has two commits in flight.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tailrace.ledger.branch import Part
from tailrace.ledger.interface import ObjectKey, ValueRange
from tailrace.ledger.usage import Usage, UsageQuery, UsageSums


class StreamRow(NamedTuple):
    """A stored stream. `sid` is its short local id in the log and in segments."""

    sid: int
    id: bytes
    kind: int
    epoch: int
    ended: int  # 1 once the StreamEnd is in a segment, otherwise 0
    durability: int
    recipe: str
    created_ms: int  # Unix time
    ttl_ms: int
    expires_ms: int  # Unix time; postponed by reads and writes
    idempotency_key: str | None
    request_hash: bytes


class SegmentRow(NamedTuple):
    """Consecutive records of one stream. `coding` is `PLAIN`, `COLD` or an older value."""

    sid: int
    first: int  # index of the first record
    length: int  # number of records
    coding: int
    records: bytes


class ObjectRow(NamedTuple):
    """A stored object. `oid` is the short local id by which its values refer to it."""

    oid: int
    kind: str
    name: str
    epoch: int
    alarm_ms: int | None
    alarm_retries: int


class ValueChange(NamedTuple):
    """A change of an object's values: None as `value` deletes one value, None as `name` all."""

    oid: int
    name: str | None
    value: bytes | None


@dataclass(slots=True)
class Commit:
    """The changes of one group commit. If `log` is not empty, it becomes row `seq` of the log.

    A stream in `removed` can no longer be read after the commit. Commits with `reclaim` delete its
    segments later, unless a branch refers to them. The segments in `replaced` are deleted before
    those in `segments` are stored.
    """

    seq: int = 0
    log: bytes = b""
    power: bool = False
    keep_from: int | None = None  # log rows before this number are deleted
    streams: list[StreamRow] = field(default_factory=list)
    # Parts of new branches, as (sid of the branch, part).
    parts: list[tuple[int, Part]] = field(default_factory=list)
    # New streams that have an identity, as (identity, sid).
    answers: list[tuple[bytes, int]] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)  # changed epochs: (new epoch, sid)
    segments: list[SegmentRow] = field(default_factory=list)
    # Streams whose StreamEnd is in a segment now, as (expiry in Unix ms, sid).
    ended: list[tuple[int, int]] = field(default_factory=list)
    # Streams whose expiry is postponed, as (expiry in Unix ms, sid).
    touched: list[tuple[int, int]] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)  # sids of removed streams
    objects: list[ObjectRow] = field(default_factory=list)  # new or changed objects
    values: list[ValueChange] = field(default_factory=list)  # changes of values, applied in order
    # Segments to delete, as (sid, index of the first record, index after the last one).
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    cold: list[int] = field(default_factory=list)  # sids of streams with only cold segments
    usage: list[Usage] = field(default_factory=list)  # usage rows of streams that have ended
    # Changes of usage, as (output tokens that readers have got, stream id).
    delivered: list[tuple[int, bytes]] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)  # streams whose usage is deleted
    reclaim: int = 0  # maximum segments of removed streams to delete
    vacuum: int = 0  # maximum free pages to return to the file system

    @property
    def only_log(self) -> bool:
        new = self.streams or self.parts or self.answers
        streams = new or self.epochs or self.ended or self.touched or self.removed
        others = self.segments or self.objects or self.values or self.maintenance
        usage = self.usage or self.delivered or self.forgotten
        return self.keep_from is None and not (streams or others or usage)

    @property
    def maintenance(self) -> bool:
        """True if the commit also compresses data, deletes old segments or frees pages."""
        return bool(self.replaced or self.cold or self.reclaim or self.vacuum)

    @property
    def empty(self) -> bool:
        return not self.log and self.only_log


class Storage(Protocol):
    """The storage of a ledger. After a failed write all later writes raise `LedgerFailed`."""

    @property
    def name(self) -> str:
        """Name of the storage in errors."""

    def commit(self, commit: Commit) -> None:
        """Store a commit so that it survives a kill of this process; do not wait for the disk."""

    def commit_durably(self, commit: Commit, behind: Callable[[], Commit]) -> Awaitable[None]:
        """Store a commit so that it survives a power cut once the returned awaitable is done.

        `behind` returns a second commit, which needs no sync. This method calls `behind` before it
        returns, if possible while the disk syncs, and stores the second commit after `commit`.
        Readers may see the second commit before `commit` is durable.
        """

    @property
    def waits(self) -> bool:
        """True if the next commit waits for the disk, whatever durability it needs.

        Then use `commit_durably`, which does not block the event loop.
        """

    async def stream_by_sid(self, sid: int) -> StreamRow | None: ...

    async def stream_by_id(self, stream: bytes) -> StreamRow | None: ...

    async def stream_by_key(self, idempotency_key: str) -> StreamRow | None: ...

    async def unfinished(self, kind: int) -> list[tuple[int, bytes]]:
        """Return (sid, id) of the streams that are not marked as ended, oldest first.

        The StreamEnd of some of them may be in the log, not yet in a segment.
        """

    async def covered(self, sid: int) -> int:
        """Return the index after the stream's last segment."""

    async def parts(self, sid: int) -> tuple[Part, ...]:
        """Return the parts of a branch, in order; empty for a stream that is no branch."""

    async def answer(self, identity: bytes) -> bytes | None:
        """Return the id of the newest stream with this identity that is marked as ended."""

    async def segments(self, sid: int, start: int, limit: int) -> list[SegmentRow]:
        """Return at most `limit` segments, beginning with the one that has index `start`."""

    async def log_rows(self) -> list[int]:
        """Return the numbers of all log rows in order, for recovery."""

    async def log(self, rows: Sequence[int]) -> list[bytes]:
        """Return the contents of log rows; missing rows are left out."""

    async def last_numbers(self) -> tuple[int, int]:
        """Return the highest sid and the highest oid ever stored."""

    async def expired(self, kind: int, now_ms: int, limit: int) -> list[int]:
        """Return at most `limit` sids of expired streams, earliest first."""

    async def usage(self, query: UsageQuery) -> UsageSums:
        """Return the sums that a query requests, over the stored usage."""

    async def old_usage(self, before_ms: int, limit: int) -> list[bytes]:
        """Return streams with stored usage that ended before `before_ms`, oldest first."""

    async def object_row(self, key: ObjectKey) -> ObjectRow | None: ...

    async def values(self, oid: int, names: Sequence[str]) -> list[tuple[str, bytes]]: ...

    async def value_range(self, oid: int, wanted: ValueRange) -> list[tuple[str, bytes]]: ...

    async def alarms(self, now_ms: int, limit: int) -> list[ObjectRow]:
        """Return at most `limit` objects with a due alarm, earliest first."""

    async def object_names(self, kind: str, after: str, limit: int) -> list[str]: ...

    @property
    def maintenance(self) -> Maintenance: ...

    async def close(self) -> None: ...


class Sizes(NamedTuple):
    """Sizes of a ledger in bytes.

    `garbage` is True if there are segments of removed streams that no branch refers to.
    """

    file_bytes: int
    free_bytes: int  # bytes of the free pages in the file
    wal_bytes: int
    unmoved_bytes: int  # bytes of pages at the end of the file that only the WAL has so far
    disk_bytes: int  # size of the file's disk
    disk_free_bytes: int  # free bytes on this disk
    garbage: bool
    wal_room_bytes: int = 0  # free space that is reserved for the WAL

    @property
    def used_bytes(self) -> int:
        return self.file_bytes - self.free_bytes


class Maintenance(Protocol):
    """Queries and checkpoints of the WAL, for the maintenance that keeps a storage small.

    The changes that maintenance makes are in a `Commit`: `replaced` and the fields after it.
    """

    def check(self) -> None:
        """Check that the path still leads to the file that was opened.

        Raises:
            LedgerFailed: The file was moved or deleted, so a later start would not find its data.
        """

    def sizes(self) -> Sizes:
        """Return the current sizes, which takes some ten microseconds.

        Raises:
            LedgerAway: The file cannot be measured.
        """

    @property
    def written_bytes(self) -> int:
        """Approximate bytes that commits have written so far; never decreases."""

    async def object_bytes(self) -> int:
        """Estimate the bytes of objects' streams and values by reading all of their rows."""

    async def stored_bytes(self, sid: int) -> int:
        """Return the bytes of a stream's segments."""

    async def to_pack(self, before_ms: int, limit: int) -> list[int]:
        """Return the sids of ended, not yet cold streams, unused since `before_ms` (Unix time)."""

    async def checkpoint(self, *, cut: bool) -> None:
        """Move the WAL into the database file, except for the last pages.

        The next commit moves the last pages; the database file may keep its old size until then.
        With `cut` that commit also truncates a long WAL file, if no read transaction needs the WAL.
        """

    async def fetch(self, *, reclaim: int, vacuum: int) -> None:
        """Read into memory the pages that a commit with these values will need.

        Old data is only on the disk, and the writer must not wait for it.
        """

    async def wait_for_checkpoint(self) -> None:
        """Wait for the end of a running checkpoint, during which every write waits for the disk."""
