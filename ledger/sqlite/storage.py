"""What a ledger asks of the storage below it: one atomic commit at a time, and reads.

`Commit` is the whole of what one group commit changes. A storage applies it entirely or
not at all; the ledger above decides what is in it and never has two under way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tailrace.ledger.interface import ObjectKey, ValueRange


class StreamRow(NamedTuple):
    """A stream as it is stored. `sid` is its short local id, used by log and segments."""

    sid: int
    id: bytes
    kind: int
    epoch: int
    ended: int  # 1 once the StreamEnd is in a segment
    durability: int
    recipe: str
    created_ms: int  # Unix time
    ttl_ms: int
    expires_ms: int  # Unix time; slides with reads and writes
    idempotency_key: str | None
    request_hash: bytes


class SegmentRow(NamedTuple):
    """A run of records of one stream. `coding` 0: plain; otherwise cold (`record.py`)."""

    sid: int
    first: int  # index of its first record
    length: int  # records in it
    coding: int
    records: bytes


class ObjectRow(NamedTuple):
    """An object as it is stored. `oid` is its short local id, used by values."""

    oid: int
    kind: str
    name: str
    epoch: int
    alarm_ms: int | None
    alarm_retries: int


class ValueChange(NamedTuple):
    """One step in an object's values: no `value` deletes, no `name` deletes them all."""

    oid: int
    name: str | None
    value: bytes | None


@dataclass(slots=True)
class Commit:
    """What one group commit stores. `log` is row `seq` of the log, if it is not empty.

    A `removed` stream is gone with the commit; a storage may take its segments away later,
    as `reclaim` asks it to. The segments that `replaced` names go before `segments` come.
    """

    seq: int = 0
    log: bytes = b""
    power: bool = False
    keep_from: int | None = None  # log rows before it are in segments now
    streams: list[StreamRow] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)  # (epoch, sid)
    segments: list[SegmentRow] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)  # (expires_ms, sid)
    touched: list[tuple[int, int]] = field(default_factory=list)  # (expires_ms, sid)
    removed: list[int] = field(default_factory=list)  # sids
    objects: list[ObjectRow] = field(default_factory=list)  # new or changed
    values: list[ValueChange] = field(default_factory=list)  # in this order
    replaced: list[tuple[int, int, int]] = field(default_factory=list)  # (sid, first, beyond)
    cold: list[int] = field(default_factory=list)  # sids of which every segment is cold
    reclaim: int = 0  # segments of removed streams that go with it, at most
    vacuum: int = 0  # free pages that the file gives back, at most

    @property
    def only_log(self) -> bool:
        streams = self.streams or self.epochs or self.ended or self.touched or self.removed
        others = self.segments or self.objects or self.values or self.maintenance
        return self.keep_from is None and not (streams or others)

    @property
    def maintenance(self) -> bool:
        """Whether it changes how things are stored, and not only what."""
        return bool(self.replaced or self.cold or self.reclaim or self.vacuum)

    @property
    def empty(self) -> bool:
        return not self.log and self.only_log


class Storage(Protocol):
    """The stored side of a ledger. A failed write is a `LedgerFailed`, and the last one."""

    @property
    def name(self) -> str:
        """What errors call it."""

    def commit(self, commit: Commit) -> None:
        """Store it so that it survives the end of this process; no waiting for the disk."""

    def commit_durably(self, commit: Commit, behind: Callable[[], Commit]) -> Awaitable[None]:
        """Store it so that it survives the loss of power, once what is returned is done.

        `behind` is called before this returns, if possible while the disk is awaited, and what
        it gives is stored behind `commit` as `commit` would store it. A reader may come upon
        that before `commit` is durable.
        """

    @property
    def waits(self) -> bool:
        """Whether the next commit waits for the disk whatever it asks for.

        Then it is for `commit_durably`, which keeps nobody else waiting.
        """

    async def stream_by_sid(self, sid: int) -> StreamRow | None: ...

    async def stream_by_id(self, stream: bytes) -> StreamRow | None: ...

    async def stream_by_key(self, idempotency_key: str) -> StreamRow | None: ...

    async def unfinished(self, kind: int) -> list[tuple[int, bytes]]:
        """(sid, id) of streams not marked as ended, oldest first.

        Their end may still be in the log.
        """

    async def covered(self, sid: int) -> int:
        """The index after the stream's last segment."""

    async def segments(self, sid: int, start: int, limit: int) -> list[SegmentRow]:
        """Segments from the one that holds index `start` on, at most `limit`."""

    async def log_rows(self) -> list[int]:
        """The numbers of all rows of the log in order, for recovery."""

    async def log(self, rows: Sequence[int]) -> list[bytes]:
        """What is in these rows of the log; nothing for those that cannot be found."""

    async def last_numbers(self) -> tuple[int, int]:
        """The highest sid and the highest oid ever stored."""

    async def expired(self, kind: int, now_ms: int, limit: int) -> list[int]:
        """Sids of ended streams past their expiry, earliest first."""

    async def object_row(self, key: ObjectKey) -> ObjectRow | None: ...

    async def values(self, oid: int, names: Sequence[str]) -> list[tuple[str, bytes]]: ...

    async def value_range(self, oid: int, wanted: ValueRange) -> list[tuple[str, bytes]]: ...

    async def alarms(self, now_ms: int, limit: int) -> list[ObjectRow]:
        """Objects whose alarm is due, earliest first."""

    async def object_names(self, kind: str, after: str, limit: int) -> list[str]: ...

    @property
    def maintenance(self) -> Maintenance: ...

    async def close(self) -> None: ...


class Sizes(NamedTuple):
    """What a ledger takes on its disk, in bytes. `garbage`: removed streams have segments."""

    file_bytes: int
    free_bytes: int  # of the file, in pages that hold nothing
    wal_bytes: int
    unmoved_bytes: int  # pages at the end of the file that only the WAL has yet
    disk_bytes: int  # the whole disk where the file lies
    disk_free_bytes: int  # what else is free there
    garbage: bool
    wal_room_bytes: int = 0  # what the WAL can take within the space that is reserved for it

    @property
    def used_bytes(self) -> int:
        return self.file_bytes - self.free_bytes


class Maintenance(Protocol):
    """What it takes for a storage to be kept small; all of it only reads.

    The changes are made by `Commit`: `replaced` to `vacuum`.
    """

    def check(self) -> None:
        """`LedgerFailed` where what is written would be found by nobody."""

    def sizes(self) -> Sizes:
        """Measure; it takes some ten microseconds. `LedgerAway` where that fails."""

    @property
    def written_bytes(self) -> int:
        """Bytes that commits have written so far, about. It never goes back."""

    async def object_bytes(self) -> int:
        """What the streams and values of objects take of the file: estimated, all of them read."""

    async def stored_bytes(self, sid: int) -> int:
        """Bytes of a stream's segments."""

    async def to_pack(self, before_ms: int, limit: int) -> list[int]:
        """Ended streams that nobody has touched since then and that are not cold."""

    async def checkpoint(self, *, cut: bool) -> None:
        """Move the WAL into the file, which has its new size after the next commit.

        With `cut` a WAL file that has become long is cut off then, if no reader needs it.
        """

    async def fetch(self, *, reclaim: int, vacuum: int) -> None:
        """Have the pages in memory that a commit with these two will look at.

        What goes is old and lies on the disk alone; the writer must not wait for it there.
        """

    async def wait_for_checkpoint(self) -> None:
        """Wait until the WAL is not being moved, which makes every write wait for the disk."""
