"""The live end of one stream in memory: what is accepted, what is released, who watches.

Sans-I/O. Two numbers move: `accepted`, the next index a producer may append, and
`released`, the next index readers may see. A record lies between them while its group
commit is in flight. `records` holds the released records from index `first` on that are
in the log but not yet in a segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ledger.errors import Conflict, StaleEpoch, WrongIndex
from ledger.frame import Tag, tag_of
from ledger.interface import Append, Record, StreamInfo

SEGMENT_BYTES = 4 * 1024
"""A tail of this many frame bytes becomes a segment."""
MAX_TAIL_BATCHES = 600
"""A tail whose oldest record is this many log rows old becomes a segment, so that one
slow stream does not keep the log from being pruned."""


@dataclass(slots=True)
class Tail:
    """One resident stream. `sid` is its short local id; `first` the index of `records[0]`."""

    sid: int
    info: StreamInfo
    first: int
    accepted: int
    released: int
    ttl_ms: int
    end_accepted: bool = False
    records: list[Record] = field(default_factory=list)
    record_bytes: int = 0
    oldest_seq: int = 0
    epoch: int = 1
    watchers: list[Callable[[], None]] = field(default_factory=list)

    def accept(self, append: Append) -> None:
        """Reserve the append's index, or raise `StaleEpoch`, `WrongIndex` or `Conflict`."""
        if append.epoch != self.epoch:
            raise StaleEpoch(
                f"epoch {append.epoch} was replaced by epoch {self.epoch}",
                field="epoch",
                hint="another producer owns this stream now; stop appending",
            )
        if self.end_accepted:
            raise Conflict("the stream has ended", field="index", hint="nothing follows its end")
        if append.index != self.accepted:
            raise WrongIndex(
                f"index {append.index} is not the next one",
                field="index",
                hint=f"the next index is {self.accepted}",
            )
        self.accepted += 1
        self.end_accepted = tag_of(append.record.frame) == Tag.STREAM_END

    def release(self, record: Record, seq: int) -> None:
        """Make the next accepted record readable; it was written in log row `seq`."""
        if not self.records:
            self.oldest_seq = seq
        self.records.append(record)
        self.record_bytes += len(record.frame)
        self.released += 1

    def wake(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()

    def take(self, start: int, limit: int) -> list[Record] | None:
        """Records from `start` on, or None where they lie before the tail."""
        if start < self.first:
            return None
        return self.records[start - self.first : start - self.first + limit]

    @property
    def ended(self) -> bool:
        return self.end_accepted and self.released == self.accepted

    def wants_segment(self, seq: int) -> bool:
        """Whether the tail should become a segment now that log row `seq` is written."""
        if not self.records:
            return False
        aged = seq - self.oldest_seq >= MAX_TAIL_BATCHES
        return self.record_bytes >= SEGMENT_BYTES or aged or self.ended

    def drop(self, count: int) -> None:
        """Forget the first `count` records: a segment holds them now."""
        del self.records[:count]
        self.first += count
        self.record_bytes = sum(len(record.frame) for record in self.records)

    def snapshot(self) -> StreamInfo:
        """The stream as a reader may know it at this moment."""
        info = self.info
        return StreamInfo(
            info.stream,
            self.epoch,
            self.released,
            self.ended,
            info.durability,
            info.recipe,
            info.created_ms,
        )
