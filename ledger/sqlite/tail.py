"""The tail of a stream: its live end in memory, with its watchers. Sans-I/O.

A tail has four indexes, in ascending order: `first` (the oldest frame in memory), `stored` (earlier
frames are in segments), `released` (readers may see earlier frames) and `accepted` (the next index
that a producer may append). A frame between `stored` and `released` is in the log; the commit of a
frame between `released` and `accepted` is in flight.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import structlog

from tailrace.ledger.branch import Part
from tailrace.ledger.end_usage import usage_of
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
from tailrace.ledger.usage import Usage, delivered
from tailrace.ledger.wire.codec import CORR_OFFSET, LENGTH_MASK, PREFIX_BYTES

log = structlog.get_logger("ledger")

SEGMENT_BYTES = 4 * 1024
"""Bytes of frames at which a tail becomes a segment."""
MAX_SEGMENT_BYTES = 64 * 1024
"""Maximum bytes of frames in a segment, so that removing one is quick.

A single larger frame has a segment of its own.
"""
MAX_TAIL_BATCHES = 600
"""Number of log rows after which a tail becomes a segment, however small it is.

Otherwise a slow stream would prevent the pruning of all later log rows.
"""


MAX_KNOWN_HEADS = 4096
_sizes: dict[bytes, int] = {}
"""Cache of valid frame beginnings: maps a frame's header and tag to the frame's size in bytes.

