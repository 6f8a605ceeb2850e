"""Encoding of log rows and segments.

Each begins with a CRC-32 of the rest. Log rows and plain segments then have a count, columns of
integers, and the frames. A column is one byte with the width of its numbers (1, 2, 4 or 8 bytes, as
the largest one needs), then the numbers, little-endian. So a few C calls encode or decode a column.
Frames have their lengths in their headers, so a segment's frames can be read without its ids. The
head of a log row has its own checksum, so that the streams of a damaged row are usually known.

    log row   crc u32 · crc of the head u32 · head · ids of each · ids · extras · frames
    head      n u32 · sids · indexes
    segment   crc u32 · n u32 · bytes of frames u32 · frames · ids of each · ids · extras
    extras    n u32 · position of each · bytes of each · the extras, concatenated

A cold segment stores many records of one stream compactly. An entry describes a record without its
index: it has the record's ids and its text. If the Token frame cannot be restored exactly from text
and index, the entry has the whole frame instead of the text. Records with equal entries share one.
Entries are stored column by column and compressed by zstd. The checksum covers the zstd frame and
the row's `first` and `length`.

    cold segment   crc u32 · zstd frame
    payload        entries u32 · entry of each record: 0 the next new one, n the nth
                   · 2 * bytes + (1 if whole frame) of each entry
                   · number of ids of each entry · ids · extras of the records · texts and frames

Extras are few, and are stored with the positions of their records. Layout 6 had none: its segments
(`PLAIN_6`, `COLD_6`) end where extras would begin, and are read with `unmarked`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import zstandard

from tailrace.ledger.errors import Damaged
from tailrace.ledger.interface import Record
from tailrace.ledger.marked_ids import unmarked
from tailrace.ledger.sqlite.storage import SegmentRow
from tailrace.ledger.wire.bare import encode_uint
from tailrace.ledger.wire.codec import HEADER_BYTES, LENGTH_MASK, VERSION_BITS

MAX_IDS = 2**16 - 1
"""Maximum token ids of a record."""
MAX_ID = 2**32 - 1
PLAIN_6, COLD_6, PLAIN, COLD = range(4)
"""Values of the column `segment.coding`. `PLAIN_6` and `COLD_6` are of layout 6, and only read."""
COLD_CODINGS = (COLD_6, COLD)
MAX_EXTRA_BYTES = 64 * 1024
"""Maximum extra bytes of a record."""
LEVEL = 3
"""Compression level of zstd. Level 19 saves 3 % more and takes twice as long."""
MAX_PAYLOAD_BYTES = 2 << 20
"""Maximum bytes of a decompressed cold segment, even if each id takes 8 bytes."""
MAX_TEXT_BYTES = 127
"""Maximum bytes of a text in an entry, so that its encoded length takes one byte."""
CHECKSUM_HINT = "the file is damaged; restore it from a copy"

_U32 = struct.Struct("<I")
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}  # maps the width of a number to its struct code
_unpack_u32 = _U32.unpack_from
_HEAD_AT = 8
_NO_SEGMENT = (IndexError, KeyError, StopIteration, TypeError, ValueError, struct.error)
_PLACE = struct.Struct("<QQ")  # `first` and `length` of a segment's row
_HEAD = struct.Struct("<IBIB")  # the header, the tag, the corr and the length of the text
_HEAD_SIZE = VERSION_BITS + _HEAD.size - HEADER_BYTES
_NO_EXTRAS = _U32.pack(0)
# The bytes that encode seven bits of a varint: `_LAST` in its last byte, `_NOT_LAST` in the others.
_LAST = [bytes((low,)) for low in range(128)]
_NOT_LAST = [bytes((low | 128,)) for low in range(128)]


class Entry(NamedTuple):
    """A record in a log row, with the short local id of its stream and its index `at`."""

    sid: int
    at: int
    record: Record


def pack_batch(
    sids: bytes,
    indexes: Sequence[int],
    frames: Sequence[bytes],
    ids: Sequence[tuple[int, ...]],
    extras: Sequence[bytes] = (),
) -> bytes:
    """Encode a log row; `sids` is already encoded as a column."""
    head = _U32.pack(len(frames)) + sids + column(indexes)
    return _seal(_U32.pack(zlib.crc32(head)), head, pack_ids(ids), pack_extras(extras), *frames)


def unpack_batch(blob: bytes, *, where: str) -> Iterator[Entry]:
    """Yield the entries of a log row.

    Raises:
        Damaged: The row is damaged; the error names `where`.
    """
    _check(blob, where)
    sids, indexes, at = _take_head(blob, _HEAD_AT)
    ids, at = take_ids(blob, at, len(sids))
    extras, at = take_extras(blob, at, len(sids))
    frames = split_frames(blob[at:])
    records = map(Record, frames, ids, extras)
    yield from map(Entry, sids, indexes, records)


def upgraded_batch(blob: bytes) -> bytes:
    """Convert a log row of layout 6 to the current layout; a damaged one stays as it is."""
    try:
        _check(blob, "")
    except Damaged:
        return blob
    sids, indexes, at = _take_head(blob, _HEAD_AT)
    ids, at = take_ids(blob, at, len(sids))
    records = map(unmarked, split_frames(blob[at:]), ids)
    frames, ids, extras = map(list, zip(*records, strict=True))
    return pack_batch(column(sids), indexes, frames, ids, extras)


def places_of(blob: bytes) -> list[tuple[int, int]] | None:
    """Return (sid, index) of each record of a damaged log row; None if its head is damaged."""
    try:
        sids, indexes, at = _take_head(blob, _HEAD_AT)
        whole = _unpack_u32(blob, 4)[0] == zlib.crc32(memoryview(blob)[_HEAD_AT:at])
    except (IndexError, KeyError, ValueError, struct.error):
        return None
    return list(zip(sids, indexes, strict=True)) if whole else None


def pack_segment(
    frames: Sequence[bytes], ids: Sequence[tuple[int, ...]], extras: Sequence[bytes] = ()
) -> bytes:
    """Encode a plain segment."""
    joined = b"".join(frames)
    sizes = _U32.pack(len(frames)), _U32.pack(len(joined))
    return _seal(*sizes, joined, pack_ids(ids), pack_extras(extras))


def segment_frames(blob: bytes, *, where: str) -> list[bytes]:
    """Return the frames of a segment.

    Raises:
        Damaged: The segment is damaged; the error names `where`.
    """
    _check(blob, where)
    (size,) = _unpack_u32(blob, 8)
    return split_frames(blob[12 : 12 + size])


def segment_ids(blob: bytes) -> tuple[list[tuple[int, ...]], int]:
    """Return the ids of a segment, and the offset where they end.

    The caller has already read the frames, which verifies the segment's checksum.
    """
    (count,) = _unpack_u32(blob, 4)
    (size,) = _unpack_u32(blob, 8)
    return take_ids(blob, 12 + size, count)


def split_frames(data: bytes) -> list[bytes]:
    """Split concatenated frames; the caller has verified their checksum."""
    frames, at, end = [], 0, len(data)
    while at < end:
        beyond = at + HEADER_BYTES + (_unpack_u32(data, at)[0] & LENGTH_MASK)
        frames.append(data[at:beyond])
        at = beyond
    return frames


def pack_ids(ids: Sequence[tuple[int, ...]]) -> bytes:
    try:
        flat = [only for (only,) in ids]
        # These are the bytes that `column` returns for a list of ones. Calling `column` would take
        # most of the time.
        counts = b"\1" * (1 + len(ids))
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


def pack_extras(extras: Sequence[bytes]) -> bytes:
    """Encode the extras with their positions; most records have none."""
    if not any(extras):
        return _NO_EXTRAS
    places = [at for at, extra in enumerate(extras) if extra]
    some = [extras[at] for at in places]
    head = _U32.pack(len(places)) + column(places) + column(list(map(len, some)))
    return head + b"".join(some)


def take_extras(blob: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    """Return the extra of each of `count` records, and the offset where the extras end."""
    extras = [b""] * count
    (some,) = _unpack_u32(blob, at)
    at += _U32.size
    if some:
        places, at = take_column(blob, at, some)
        sizes, at = take_column(blob, at, some)
        for place, size in zip(places, sizes, strict=True):
            extras[place] = blob[at : at + size]
            at += size
    return extras, at


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
    # SQLite returns NULL, a number or a text for a blob on a damaged page.
    whole = isinstance(blob, bytes) and len(blob) >= 8
    if not whole or _unpack_u32(blob)[0] != zlib.crc32(memoryview(blob)[4:]):
        raise Damaged(f"{where} does not match its checksum", hint=CHECKSUM_HINT)


# ---- segments, plain and cold ----


class Unpacked(NamedTuple):
    """The records of a segment as columns."""

    frames: list[bytes]
    ids: list[tuple[int, ...]]
    extras: list[bytes]

    @classmethod
    def of_layout_6(cls, frames: Sequence[bytes], ids: Sequence[tuple[int, ...]]) -> Unpacked:
        """Return the columns of records of layout 6, whose ids may have marks (`marked_ids`)."""
        records = list(map(unmarked, frames, ids))
        return cls(*map(list, zip(*records, strict=True))) if records else cls([], [], [])

    def records(self) -> list[Record]:
        return list(map(Record, self.frames, self.ids, self.extras))


def unpack_segment(row: SegmentRow, *, where: str) -> Unpacked:
    """Decode a plain or cold segment.

    Raises:
        Damaged: The segment is damaged; the error names `where`.
    """
    if row.coding in COLD_CODINGS:
        return unpack_cold(row, where=where)
    frames = segment_frames(row.records, where=where)
    ids, at = segment_ids(row.records)
    if row.coding == PLAIN_6:
        return Unpacked.of_layout_6(frames, ids)
    return Unpacked(frames, ids, take_extras(row.records, at, len(frames))[0])


def pack_cold(sid: int, first: int, records: Unpacked) -> SegmentRow:
    """Encode consecutive records as a cold segment; the first has index `first`."""
    entries: dict[tuple[bytes, bool, tuple[int, ...]], int] = {}
    places: list[int] = []
    tails = index_tails(first, len(records.frames))
    for frame, ids, tail in zip(records.frames, records.ids, tails, strict=True):
        text = frame[_HEAD.size : -len(tail)]
        whole = len(text) > MAX_TEXT_BYTES or token_frame(text, tail) != frame
        entry = frame if whole else text, whole, ids
        places.append(entries.get(entry, 0))
        if not places[-1]:
            entries[entry] = len(entries) + 1
    packed = _compressed(
        _U32.pack(len(entries)) + column(places),
        column([len(kept) << 1 | whole for kept, whole, _ in entries]),
        pack_ids([ids for _, _, ids in entries]),
        pack_extras(records.extras),
        b"".join(kept for kept, _, _ in entries),
    )
    blob = _U32.pack(_checksum(first, len(places), packed)) + packed
    return SegmentRow(sid, first, len(places), COLD, blob)


def _compressed(*parts: bytes) -> bytes:
    """Compress the parts into one zstd frame with a block for each part.

    A block has one entropy code, so a block with several different columns would compress worse.
    """
    whole = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=sum(map(len, parts)))
    out = b""
    for part in parts:
        out += whole.compress(part) + whole.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return out + whole.flush()


def unpack_cold(row: SegmentRow, *, where: str) -> Unpacked:
    """Decode a cold segment.

    Raises:
        Damaged: The segment is damaged; the error names `where`.
    """
    try:
        return _unpack(_payload(row), row)
    except _NO_SEGMENT as error:
        raise Damaged(f"{where} does not match its checksum", hint=CHECKSUM_HINT) from error


def _payload(row: SegmentRow) -> bytes:
    packed = row.records[_U32.size :]
    if _U32.unpack_from(row.records)[0] != _checksum(row.first, row.length, packed):
        raise ValueError("the checksum does not match")
    try:
        size = zstandard.get_frame_parameters(packed).content_size
        if size > MAX_PAYLOAD_BYTES:  # a damaged size must not allocate much memory
            raise ValueError(f"{size} bytes unpacked, at most {MAX_PAYLOAD_BYTES} are allowed")
        return zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def _unpack(payload: bytes, row: SegmentRow) -> Unpacked:
    (count,) = _U32.unpack_from(payload)
    places, at = take_column(payload, _U32.size, row.length)
    sizes, at = take_column(payload, at, count)
    ids, at = take_ids(payload, at, count)
    extras: list[bytes] = []
    if row.coding == COLD:
        extras, at = take_extras(payload, at, row.length)
    kept: list[bytes] = []
    for size in sizes:
        kept.append(payload[at : at + (size >> 1)])
        at += size >> 1
    unused = iter(range(count))
    which = [place - 1 if place else next(unused) for place in places]
    frames = [
        kept[entry] if sizes[entry] & 1 else token_frame(kept[entry], tail)
        for entry, tail in zip(which, index_tails(row.first, row.length), strict=True)
    ]
    all_ids = [ids[entry] for entry in which]
    if row.coding == COLD_6:
        return Unpacked.of_layout_6(frames, all_ids)
    return Unpacked(frames, all_ids, extras)


def _checksum(first: int, length: int, packed: bytes) -> int:
    return zlib.crc32(packed, zlib.crc32(_PLACE.pack(first, length)))


def token_frame(text: bytes, tail: bytes) -> bytes:
    """Return the canonical Token frame on channel 0 with this text and the encoded index `tail`."""
    size = len(text)
    return _HEAD.pack(_HEAD_SIZE + size + len(tail), 0, 0, size) + text + tail


def index_tails(first: int, count: int) -> list[bytes]:
    """Return the varints of consecutive indexes, in blocks of 128 that share all later bytes."""
    tails: list[bytes] = []
    for block in range(first >> 7, (first + count >> 7) + 1):
        rest = bytearray()
        if block:
            encode_uint(rest, block)
        tails += [low + rest for low in (_NOT_LAST if block else _LAST)]
    begin = first & 127
    return tails[begin : begin + count]
