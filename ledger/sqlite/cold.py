"""The bytes of a cold segment: many records of one stream, as little of them as can be.

A token frame that its index, text and ids give back bit for bit is one code of the
dictionary's vocabulary, or its text and ids where they are no pair of it; any other frame
is kept as it is. The codes come first, the rest in their order, and zstd goes over both.

    cold segment   crc u32 · size of payload · zstd frame without its magic number
    payload        bytes of codes · code[…] · for each code 0: rest
    rest           2 * bytes + (1 if raw) · number of ids · id[…] · text or raw frame

Numbers are varints. The checksum covers the payload, everything after it in the blob, and
the row's first, length and coding, so that it vouches for the records that come out.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ledger.errors import Damaged
from ledger.interface import Record
from ledger.sqlite.dictionary import Dictionary, put_uint, take_uint, text_of, token_head
from ledger.sqlite.record import segment_frames, segment_ids
from ledger.sqlite.storage import SegmentRow

COLD_FRAMES = 1_024
"""Records of one cold segment: what a reader of any of them unpacks: about half a millisecond."""
COLD_BYTES = 256 * 1024
"""Bytes of frames of one cold segment, unless its first plain one alone has more."""
MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
"""What a cold segment may unpack to; a plain one beyond it stays plain."""

_U32 = struct.Struct("<I")
_ROW = struct.Struct("<QQQ")  # first, length, coding
_CODE = re.compile(rb"[\x00-\xbf]|[\xc0-\xff][\x00-\xff]", re.DOTALL)
_ESCAPE = b"\0"
_LAST = [bytes((low,)) for low in range(128)]  # of a varint
_NOT_LAST = [bytes((low | 128,)) for low in range(128)]


class Unpacked(NamedTuple):
    """The records of a segment, as two columns."""

    frames: list[bytes]
    ids: list[tuple[int, ...]]

    def records(self) -> list[Record]:
        return [Record(*pair) for pair in zip(self.frames, self.ids, strict=True)]


def unpack_stored(row: SegmentRow, dictionary: bytes, *, where: str) -> list[Record]:
    """The records of a segment, plain or cold; `Damaged`, naming `where`, if it is not whole.

    `dictionary` is the row of the table that `coding` names.
    """
    known = Dictionary.unpack(dictionary, where=where) if row.coding else None
    return unpack_row(row, known, where=where).records()


def unpack_row(row: SegmentRow, dictionary: Dictionary | None, *, where: str) -> Unpacked:
    """The same with the dictionary at hand; a plain segment needs none."""
    if dictionary is None:
        frames = segment_frames(row.records, where=where)
        return Unpacked(frames, segment_ids(row.records))
    return unpack_cold(row, dictionary, where=where)


# ---- packing ----


class Payload(NamedTuple):
    """What zstd gets. `strange`: token frames that are no pair of the dictionary."""

    data: bytes
    strange: int


class Packed(NamedTuple):
    """A cold segment, and how many of its token frames its dictionary does not know."""

    row: SegmentRow
    strange: int


def payload_of(first: int, records: Sequence[Record], dictionary: Dictionary) -> Payload:
    """Codes and rests of consecutive records, the first of which has index `first`."""
    tails = index_tails(first, len(records))
    codes: list[bytes] = []
    rest = bytearray()
    strange = 0
    for begin, end, width in _widths(first, len(records)):
        known = dictionary.codes(width)
        for (frame, ids), tail in zip(records[begin:end], tails[begin:end], strict=True):
            code = known.get((frame[:-width], ids)) if frame.endswith(tail) else None
            if code is None:
                code = _ESCAPE
                strange += _put_rest(rest, frame, ids, tail)
            codes.append(code)
    joined = b"".join(codes)
    out = bytearray()
    put_uint(out, len(joined))
    return Payload(bytes(out) + joined + rest, strange)


def _put_rest(out: bytearray, frame: bytes, ids: tuple[int, ...], tail: bytes) -> bool:
    """Keep what no code says; whether it is a token frame."""
    text = text_of(frame)
    raw = text is None or token_head(text, len(tail)) + tail != frame
    kept = frame if text is None or raw else text
    put_uint(out, len(kept) << 1 | raw)
    put_uint(out, len(ids))
    for token_id in ids:
        put_uint(out, token_id)
    out += kept
    return not raw


def pack_cold(
    sid: int, first: int, records: Sequence[Record], coding: int, dictionary: Dictionary
) -> Packed | None:
    """A cold segment of these records; None where they do not come back from it, or are many."""
    payload = payload_of(first, records, dictionary)
    if len(payload.data) > MAX_PAYLOAD_BYTES:
        return None
    compressed = dictionary.compress(payload.data)
    row = cold_row(sid, first, len(records), coding, payload.data, compressed)
    return Packed(row, payload.strange) if gives_back(row, records, dictionary) else None


def cold_row(
    sid: int, first: int, length: int, coding: int, payload: bytes, compressed: bytes
) -> SegmentRow:
    """The segment of a payload that has been compressed."""
    body = bytearray()
    put_uint(body, len(payload))
    body += compressed
    blob = _U32.pack(_checksum(first, length, coding, payload, body)) + body
    return SegmentRow(sid, first, length, coding, blob)


def gives_back(row: SegmentRow, records: Sequence[Record], dictionary: Dictionary) -> bool:
    """Whether a cold segment unpacks to exactly these records."""
    try:
        back = unpack_cold(row, dictionary, where="what was packed")
    except Damaged:
        return False
    return back.records() == list(records)


def is_whole(row: SegmentRow, dictionary: Dictionary) -> bool:
    """Whether a cold segment matches its checksum under this dictionary.

    Some ten microseconds: what was packed elsewhere is looked at so before it replaces anything.
    """
    try:
        _payload(row, dictionary)
    except (IndexError, ValueError, struct.error):
        return False
    return True


def _checksum(
    first: int, length: int, coding: int, payload: bytes, body: bytes | bytearray | memoryview
) -> int:
    return zlib.crc32(body, zlib.crc32(payload, zlib.crc32(_ROW.pack(first, length, coding))))


# ---- unpacking ----


def unpack_cold(row: SegmentRow, dictionary: Dictionary, *, where: str) -> Unpacked:
    """Frames and ids of a cold segment; `Damaged`, naming `where`, if it is not whole."""
    try:
        payload = _payload(row, dictionary)
        return _unpack(payload, row, dictionary)
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise Damaged(
            f"{where} does not match its checksum",
            hint="the file is damaged; restore it from a copy",
        ) from error


def _payload(row: SegmentRow, dictionary: Dictionary) -> bytes:
    blob = row.records
    size, at = take_uint(blob, _U32.size)
    if size > MAX_PAYLOAD_BYTES:
        raise ValueError(f"{size} bytes are more than any")
    payload = dictionary.decompress(blob[at:], size)
    body = memoryview(blob)[_U32.size :]
    if _U32.unpack_from(blob)[0] != _checksum(row.first, row.length, row.coding, payload, body):
        raise ValueError("checksum")
    return payload


def _unpack(payload: bytes, row: SegmentRow, dictionary: Dictionary) -> Unpacked:
    size, at = take_uint(payload, 0)
    codes: list[bytes] = _CODE.findall(payload[at : at + size])
    if len(codes) != row.length:
        raise ValueError("length")
    tails = index_tails(row.first, row.length)
    frames: list[bytes] = []
    for begin, end, width in _widths(row.first, row.length):
        heads = dictionary.heads(width)
        pairs = zip(codes[begin:end], tails[begin:end], strict=True)
        frames += [heads[code] + tail for code, tail in pairs]
    known = dictionary.ids
    ids = [known[code] for code in codes]
    for place, frame, some in _rests(payload, at + size, codes, tails):
        frames[place], ids[place] = frame, some
    return Unpacked(frames, ids)


def _rests(
    payload: bytes, at: int, codes: list[bytes], tails: list[bytes]
) -> Iterator[tuple[int, bytes, tuple[int, ...]]]:
    place = -1
    for _ in range(codes.count(_ESCAPE)):
        place = codes.index(_ESCAPE, place + 1)
        length, at = take_uint(payload, at)
        count, at = take_uint(payload, at)
        ids = []
        for _ in range(count):
            token_id, at = take_uint(payload, at)
            ids.append(token_id)
        end = at + (length >> 1)
        kept, at = payload[at:end], end
        tail = tails[place]
        frame = kept if length & 1 else token_head(kept, len(tail)) + tail
        yield place, frame, tuple(ids)


# ---- indexes ----


def index_tails(first: int, count: int) -> list[bytes]:
    """The varints of consecutive indexes; 128 of them share all but their first byte."""
    tails: list[bytes] = []
    at, end = first, first + count
    while at < end:
        block = at >> 7
        beyond = min(end, block + 1 << 7)
        low = slice(at & 127, (beyond - 1 & 127) + 1)
        if block == 0:
            tails += _LAST[low]
        else:
            shared = bytearray()
            put_uint(shared, block)
            suffix = bytes(shared)
            tails += [byte + suffix for byte in _NOT_LAST[low]]
        at = beyond
    return tails


def _widths(first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, width) of the runs of indexes whose varints are `width` bytes."""
    begin = 0
    while begin < count:
        at = first + begin
        width = max(1, -(-at.bit_length() // 7))
        end = min(count, (1 << 7 * width) - first)
        yield begin, end, width
        begin = end
