"""The live end of one stream in memory: what is accepted, released, stored; who watches.

Sans-I/O. Four indexes, each at most the next: `first` (the oldest frame in memory),
`stored` (segments hold everything before it), `released` (readers may see everything
before it) and `accepted` (the next index a producer may append). Between `stored` and
`released` a frame is in the log, between `released` and `accepted` its commit is in flight.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import structlog

from tailrace.ledger.errors import FrameError, LedgerFull, StreamFull, TooLarge
from tailrace.ledger.frame import HEADER_BYTES, LOGGED, TAG_OFFSET, Durability, StreamEnd
from tailrace.ledger.interface import Record, StreamInfo, why_refused
from tailrace.ledger.sqlite.encoding import (
    MAX_EXTRA_BYTES,
    MAX_ID,
    MAX_IDS,
    PLAIN,
    pack_segment,
)
from tailrace.ledger.sqlite.storage import SegmentRow
from tailrace.ledger.wire.codec import CORR_OFFSET, LENGTH_MASK, PREFIX_BYTES

log = structlog.get_logger("ledger")

SEGMENT_BYTES = 4 * 1024
"""A tail of this many frame bytes becomes a segment."""
MAX_SEGMENT_BYTES = 64 * 1024
"""Frame bytes of one segment, unless a single frame has more: so that it goes quickly, too."""
MAX_TAIL_BATCHES = 600
"""A tail whose oldest record is this many log rows old becomes a segment, so that one
slow stream does not keep the log from being pruned."""


MAX_KNOWN_HEADS = 4096
_sizes: dict[bytes, int] = {}
"""By header and tag, the size of frames that were found to be whole and no end, of so many
heads at most: nearly every token has one of them, and need not be looked at closer."""
_header = struct.Struct("<I").unpack_from


@dataclass(slots=True, eq=False)
class Tail:
    """One resident stream. `sid` is its short local id; `frames[0]` has index `first`."""

    sid: int
    info: StreamInfo
    ttl_ms: int
    epoch: int
    first: int
    stored: int
    released: int
    accepted: int
    end_accepted: bool = False
    gone: bool = False
    frames: list[bytes] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    extras: list[bytes] = field(default_factory=list)
    unstored_bytes: int = 0
    oldest_seq: int = 0  # the log row of the frame at `stored`
    used: bool = True  # since the last sweep; so it was if `swept`, where it was then, differs
    swept: int = 0
    in_commit: int = 0  # changes of its epoch that are not stored yet
    stored_bytes: int = 0  # in segments
    room: int = sys.maxsize  # what `unstored_bytes` may grow to
    spent: bool = False  # the room is gone because the ledger's is
    watchers: dict[Callable[[], None], None] = field(default_factory=dict)  # a set in order
    durability: Durability = field(init=False)  # at hand: every append asks for it

    def __post_init__(self) -> None:
        self.durability = self.info.durability

    @classmethod
    def at(cls, sid: int, info: StreamInfo, ttl_ms: int) -> Tail:
        """The tail of a stream of which segments hold everything so far."""
        at = info.next_index
        return cls(sid, info, ttl_ms, info.epoch, at, at, at, at, end_accepted=info.ended)

    # ---- producing ----

    def accept(
        self, epoch: int, index: int, frame: bytes, ids: tuple[int, ...], extra: bytes = b""
    ) -> int:
        """Take the next record, and return the bytes of its frame.

        Raises `StaleEpoch`, `WrongIndex`, `Conflict`, `FrameError` or `TooLarge`.
        """
        if epoch != self.epoch or index != self.accepted or self.end_accepted:
            here = self.epoch, self.accepted, self.end_accepted
            raise why_refused(epoch, index, *here)
        if len(ids) != 1 or not 0 <= ids[0] <= MAX_ID:
            _check_ids(ids)
        if extra and len(extra) > MAX_EXTRA_BYTES:
            raise TooLarge(
                f"{len(extra)} bytes beside a record",
                field="extra",
                hint=f"at most {MAX_EXTRA_BYTES}",
            )
        size = len(frame)
        ends = _sizes.get(frame[:CORR_OFFSET]) != size and _ends(frame)
        unstored = self.unstored_bytes + size
        if ends:
            self.end_accepted = True
        elif unstored > self.room:
            self._refuse_for_room()
        self.accepted = index + 1
        self.frames.append(frame)
        self.ids.append(ids)
        self.extras.append(extra)
        self.unstored_bytes = unstored
        return size

    def _refuse_for_room(self) -> None:
        if self.spent:
            raise LedgerFull(
                "the ledger has no room left",
                hint="a stream can only be ended now; see the origin's log for what is short",
            )
        raise StreamFull(
            "the stream is as large as it may be",
            hint="end it and go on in another one, or raise ledger.max_stream_bytes",
        )

    def fit(self, max_stream_bytes: int, *, spent: bool) -> None:
        """Take no more than there is room for, from now on; its end always fits."""
        self.spent = spent
        self.room = -1 if spent else max_stream_bytes - self.stored_bytes

    def withdraw(self, accepted: int) -> None:
        """Undo the acceptance of everything from index `accepted` on."""
        keep = accepted - self.first
        self.unstored_bytes -= sum(len(frame) for frame in self.frames[keep:])
        if len(self.frames) > keep:
            self.end_accepted = False  # only a last frame can have been an end
        del self.frames[keep:], self.ids[keep:], self.extras[keep:]
        self.accepted = accepted

    # ---- reading ----

    def wake(self) -> None:
        for watcher in tuple(self.watchers):  # a watcher may leave while all are woken
            try:
                watcher()
            except Exception:  # the others, and who waits for the commit, are told all the same
                log.exception("stream.watcher_failed", stream=self.info.stream.hex())

    def take(self, start: int, limit: int) -> list[bytes] | None:
        """Released frames from `start` on, or None where they lie before the tail."""
        begin = start - self.first
        if begin < 0:
            return None
        end, released = begin + limit, self.released - self.first
        return self.frames[begin : end if end < released else released]

    def records(self, start: int, limit: int) -> list[Record] | None:
        """Return the same frames with what lies beside them."""
        frames = self.take(start, limit)
        if frames is None:
            return None
        begin = start - self.first
        return list(map(Record, frames, self.ids[begin:], self.extras[begin:]))

    @property
    def ended(self) -> bool:
        return self.end_accepted and self.released == self.accepted

    def snapshot(self) -> StreamInfo:
        """The stream as a reader may know it at this moment."""
        return replace(self.info, epoch=self.epoch, next_index=self.released, ended=self.ended)

    # ---- storing ----

    @property
    def ripe(self) -> bool:
        """Whether it should become a segment for its size, or because nothing will follow."""
        return self.unstored_bytes >= SEGMENT_BYTES or self.end_accepted

    def segments(self) -> list[SegmentRow]:
        """What no segment holds yet, as one segment or, where it is much, as several."""
        cuts, size = [self.stored - self.first], 0
        if self.unstored_bytes > MAX_SEGMENT_BYTES:
            for at in range(cuts[0], len(self.frames)):
                if size and size + len(self.frames[at]) > MAX_SEGMENT_BYTES:
                    cuts.append(at)
                    size = 0
                size += len(self.frames[at])
        rows = []
        for begin, end in pairwise([*cuts, len(self.frames)]):
            frames, ids = self.frames[begin:end], self.ids[begin:end]
            blob = pack_segment(frames, ids, self.extras[begin:end])
            rows.append(SegmentRow(self.sid, self.first + begin, end - begin, PLAIN, blob))
        return rows

    def was_stored(self, until: int) -> None:
        """A segment holds everything before `until` now.

        While somebody watches, the segment before it stays in memory, so that a reader that
        is a little behind need not ask storage. Where age alone made it a segment, readers are
        at the tip, most likely, and there may be very many such streams.
        """
        keep_from = self.stored if self.watchers and self.ripe else until
        for column in (self.frames, self.ids, self.extras):
            del column[: keep_from - self.first]
        self.first, self.stored = keep_from, until
        before = self.unstored_bytes
        self.unstored_bytes = sum(len(frame) for frame in self.frames[until - keep_from :])
        self.stored_bytes += before - self.unstored_bytes
        self.room -= before - self.unstored_bytes

    def skip(self, until: int) -> None:
        """Go on at index `until` with nothing in memory: what lies before is stored, or lost."""
        self.stored_bytes += self.unstored_bytes
        self.frames, self.ids, self.extras, self.unstored_bytes = [], [], [], 0
        self.first = self.stored = self.released = self.accepted = until

    def was_used(self) -> bool:
        """Whether anything came, or anybody asked, since this was last called."""
        used = self.used or self.swept != self.accepted
        self.used, self.swept = False, self.accepted
        return used

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost by forgetting it until somebody asks again."""
        at_rest = self.stored == self.accepted == self.released and not self.in_commit
        return at_rest and not self.watchers


def _ends(frame: bytes) -> bool:
    """Whether it is a StreamEnd; `FrameError` for what can be none of a log's frames."""
    size = len(frame)
    # Log rows and segments are cut into frames by the lengths that these say.
    if size < PREFIX_BYTES or size - HEADER_BYTES != _header(frame)[0] & LENGTH_MASK:
        raise FrameError(
            f"a frame of {size} bytes says another length",
            field="header.length",
            offset=0,
            hint="one whole frame for each record",
        )
    tag = frame[TAG_OFFSET]
    if tag not in LOGGED:
        raise FrameError(f"a frame of tag {tag} is never logged", field="tag", offset=TAG_OFFSET)
    if tag != StreamEnd.tag and len(_sizes) < MAX_KNOWN_HEADS:
        _sizes[frame[:CORR_OFFSET]] = size
    return tag == StreamEnd.tag


def _check_ids(ids: tuple[int, ...]) -> None:
    if ids and (len(ids) > MAX_IDS or max(ids) > MAX_ID or min(ids) < 0):
        raise TooLarge(
            "a record's token ids are out of range",
            field="ids",
            hint=f"at most {MAX_IDS} ids from 0 to {MAX_ID}",
        )
