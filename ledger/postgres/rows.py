"""Conversion of values for PostgreSQL: columns as binary arrays, token ids as bytes.

One group commit is one statement over columns (`unnest`). psycopg packs an array value by value,
which takes longer than the statement itself. So this module packs a column of numbers by one call
of `struct`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from psycopg import AsyncConnection
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.types.numeric import Int8BinaryDumper

from tailrace.ledger.interface import Record
from tailrace.ledger.marked_ids import unmarked
from tailrace.ledger.usage import UsageQuery, UsageSums
from tailrace.ledger.wire.bare import encode_uint

# The head of a one-dimensional array in PostgreSQL's binary format (array_send in its
# arrayfuncs.c): dimensions, null flag, element type, length, lower bound.
_ARRAY = struct.Struct(">iiIii")
_EMPTY = struct.Struct(">iiI")
_LENGTH = struct.Struct(">i")
_BOOL, _BYTEA, _INT8 = 16, 17, 20  # OIDs of element types, from pg_type
_BOOLS, _BYTEAS, _INT8S = 1000, 1001, 1016  # OIDs of arrays of these types
_TRUE, _FALSE = b"\0\0\0\1\1", b"\0\0\0\1\0"
_TWO_BYTES = 1 << 14  # a smaller token id takes at most two bytes in LEB128
_NULL = b"\xff\xff\xff\xff"


class Ints(tuple[int, ...]):
    """A parameter of type bigint[]."""


class Flags(tuple[bool, ...]):
    """A parameter of type boolean[]."""


class Blobs(tuple[bytes | None, ...]):
    """A parameter of type bytea[]."""


class _IntsDumper(Dumper):
    format, oid = Format.BINARY, _INT8S

    def dump(self, obj: Ints) -> bytes:
        lengths_and_values = [8] * (2 * len(obj))
        lengths_and_values[1::2] = obj
        return _head(_INT8, len(obj)) + struct.pack(">" + "iq" * len(obj), *lengths_and_values)


class _FlagsDumper(Dumper):
    format, oid = Format.BINARY, _BOOLS

    def dump(self, obj: Flags) -> bytes:
        return _head(_BOOL, len(obj)) + b"".join([_TRUE if flag else _FALSE for flag in obj])


class _BlobsDumper(Dumper):
    format, oid = Format.BINARY, _BYTEAS

    def dump(self, obj: Blobs) -> bytes:
        pack = _LENGTH.pack
        parts = [_NULL if blob is None else pack(len(blob)) + blob for blob in obj]
        return _head(_BYTEA, len(obj), nulls=None in obj) + b"".join(parts)


def _head(element: int, count: int, *, nulls: bool = False) -> bytes:
    return _ARRAY.pack(1, nulls, element, count, 1) if count else _EMPTY.pack(0, 0, element)


def register(connection: AsyncConnection) -> None:
    """Register the types of this module, and send every int as a bigint.

    With the same types of parameters each time, PostgreSQL keeps one plan for each statement.
    """
    connection.adapters.register_dumper(Ints, _IntsDumper)
    connection.adapters.register_dumper(Flags, _FlagsDumper)
    connection.adapters.register_dumper(Blobs, _BlobsDumper)
    connection.adapters.register_dumper(int, Int8BinaryDumper)


def columns(rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Transpose rows into columns."""
    return list(zip(*rows, strict=True))


def pack_ids(ids: Sequence[int]) -> bytes | None:
    """Encode token ids as LEB128; None if there are none."""
    if not ids:
        return None
    if len(ids) == 1 and ids[0] < _TWO_BYTES:
        (only,) = ids
        return bytes((only,)) if only < 0x80 else bytes((only & 0x7F | 0x80, only >> 7))
    out = bytearray()
    for token_id in ids:
        encode_uint(out, token_id)
    return bytes(out)


def unpack_ids(packed: bytes | None) -> tuple[int, ...]:
    ids, value, shift = [], 0, 0
    for byte in packed or b"":
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            ids.append(value)
            value = shift = 0
    return tuple(ids)


def stored_record(frame: bytes, ids: bytes | None, extra: bytes | None) -> Record:
    """Return the record in a row of the table `frame`."""
    if extra is None:
        return unmarked(bytes(frame), unpack_ids(ids))
    return Record(bytes(frame), unpack_ids(ids), bytes(extra))


def stored_sums(query: UsageQuery, rows: Iterable[Sequence[Any]]) -> UsageSums:
    """Return the sums of usage in the `rows` that a query found; texts in them are bytes."""
    sums, groups = UsageSums(query), len(query.columns)
    for row in rows:
        if row[groups]:  # without GROUP BY there is a row even if no stream is found
            names = [one if isinstance(one, int) else bytes(one).decode() for one in row[:groups]]
            sums.add(names, [int(number) for number in row[groups:]])
    return sums
