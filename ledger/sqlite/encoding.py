"""The bytes of a log row and of a segment.

All begin with a CRC-32 of the rest. Log rows and plain segments go on with a count, then hold
columns of integers and the frames one after the other. A column is one byte that says its width
(1, 2, 4 or 8 bytes, what its largest number needs), then its numbers, little-endian: packed and
read in a few C calls. A frame measures itself, so that lengths are not needed, and the frames of
a segment can be sliced out without looking at the ids. The head of a log row has a checksum of
its own, so that of a row that has rotted it is known, most likely, which streams it has cost what.

    log row   crc u32 · crc of the head u32 · head · ids of each · ids · extras · frames
    head      n u32 · sids · indexes
    segment   crc u32 · n u32 · bytes of frames u32 · frames · ids of each · ids · extras
    extras    n u32 · place of each · bytes of each · all of them, one after the other

A cold segment is many records of one stream, as little of them as can be. A record is its index
and an entry: its ids, and its text where it is a token frame that text and index give back bit
for bit, or else the whole frame. Entries that are alike are kept once, column by column, and zstd
goes over all of it. Its checksum covers the zstd frame and the row's first and length, so that it
vouches for the records that come out.

    cold segment   crc u32 · zstd frame
    payload        entries u32 · entry of each record: 0 the next one, n the nth
                   · 2 * bytes + (1 if whole frame) of each entry
                   · number of ids of each entry · ids · extras of the records · texts and frames

Extras are few, and so lie beside the places of their records. Layout 6 had none: its segments
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
"""Token ids of one record."""
MAX_ID = 2**32 - 1
PLAIN_6, COLD_6, PLAIN, COLD = range(4)
"""How a segment is coded: `segment.coding`. Those of layout 6 are read, and not written."""
COLD_CODINGS = (COLD_6, COLD)
MAX_EXTRA_BYTES = 64 * 1024
"""Extra bytes of one record."""
LEVEL = 3
"""Of zstd. Level 19 saves a thirtieth more and packs half as quickly."""
MAX_PAYLOAD_BYTES = 2 << 20
"""What a cold segment may unpack to, ids of 8 bytes that had taken one each included."""
MAX_TEXT_BYTES = 127
"""Of a token frame; the length of a longer text does not fit one byte of the frame."""
CHECKSUM_HINT = "the file is damaged; restore it from a copy"

_U32 = struct.Struct("<I")
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}  # by width
_unpack_u32 = _U32.unpack_from
_HEAD_AT = 8
_NO_SEGMENT = (IndexError, KeyError, StopIteration, TypeError, ValueError, struct.error)
_PLACE = struct.Struct("<QQ")  # first, length
_HEAD = struct.Struct("<IBIB")  # header, tag, corr, length of the text
_HEAD_SIZE = VERSION_BITS + _HEAD.size - HEADER_BYTES
_NO_EXTRAS = _U32.pack(0)
_LAST = [bytes((low,)) for low in range(128)]  # of a varint
_NOT_LAST = [bytes((low | 128,)) for low in range(128)]


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
    extras: Sequence[bytes] = (),
) -> bytes:
    """Return the blob of one log row; `sids` are a column already."""
    head = _U32.pack(len(frames)) + sids + column(indexes)
    return _seal(_U32.pack(zlib.crc32(head)), head, pack_ids(ids), pack_extras(extras), *frames)


def unpack_batch(blob: bytes, *, where: str) -> Iterator[Entry]:
    """Yield the entries of a log row; raises `Damaged` naming `where` if it is damaged."""
    _check(blob, where)
    sids, indexes, at = _take_head(blob, _HEAD_AT)
    ids, at = take_ids(blob, at, len(sids))
    extras, at = take_extras(blob, at, len(sids))
    frames = split_frames(blob[at:])
    records = map(Record, frames, ids, extras)
    yield from map(Entry, sids, indexes, records)


def upgraded_batch(blob: bytes) -> bytes:
    """Return a log row of layout 6 as one of today; a damaged one as it is."""
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
    """(sid, index) of each record of a damaged log row; None where its head is damaged too."""
    try:
        sids, indexes, at = _take_head(blob, _HEAD_AT)
        whole = _unpack_u32(blob, 4)[0] == zlib.crc32(memoryview(blob)[_HEAD_AT:at])
    except (IndexError, KeyError, ValueError, struct.error):
        return None
    return list(zip(sids, indexes, strict=True)) if whole else None


def pack_segment(
    frames: Sequence[bytes], ids: Sequence[tuple[int, ...]], extras: Sequence[bytes] = ()
) -> bytes:
    """Return the blob of one plain segment."""
    joined = b"".join(frames)
    sizes = _U32.pack(len(frames)), _U32.pack(len(joined))
    return _seal(*sizes, joined, pack_ids(ids), pack_extras(extras))


def segment_frames(blob: bytes, *, where: str) -> list[bytes]:
    """The frames of a segment; raises `Damaged` naming `where` if it is damaged."""
    _check(blob, where)
    (size,) = _unpack_u32(blob, 8)
    return split_frames(blob[12 : 12 + size])


def segment_ids(blob: bytes) -> tuple[list[tuple[int, ...]], int]:
    """Return the ids of a segment, and where they end.

    Its frames have been read before, so that its checksum holds.
    """
    (count,) = _unpack_u32(blob, 4)
    (size,) = _unpack_u32(blob, 8)
    return take_ids(blob, 12 + size, count)


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


def pack_extras(extras: Sequence[bytes]) -> bytes:
    """Return the extras that there are, with their places: of most records there are none."""
    if not any(extras):
        return _NO_EXTRAS
    places = [at for at, extra in enumerate(extras) if extra]
    some = [extras[at] for at in places]
    head = _U32.pack(len(places)) + column(places) + column(list(map(len, some)))
    return head + b"".join(some)


def take_extras(blob: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    """Return the extra of each of `count` records, and where the extras end."""
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
    # SQLite gives NULL, a number or a text where the page of a blob has rotted.
    whole = isinstance(blob, bytes) and len(blob) >= 8
    if not whole or _unpack_u32(blob)[0] != zlib.crc32(memoryview(blob)[4:]):
        raise Damaged(f"{where} does not match its checksum", hint=CHECKSUM_HINT)


# ---- segments, plain and cold ----


class Unpacked(NamedTuple):
    """The records of a segment, in columns."""

    frames: list[bytes]
    ids: list[tuple[int, ...]]
    extras: list[bytes]

    @classmethod
    def of_layout_6(cls, frames: Sequence[bytes], ids: Sequence[tuple[int, ...]]) -> Unpacked:
        """Return the columns of records whose ids may hold marks."""
        records = list(map(unmarked, frames, ids))
        return cls(*map(list, zip(*records, strict=True))) if records else cls([], [], [])

    def records(self) -> list[Record]:
        return list(map(Record, self.frames, self.ids, self.extras))


def unpack_segment(row: SegmentRow, *, where: str) -> Unpacked:
    """The records of a segment, plain or cold; `Damaged`, naming `where`, if it is not whole."""
    if row.coding in COLD_CODINGS:
        return unpack_cold(row, where=where)
    frames = segment_frames(row.records, where=where)
    ids, at = segment_ids(row.records)
    if row.coding == PLAIN_6:
        return Unpacked.of_layout_6(frames, ids)
    return Unpacked(frames, ids, take_extras(row.records, at, len(frames))[0])


def pack_cold(sid: int, first: int, records: Unpacked) -> SegmentRow:
    """A cold segment of consecutive records, the first of which has index `first`."""
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
    """One zstd frame, in which each part has a block of its own.

    A block has one code for all of its bytes; columns of other kinds would spoil it.
    """
    whole = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=sum(map(len, parts)))
    out = b""
    for part in parts:
        out += whole.compress(part) + whole.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return out + whole.flush()


def unpack_cold(row: SegmentRow, *, where: str) -> Unpacked:
    """Frames and ids of a cold segment; `Damaged`, naming `where`, if it is not whole."""
    try:
        return _unpack(_payload(row), row)
    except _NO_SEGMENT as error:
        raise Damaged(f"{where} does not match its checksum", hint=CHECKSUM_HINT) from error


def _payload(row: SegmentRow) -> bytes:
    packed = row.records[_U32.size :]
    if _U32.unpack_from(row.records)[0] != _checksum(row.first, row.length, packed):
        raise ValueError("checksum")
    try:
        size = zstandard.get_frame_parameters(packed).content_size
        if size > MAX_PAYLOAD_BYTES:  # memory would be taken for it
            raise ValueError(f"{size} bytes are more than any")
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
    """The canonical token frame under corr 0 of this text, whose index is the varint `tail`."""
    size = len(text)
    return _HEAD.pack(_HEAD_SIZE + size + len(tail), 0, 0, size) + text + tail


def index_tails(first: int, count: int) -> list[bytes]:
    """The varints of consecutive indexes; 128 of them share all but their first byte."""
    tails: list[bytes] = []
    for block in range(first >> 7, (first + count >> 7) + 1):
        rest = bytearray()
        if block:
            encode_uint(rest, block)
        tails += [low + rest for low in (_NOT_LAST if block else _LAST)]
    begin = first & 127
    return tails[begin : begin + count]
