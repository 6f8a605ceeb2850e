"""The bytes of a log row and of a segment.

A log row holds one group commit: a CRC-32 of the rest, then its entries in order, each
`sid index ids record`. A segment holds a run of records of ONE stream whose first index
is in its key, each `ids record`. All numbers are LEB128; a frame measures itself.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ledger.bare import encode_uint
from ledger.codec import HEADER_BYTES, LENGTH_MASK
from ledger.errors import LedgerFailed
from ledger.interface import Record

_CRC = struct.Struct("<I")
_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Entry:
    """One record in a log row: which stream (by its short local id), which index."""

    sid: int
    index: int
    record: Record


def pack_batch(entries: Iterable[Entry]) -> bytes:
    """The blob of one log row."""
    out = bytearray(_CRC.size)
    for entry in entries:
        encode_uint(out, entry.sid)
        encode_uint(out, entry.index)
        _put_record(out, entry.record)
    return _seal(out)


def unpack_batch(blob: bytes, *, where: str) -> Iterator[Entry]:
    """The entries of a log row; raises `LedgerFailed` naming `where` if it is damaged."""
    at = _check(blob, where)
    while at < len(blob):
        sid, at = _take(blob, at)
        index, at = _take(blob, at)
        record, at = _take_record(blob, at)
        yield Entry(sid, index, record)


def pack_segment(records: Iterable[Record]) -> bytes:
    """The blob of one segment."""
    out = bytearray(_CRC.size)
    for record in records:
        _put_record(out, record)
    return _seal(out)


def unpack_segment(blob: bytes, *, where: str) -> Iterator[Record]:
    """The records of a segment; raises `LedgerFailed` naming `where` if it is damaged."""
    at = _check(blob, where)
    while at < len(blob):
        record, at = _take_record(blob, at)
        yield record


def _seal(out: bytearray) -> bytes:
    _CRC.pack_into(out, 0, zlib.crc32(memoryview(out)[_CRC.size :]))
    return bytes(out)


def _check(blob: bytes, where: str) -> int:
    if len(blob) < _CRC.size or _CRC.unpack_from(blob)[0] != zlib.crc32(blob[_CRC.size :]):
        raise LedgerFailed(
            f"{where} does not match its checksum",
            retryable=False,
            hint="the file is damaged; restore it from a copy",
        )
    return _CRC.size


def _put_record(out: bytearray, record: Record) -> None:
    encode_uint(out, len(record.ids))
    for token_id in record.ids:
        encode_uint(out, token_id)
    out += record.frame


def _take_record(blob: bytes, at: int) -> tuple[Record, int]:
    count, at = _take(blob, at)
    ids = []
    for _ in range(count):
        token_id, at = _take(blob, at)
        ids.append(token_id)
    end = at + HEADER_BYTES + (_HEADER.unpack_from(blob, at)[0] & LENGTH_MASK)
    return Record(blob[at:end], tuple(ids)), end


def _take(blob: bytes, at: int) -> tuple[int, int]:
    # Not bare.decode_uint: what the checksum has vouched for needs no second check.
    byte = blob[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = blob[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
