"""What a tail becomes when it is stored."""

from __future__ import annotations

from ledger.sqlite.record import pack_segment
from ledger.sqlite.storage import SegmentRow
from ledger.sqlite.tail import Tail

MAX_SEGMENT_BYTES = 64 * 1024
"""Frame bytes of one segment, unless a single frame has more: so that it goes quickly, too."""


def segments_of(tail: Tail) -> list[SegmentRow]:
    """What no segment holds yet, as one segment or, where it is much, as several."""
    frames, ids = tail.unstored()
    if tail.unstored_bytes <= MAX_SEGMENT_BYTES:
        return [_segment(tail, frames, ids, 0, len(frames))]
    rows: list[SegmentRow] = []
    begin = size = 0
    for at, frame in enumerate(frames):
        if size and size + len(frame) > MAX_SEGMENT_BYTES:
            rows.append(_segment(tail, frames, ids, begin, at))
            begin, size = at, 0
        size += len(frame)
    rows.append(_segment(tail, frames, ids, begin, len(frames)))
    return rows


def _segment(
    tail: Tail, frames: list[bytes], ids: list[tuple[int, ...]], begin: int, end: int
) -> SegmentRow:
    blob = pack_segment(frames[begin:end], ids[begin:end])
    return SegmentRow(tail.sid, tail.stored + begin, end - begin, 0, blob)
