"""The bytes of a cold segment: many records of one stream, as little of them as can be.

A record is its index and an entry: its ids, and its text where it is a token frame that text
and index give back bit for bit, or else the whole frame. Entries that are alike are kept once,
column by column, and zstd goes over all of it.

    cold segment   crc u32 · zstd frame
    payload        entries u32 · entry of each record: 0 the next one, n the nth
                   · 2 * bytes + (1 if whole frame) of each entry
                   · number of ids of each entry · ids · texts and frames

Columns are those of plain segments (`record.py`). The checksum covers the zstd frame and the
row's first and length, so that it vouches for the records that come out.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import zstandard

from ledger.errors import Damaged
from ledger.interface import Record
from ledger.sqlite.record import (
    CHECKSUM_HINT,
    column,
    pack_ids,
    segment_frames,
    segment_ids,
    take_column,
    take_ids,
)
from ledger.sqlite.storage import SegmentRow
from ledger.wire.bare import encode_uint
from ledger.wire.codec import HEADER_BYTES, VERSION_BITS

COLD = 1
"""The coding of a cold segment; that of a plain one is 0."""
LEVEL = 3
"""Of zstd. Level 19 saves a thirtieth more and packs half as quickly."""
MAX_PAYLOAD_BYTES = 2 << 20
"""What a cold segment may unpack to, ids of 8 bytes that had taken one each included."""
MAX_TEXT_BYTES = 127
"""Of a token frame; the length of a longer text does not fit one byte of the frame."""

_NO_SEGMENT = (IndexError, KeyError, StopIteration, TypeError, ValueError, struct.error)
_U32 = struct.Struct("<I")
_PLACE = struct.Struct("<QQ")  # first, length
_HEAD = struct.Struct("<IBIB")  # header, tag, corr, length of the text
_HEAD_SIZE = VERSION_BITS + _HEAD.size - HEADER_BYTES
_LAST = [bytes((low,)) for low in range(128)]  # of a varint
_NOT_LAST = [bytes((low | 128,)) for low in range(128)]


class Unpacked(NamedTuple):
    """The records of a segment, as two columns."""

    frames: list[bytes]
    ids: list[tuple[int, ...]]

    def records(self) -> list[Record]:
        return [Record(*pair) for pair in zip(self.frames, self.ids, strict=True)]


def unpack_segment(row: SegmentRow, *, where: str) -> Unpacked:
    """The records of a segment, plain or cold; `Damaged`, naming `where`, if it is not whole."""
    if row.coding:
        return unpack_cold(row, where=where)
    frames = segment_frames(row.records, where=where)
    return Unpacked(frames, segment_ids(row.records))


def pack_cold(sid: int, first: int, records: Unpacked) -> SegmentRow:
    """A cold segment of consecutive records, the first of which has index `first`."""
    entries: dict[tuple[bytes, bool, tuple[int, ...]], int] = {}
    places: list[int] = []
    tails = index_tails(first, len(records.frames))
    for frame, ids, tail in zip(*records, tails, strict=True):
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
        return _unpack(_payload(row), row.first, row.length)
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


def _unpack(payload: bytes, first: int, length: int) -> Unpacked:
    (count,) = _U32.unpack_from(payload)
    places, at = take_column(payload, _U32.size, length)
    sizes, at = take_column(payload, at, count)
    ids, at = take_ids(payload, at, count)
    kept: list[bytes] = []
    for size in sizes:
        kept.append(payload[at : at + (size >> 1)])
        at += size >> 1
    unused = iter(range(count))
    which = [place - 1 if place else next(unused) for place in places]
    frames = [
        kept[entry] if sizes[entry] & 1 else token_frame(kept[entry], tail)
        for entry, tail in zip(which, index_tails(first, length), strict=True)
    ]
    return Unpacked(frames, [ids[entry] for entry in which])


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
