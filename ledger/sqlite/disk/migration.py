"""A file of an older version, brought up to this one, in one transaction.

Version 3 had no checksums in the rows of streams, objects and values, and log rows without a
checksum of what they are about. Version 4 packed segments with dictionaries of its own, which
are read here for the last time: what they pack is packed anew.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import apsw
import zstandard

from ledger.sqlite.cold import Unpacked, index_tails, pack_cold, token_frame
from ledger.sqlite.disk.checksum import (
    OBJECT_COLUMNS,
    STREAM_COLUMNS,
    object_crc,
    stream_crc,
    value_crc,
)
from ledger.sqlite.disk.opening import MIGRATED_VERSION
from ledger.sqlite.record import with_head
from ledger.sqlite.storage import SegmentRow

_FROM_3 = f"""
ALTER TABLE stream ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE object ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
ALTER TABLE object_value ADD COLUMN crc INTEGER NOT NULL DEFAULT 0;
UPDATE stream SET crc = stream_crc({STREAM_COLUMNS.removesuffix(", crc")});
UPDATE object SET crc = object_crc({OBJECT_COLUMNS.removesuffix(", crc")});
UPDATE object_value SET crc = value_crc(oid, CAST(name AS BLOB), value);
CREATE TABLE dictionary_copy (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
UPDATE log SET batch = with_head(CAST(batch AS BLOB));
"""
_FROM_4 = """
DROP INDEX segment_cold;
DROP TABLE dictionary;
DROP TABLE dictionary_copy;
"""
_MAX_BYTES = 16 * 1024 * 1024
"""What a dictionary or a packed segment of version 4 may unpack to."""
_CODE = re.compile(rb"[\x00-\xbf]|[\xc0-\xff][\x00-\xff]", re.DOTALL)


def migrate(writer: apsw.Connection, version: int) -> None:
    """Bring a file of `MIGRATED_VERSION` or later to `version`, or leave it as it was."""
    functions: dict[str, Callable[..., Any]] = {
        "stream_crc": lambda *row: stream_crc(row),
        "object_crc": lambda *row: object_crc(row),
        "value_crc": value_crc,
        "with_head": with_head,
    }
    for name, function in functions.items():
        writer.create_scalar_function(name, function, deterministic=True)
    with writer:
        if writer.pragma("user_version") == MIGRATED_VERSION:
            writer.execute(_FROM_3)
        _pack_anew(writer)
        writer.execute(f"{_FROM_4}PRAGMA user_version = {version};")


# ---- segments as version 4 packed them ----


def _pack_anew(writer: apsw.Connection) -> None:
    """What is damaged, or was packed with what is, stays as it is: its readers are told."""
    known = dict(_dictionaries(writer))
    places = writer.execute("SELECT sid, first FROM segment WHERE coding > 0").fetchall()
    for place in places:
        with suppress(
            apsw.CorruptError, IndexError, KeyError, TypeError, ValueError, zstandard.ZstdError
        ):
            [row] = writer.execute(
                "SELECT sid, first, length, coding, records FROM segment"
                " WHERE sid = ? AND first = ?",
                place,
            )
            old = SegmentRow(*row)
            new = pack_cold(old.sid, old.first, known[old.coding].unpack(old))
            writer.execute(
                "UPDATE segment SET coding = ?, records = ? WHERE sid = ? AND first = ?",
                (new.coding, new.records, *place),
            )


def _dictionaries(writer: apsw.Connection) -> Iterator[tuple[int, _Dictionary]]:
    """By number; of the two copies of each one that is whole."""
    for table in ("dictionary", "dictionary_copy"):
        with suppress(apsw.CorruptError):
            for number, row in writer.execute(f"SELECT id, bytes FROM {table}"):
                with suppress(IndexError, TypeError, ValueError, zstandard.ZstdError):
                    yield number, _Dictionary(row)


class _Dictionary:
    """Pairs of a text and its ids, each of which was one code, and a dictionary for zstd."""

    def __init__(self, row: bytes) -> None:
        _check(row, zlib.crc32(row[4:]))
        data = zstandard.ZstdDecompressor().decompress(row[4:], max_output_size=_MAX_BYTES)
        _, at = _take_uint(data, 0)
        count, at = _take_uint(data, at)
        self._pairs: list[tuple[bytes, tuple[int, ...]]] = []
        for _ in range(count):
            ids, at = _take_ids(data, at)
            size, at = _take_uint(data, at)
            self._pairs.append((data[at : at + size], ids))
            at += size
        trained = zstandard.ZstdCompressionDict(data[at:]) if data[at:] else None
        self._zstd = zstandard.ZstdDecompressor(
            dict_data=trained, format=zstandard.FORMAT_ZSTD1_MAGICLESS
        )

    def unpack(self, row: SegmentRow) -> Unpacked:
        size, at = _take_uint(row.records, 4)
        payload = self._zstd.decompress(row.records[at:], max_output_size=min(size, _MAX_BYTES))
        place = struct.pack("<QQQ", row.first, row.length, row.coding)
        _check(row.records, zlib.crc32(row.records[4:], zlib.crc32(payload, zlib.crc32(place))))
        size, at = _take_uint(payload, 0)
        codes: list[bytes] = _CODE.findall(payload[at : at + size])
        at += size
        frames: list[bytes] = []
        ids: list[tuple[int, ...]] = []
        for code, tail in zip(codes, index_tails(row.first, row.length), strict=True):
            whole = 0
            if code == b"\0":
                size, at = _take_uint(payload, at)
                some, at = _take_ids(payload, at)
                size, whole = size >> 1, size & 1
                kept, at = payload[at : at + size], at + size
            else:
                kept, some = self._pairs[_place_of(code)]
            frames.append(kept if whole else token_frame(kept, tail))
            ids.append(some)
        return Unpacked(frames, ids)


def _check(blob: bytes, crc: int) -> None:
    if blob[:4] != struct.pack("<I", crc):
        raise ValueError("checksum")


def _place_of(code: bytes) -> int:
    """192 first bytes stand alone, the first of them for no pair; the others begin two."""
    return code[0] - 1 if len(code) == 1 else int.from_bytes(code, "big") - (192 << 8) + 191


def _take_ids(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    count, at = _take_uint(data, at)
    ids = []
    for _ in range(count):
        token_id, at = _take_uint(data, at)
        ids.append(token_id)
    return tuple(ids), at


def _take_uint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) > 0x7F:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1
