"""The bytes of a log row and of a segment.

Both begin with a CRC-32 of the rest and a count, then hold columns of integers and the frames
one after the other. A column is one byte that says its width (1, 2, 4 or 8 bytes, what its
largest number needs), then its numbers, little-endian: packed and read in a few C calls. A
frame measures itself, so that lengths are not needed, and the frames of a segment can be
sliced out without looking at the ids. The head of a log row has a checksum of its own, so that
of a row that has rotted it is known, most likely, which streams it has cost what.

    log row   crc u32 · crc of the head u32 · head · ids of each · ids · frames
    head      n u32 · sids · indexes
    segment   crc u32 · n u32 · bytes of frames u32 · frames · ids of each · ids
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from ledger.errors import Damaged
from ledger.interface import Record
from ledger.wire.codec import HEADER_BYTES, LENGTH_MASK

MAX_IDS = 2**16 - 1
"""Token ids of one record."""
MAX_ID = 2**32 - 1
CHECKSUM_HINT = "the file is damaged; restore it from a copy"

_U32 = struct.Struct("<I")
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}  # by width
_unpack_u32 = _U32.unpack_from
_HEAD_AT = 8


class Entry(NamedTuple):
    """One record in a log row: its stream (by the short local id), `at` which index."""

    sid: int
    at: int
    record: Record


def pack_batch(
    sids: bytes,
    indexes: Sequence[int],
    frames: Sequence[bytes],
    ids: Sequence[tuple[int, ...]],
) -> bytes:
    """The blob of one log row; `sids` are a column already."""
    head = _U32.pack(len(frames)) + sids + column(indexes)
    return _seal(_U32.pack(zlib.crc32(head)), head, pack_ids(ids), *frames)


def unpack_batch(blob: bytes, *, where: str) -> Iterator[Entry]:
    """The entries of a log row; raises `Damaged` naming `where` if it is damaged."""
    _check(blob, where)
    sids, indexes, at = _take_head(blob, _HEAD_AT)
    ids, at = take_ids(blob, at, len(sids))
    frames = split_frames(blob[at:])
    for sid, index, frame, some in zip(sids, indexes, frames, ids, strict=True):
        yield Entry(sid, index, Record(frame, some))


def places_of(blob: bytes) -> list[tuple[int, int]] | None:
    """(sid, index) of each record of a damaged log row; None where its head is damaged too."""
    try:
        sids, indexes, at = _take_head(blob, _HEAD_AT)
        whole = _unpack_u32(blob, 4)[0] == zlib.crc32(memoryview(blob)[_HEAD_AT:at])
    except (IndexError, KeyError, ValueError, struct.error):
        return None
    return list(zip(sids, indexes, strict=True)) if whole else None


def pack_segment(frames: Sequence[bytes], ids: Sequence[tuple[int, ...]]) -> bytes:
    """The blob of one segment."""
    joined = b"".join(frames)
    return _seal(_U32.pack(len(frames)), _U32.pack(len(joined)), joined, pack_ids(ids))


def segment_frames(blob: bytes, *, where: str) -> list[bytes]:
    """The frames of a segment; raises `Damaged` naming `where` if it is damaged."""
    _check(blob, where)
    (size,) = _unpack_u32(blob, 8)
    return split_frames(blob[12 : 12 + size])


def segment_ids(blob: bytes) -> list[tuple[int, ...]]:
    """The ids of a segment whose frames have been read, so that its checksum holds."""
    (count,) = _unpack_u32(blob, 4)
    (size,) = _unpack_u32(blob, 8)
    return take_ids(blob, 12 + size, count)[0]


def split_frames(data: bytes) -> list[bytes]:
    """Whole frames that lie one after the other; what a checksum has vouched for."""
    frames, at, end = [], 0, len(data)
    while at < end:
        beyond = at + HEADER_BYTES + (_unpack_u32(data, at)[0] & LENGTH_MASK)
        frames.append(data[at:beyond])
        at = beyond
    return frames


def pack_ids(ids: Sequence[tuple[int, ...]]) -> bytes:
    try:
        flat = [only for (only,) in ids]
        counts = b"\1" * (1 + len(ids))  # as `column` would, but that is most of a segment's time
    except ValueError:
        flat = list(chain.from_iterable(ids))
        counts = column(list(map(len, ids)))
    return counts + column(flat)


def take_ids(blob: bytes, at: int, count: int) -> tuple[list[tuple[int, ...]], int]:
    counts, at = take_column(blob, at, count)
    flat, at = take_column(blob, at, sum(counts))
    ids, begin = [], 0
    for length in counts:
        ids.append(flat[begin : begin + length])
        begin += length
    return ids, at


def column(values: Sequence[int]) -> bytes:
    most = max(values, default=0)
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4 if most < 1 << 32 else 8
    return struct.pack(f"<B{len(values)}{_CODES[width]}", width, *values)


def take_column(blob: bytes, at: int, count: int) -> tuple[tuple[int, ...], int]:
    numbers = struct.Struct(f"<{count}{_CODES[blob[at]]}")
    return numbers.unpack_from(blob, at + 1), at + 1 + numbers.size


def _take_head(blob: bytes, at: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    (count,) = _unpack_u32(blob, at)
    sids, at = take_column(blob, at + 4, count)
    indexes, at = take_column(blob, at, count)
    return sids, indexes, at


def _seal(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return _U32.pack(zlib.crc32(body)) + body


def _check(blob: bytes, where: str) -> None:
    # SQLite gives NULL, a number or a text where the page of a blob has rotted.
    whole = isinstance(blob, bytes) and len(blob) >= 8
    if not whole or _unpack_u32(blob)[0] != zlib.crc32(memoryview(blob)[4:]):
        raise Damaged(f"{where} does not match its checksum", hint=CHECKSUM_HINT)
