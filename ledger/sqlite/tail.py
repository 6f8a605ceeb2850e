"""The tail of a stream: its live end in memory, with its watchers. Sans-I/O.

Four indexes, each at most the next: `first` (the oldest frame in memory), `stored` (earlier frames
are in segments), `released` (readers may see earlier frames) and `accepted` (the next index that a
producer may append). A frame between `stored` and `released` is in the log; the commit of a frame
between `released` and `accepted` is in flight.
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
"""Bytes of frames at which a tail becomes a segment."""
MAX_SEGMENT_BYTES = 64 * 1024
"""Maximum bytes of frames in a segment (more only for one frame), so that removal is quick."""
MAX_TAIL_BATCHES = 600
"""Age in log rows at which a tail becomes a segment, so that slow streams allow pruning."""


MAX_KNOWN_HEADS = 4096
_sizes: dict[bytes, int] = {}
"""Cache of checked headers: the size by header and tag, for frames that are not a StreamEnd.

Nearly every token has a cached header, and needs no further check.
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
    extras: dict[int, bytes] = field(
        default_factory=dict
    )  # by index, because few records have an extra
    unstored_bytes: int = 0
    oldest_seq: int = 0  # log row of the frame at `stored`
    used: bool = True  # since the last sweep; appends need not set it, see `swept`
    swept: int = 0  # value of `accepted` at the last sweep
    in_commit: int = 0  # epoch changes that are not stored yet
    stored_bytes: int = 0  # in segments
    room: int = sys.maxsize  # maximum of `unstored_bytes`
    spent: bool = False  # there is no room because the ledger is full
    watchers: dict[Callable[[], None], None] = field(default_factory=dict)  # an ordered set
    durability: Durability = field(init=False)  # copied here, because every append reads it

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
            Conflict: The stream has ended, or it is a StaleEpoch or a WrongIndex.
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
        if extra:
            self.extras[index] = extra
        self.unstored_bytes = unstored
        return size

    def _refuse_for_room(self) -> None:
        if self.spent:
            raise LedgerFull(
                "the ledger has no room left",
                hint="streams can only be ended now; the origin's log says what is short",
            )
        raise StreamFull(
            "the stream has reached its maximum size",
            hint="end it and use another stream, or raise ledger.max_stream_bytes",
        )

    def fit(self, max_stream_bytes: int, *, spent: bool) -> None:
        """Limit the stream to the available room; its end always fits."""
        self.spent = spent
        self.room = -1 if spent else max_stream_bytes - self.stored_bytes

    def withdraw(self, accepted: int) -> None:
        """Undo the acceptance of all records from index `accepted` on."""
        keep = accepted - self.first
        self.unstored_bytes -= sum(len(frame) for frame in self.frames[keep:])
        if len(self.frames) > keep:
            self.end_accepted = False  # only the last frame can be an end
        del self.frames[keep:], self.ids[keep:]
        self._keep_extras(self.first, accepted)
        self.accepted = accepted

    # ---- reading ----

    def wake(self) -> None:
        for watcher in tuple(self.watchers):  # watchers may be removed during the loop
            try:
                watcher()
            except Exception:  # other watchers and waiters must still be woken
                log.exception("stream.watcher_failed", stream=self.info.stream.hex())

    def take(self, start: int, limit: int) -> list[bytes] | None:
        """Return released frames from `start` on, or None if they are before the tail."""
        begin = start - self.first
        if begin < 0:
            return None
        end, released = begin + limit, self.released - self.first
        return self.frames[begin : end if end < released else released]

    def records(self, start: int, limit: int) -> list[Record] | None:
        """Return the records of the frames of `take`, with their ids and extra data, or None."""
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

    def was_stored(self, until: int) -> None:
        """Record that all frames before `until` are in segments.

        The last segment of a watched stream stays in memory, so that readers that are slightly
        behind need no storage. It does not if only age made it a segment: then readers are
        probably up to date, and there may be very many such streams.
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
        """Return True if the tail was appended to or read since the last call."""
        used = self.used or self.swept != self.accepted
        self.used, self.swept = False, self.accepted
        return used

    @property
    def idle(self) -> bool:
        """Return True if the tail can be evicted: everything is stored and nobody is watching."""
        at_rest = self.stored == self.accepted == self.released and not self.in_commit
        return at_rest and not self.watchers


def _ends(frame: bytes) -> bool:
    """Return True if a frame is a StreamEnd.

    Raises:
        FrameError: The bytes are not a logged frame.
    """
    size = len(frame)
    # Log rows and segments are split into frames by the lengths in their headers.
    if size < PREFIX_BYTES or size - HEADER_BYTES != _header(frame)[0] & LENGTH_MASK:
        raise FrameError(
            f"a frame of {size} bytes says another length",
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