A frame whose beginning is in the cache, as for nearly all Tokens, is not a StreamEnd and needs no
further check.
"""
_header = struct.Struct("<I").unpack_from


@dataclass(slots=True, eq=False)
class Tail:
    """The tail of a stream. `sid` is its short local id; `frames[0]` has index `first`."""

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
    # Data that the producer stored with a record (`Record.extra`), by the record's index.
    extras: dict[int, bytes] = field(default_factory=dict)
    unstored_bytes: int = 0  # total bytes of the frames from index `stored` on
    oldest_seq: int = 0  # number of the log row that has the frame at index `stored`
    # True if the tail was read since the last sweep. Appends are detected by `swept` instead.
    used: bool = True
    swept: int = 0  # value of `accepted` at the last sweep
    in_commit: int = 0  # number of epoch changes that are not stored yet
    stored_bytes: int = 0  # bytes of the stream's segments
    room: int = sys.maxsize  # maximum of `unstored_bytes`; an append beyond it is refused
    parts: tuple[Part, ...] = ()  # where the inherited records of a branch are
    delivered_tokens: int = 0  # output tokens that were delivered after the end was stored
    spent: bool = False  # True if `room` is negative because the ledger is full
    # Used as a set that keeps the order of insertion.
    watchers: dict[Callable[[], None], None] = field(default_factory=dict)
    durability: Durability = field(init=False)  # `info.durability`, copied for faster access

    def __post_init__(self) -> None:
        self.durability = self.info.durability

    @classmethod
    def at(cls, sid: int, info: StreamInfo, ttl_ms: int) -> Tail:
        """Create the tail of a stream whose records are all in segments."""
        at = info.next_index
        return cls(sid, info, ttl_ms, info.epoch, at, at, at, at, end_accepted=info.ended)

    # ---- producing ----

    def accept(
        self, epoch: int, index: int, frame: bytes, ids: tuple[int, ...], extra: bytes = b""
    ) -> int:
        """Accept the next record and return the size of its frame in bytes.

        Raises:
            Conflict: The stream has ended.
            StaleEpoch: Another producer has replaced the one that appends.
            WrongIndex: `index` is not the next index.
            FrameError: The frame is malformed.
            TooLarge: The record or the stream would be too large.
        """
        if epoch != self.epoch or index != self.accepted or self.end_accepted:
            here = self.epoch, self.accepted, self.end_accepted
            raise why_refused(epoch, index, *here)
        if len(ids) != 1 or not 0 <= ids[0] <= MAX_ID:
            _check_ids(ids)
        if extra and len(extra) > MAX_EXTRA_BYTES:
            raise TooLarge(
                f"the extra data of a record has {len(extra)} bytes",
                field="extra",
                hint=f"at most {MAX_EXTRA_BYTES} bytes are possible",
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
        if extra:
            self.extras[index] = extra
        self.unstored_bytes = unstored
        return size

    def _refuse_for_room(self) -> None:
        if self.spent:
            raise LedgerFull(
                "the ledger has no room left",
                hint="streams can only be ended now; the log of the origin says what is full",
            )
        raise StreamFull(
            "the stream has reached its maximum size",
            hint="end it and use another stream, or raise ledger.max_stream_bytes",
        )

    def fit(self, max_stream_bytes: int, *, spent: bool) -> None:
        """Limit the stream's size; with `spent` it can only end. A StreamEnd is always accepted."""
        self.spent = spent
        self.room = -1 if spent else max_stream_bytes - self.stored_bytes

    def withdraw(self, accepted: int) -> None:
        """Undo the acceptance of all records from index `accepted` on."""
        keep = accepted - self.first
        self.unstored_bytes -= sum(len(frame) for frame in self.frames[keep:])
        if len(self.frames) > keep:
            # Only the last frame can be a StreamEnd, and the last frame is removed here.
            self.end_accepted = False
        del self.frames[keep:], self.ids[keep:]
        self._keep_extras(self.first, accepted)
        self.accepted = accepted

    # ---- reading ----

    def wake(self) -> None:
        for watcher in tuple(self.watchers):  # watchers may be removed during the loop
            try:
                watcher()
            except Exception:  # the other watchers must still be woken
                log.exception("stream.watcher_failed", stream=self.info.stream.hex())

    def take(self, start: int, limit: int) -> list[bytes] | None:
        """Return released frames from `start` on, or None if they are before the tail."""
        begin = start - self.first
        if begin < 0:
            return None
        end, released = begin + limit, self.released - self.first
        return self.frames[begin : end if end < released else released]

    def records(self, start: int, limit: int) -> list[Record] | None:
        """Return released records from `start` on, or None if they are before the tail."""
        frames = self.take(start, limit)
        if frames is None:
            return None
        begin = start - self.first
        extras = [self.extras.get(start + at, b"") for at in range(len(frames))]
        return list(map(Record, frames, self.ids[begin:], extras))

    @property
    def ended(self) -> bool:
        return self.end_accepted and self.released == self.accepted

    def snapshot(self) -> StreamInfo:
        """Return the stream as a reader sees it now."""
        return replace(self.info, epoch=self.epoch, next_index=self.released, ended=self.ended)

    # ---- storing ----

    @property
    def is_due(self) -> bool:
        """True if the tail is due for a segment: it is large, or the stream has ended."""
        return self.unstored_bytes >= SEGMENT_BYTES or self.end_accepted

    def segments(self) -> list[SegmentRow]:
        """Return the records that are in no segment yet, as one or several segments."""
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
            extras: list[bytes] = []
            if self.extras:
                extras = [self.extras.get(self.first + at, b"") for at in range(begin, end)]
            blob = pack_segment(frames, ids, extras)
            rows.append(SegmentRow(self.sid, self.first + begin, end - begin, PLAIN, blob))
        return rows

    def usage(self) -> Usage | None:
        """Return the usage of a stream whose end was accepted, and is not in a segment yet."""
        last = self.accepted - 1
        end = Record(self.frames[-1], self.ids[-1], self.extras.get(last, b""))
        usage = usage_of(self.info.stream, end) if end.extra else None
        return usage and delivered(usage, self.delivered_tokens)

    def was_stored(self, until: int) -> None:
        """Record that all frames before `until` are in segments.

        The frames of a watched stream's last segment stay in memory, so that readers that are
        slightly behind need not read from storage. If the tail became a segment only because of
        its age, these frames do not stay: the readers are probably up to date, and there may be
        many such streams.
        """
        keep_from = self.stored if self.watchers and self.is_due else until
        del self.frames[: keep_from - self.first], self.ids[: keep_from - self.first]
        self._keep_extras(keep_from, self.accepted)
        self.first, self.stored = keep_from, until
        before = self.unstored_bytes
        self.unstored_bytes = sum(len(frame) for frame in self.frames[until - keep_from :])
        self.stored_bytes += before - self.unstored_bytes
        self.room -= before - self.unstored_bytes

    def skip(self, until: int) -> None:
        """Continue at index `until` with an empty tail: earlier frames are stored or lost."""
        self.stored_bytes += self.unstored_bytes
        self.frames, self.ids, self.extras, self.unstored_bytes = [], [], {}, 0
        self.first = self.stored = self.released = self.accepted = until

    def _keep_extras(self, begin: int, end: int) -> None:
        if self.extras:
            self.extras = {at: extra for at, extra in self.extras.items() if begin <= at < end}

    def was_used(self) -> bool:
        """Return True if the stream was appended to or read since the last call."""
        used = self.used or self.swept != self.accepted
        self.used, self.swept = False, self.accepted
        return used

    @property
    def idle(self) -> bool:
        """Return True if the tail can be evicted: all is stored, and the tail has no watchers."""
        at_rest = self.stored == self.accepted == self.released and not self.in_commit
        return at_rest and not self.watchers


def _ends(frame: bytes) -> bool:
    """Return True if a frame is a StreamEnd.

    Raises:
        FrameError: The bytes are not a logged frame.
    """
    size = len(frame)
    # The length must be right, because it is used to split log rows and segments into frames.
    if size < PREFIX_BYTES or size - HEADER_BYTES != _header(frame)[0] & LENGTH_MASK:
        raise FrameError(
            f"the length in the header of a frame does not match its {size} bytes",
            field="header.length",
            offset=0,
            hint="a record must be one whole frame",
        )
    tag = frame[TAG_OFFSET]
    if tag not in LOGGED:
        raise FrameError(f"a frame with tag {tag} is never logged", field="tag", offset=TAG_OFFSET)
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
