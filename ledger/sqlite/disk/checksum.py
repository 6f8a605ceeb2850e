"""Checksums of single rows, so that damaged rows are detected.

The blobs of log rows and segments contain their own checksums. Rows of streams, parts, objects,
values and usage have a column `crc`. The `crc` of a stream is the XOR of two checksums: one of the
columns that never change, and one of those that do change, which are the stream's state. When the
state changes, `restated` replaces the second checksum. So a change of the state need not read the
recipe, and if the row was damaged before, its `crc` still does not match.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tailrace.ledger.branch import Part
from tailrace.ledger.errors import Damaged, damaged_stream
from tailrace.ledger.sqlite.storage import ObjectRow, StreamRow
from tailrace.ledger.usage import Usage

if TYPE_CHECKING:
    import apsw

DAMAGED_HINT = "check the disk, and restore the file from a backup"
_MISMATCH = "does not match its checksum"

_STREAM_TEXTS = ("recipe", "idempotency_key")
_OBJECT_TEXTS = ("kind", "name")
_USAGE_TEXTS = ("tenant", "key", "model", "priority", "finish")


def _columns(names: Sequence[str], texts: Sequence[str]) -> str:
    """Return SQL that selects the columns, with texts as bytes, because damage may break UTF-8."""
    return ", ".join(f"CAST({name} AS BLOB)" if name in texts else name for name in names)


STREAM_COLUMNS = _columns((*StreamRow._fields, "crc"), _STREAM_TEXTS)
OBJECT_COLUMNS = _columns((*ObjectRow._fields, "crc"), _OBJECT_TEXTS)
USAGE_COLUMNS = _columns((*Usage._fields, "crc"), _USAGE_TEXTS)
VALUE_COLUMNS = _columns(("name", "value", "crc"), ("name",))

_STATE = ("epoch", "ended", "expires_ms")
_AT = {name: at for at, name in enumerate(StreamRow._fields)}
_STATE_AT = [_AT[name] for name in _STATE]
_FIXED_AT = [at for name, at in _AT.items() if name not in _STATE]


def restated(**changed: str) -> str:
    """Return SQL for the new `crc` of a stream whose state changes.

    `changed` maps columns of the state to the SQL of their new values.
    """
    new = ", ".join(changed.get(name, name) for name in _STATE)
    return f"restated(crc, sid, {', '.join(_STATE)}, {new})"


def stream_crc(row: Sequence[object]) -> int:
    """Return the checksum of the columns of a `StreamRow`; texts may be given as bytes."""
    fixed = crc_of([row[at] for at in _FIXED_AT])
    return fixed ^ crc_of([row[0], *(row[at] for at in _STATE_AT)])


def usage_crc(row: Usage) -> int:
    """Return the checksum of the columns of a `Usage` that never change."""
    return crc_of(row[:-1])


def add_functions(connection: apsw.Connection) -> None:
    """Register the SQL function that `restated` calls."""
    connection.create_scalar_function("restated", _restated, deterministic=True)


def _restated(*values: Any) -> int:
    crc, sid, *states = values
    if not isinstance(crc, int):
        return 0  # the row is damaged; a read of the row reports the damage
    return crc ^ crc_of((sid, *states[:3])) ^ crc_of((sid, *states[3:]))


def crc_of(values: Sequence[object]) -> int:
    """Return the checksum of the columns of a row; texts may be given as bytes.

    The row is an `ObjectRow`, the oid, name and bytes of a value, or the sid, source and end of a
    part.
    """
    crc = 0
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode()
        # Include the length, so that ("ab", "c") and ("a", "bc") have different checksums.
        crc = zlib.crc32(data, zlib.crc32(b"%d " % len(data), crc))
    return crc


# ---- reading ----


def checked_stream(row: Sequence[Any]) -> StreamRow:
    """Return the stream in a row with the columns STREAM_COLUMNS.

    Raises `Damaged` if the row does not match its checksum.
    """
    *columns, crc = row
    if crc != stream_crc(columns):
        sid, stream, *_ = columns
        if not isinstance(stream, bytes):
            raise Damaged(f"row {sid} of the streams {_MISMATCH}", hint=DAMAGED_HINT)
        raise damaged_stream(stream, f"its row {_MISMATCH}")
    return StreamRow(*_decoded(columns, StreamRow._fields, _STREAM_TEXTS))


def unchecked_stream(row: Sequence[Any]) -> StreamRow:
    """Return the stream in a row that does not match its checksum; its fields may be wrong."""
    sid, stream, *rest, _ = row
    known = stream if isinstance(stream, bytes) else b""
    return StreamRow(*_decoded((sid, known, *rest), StreamRow._fields, _STREAM_TEXTS))


def checked_object(row: Sequence[Any]) -> ObjectRow:
    """Return the object in a row with the columns OBJECT_COLUMNS.

    Raises `Damaged` if the row does not match its checksum.
    """
    *columns, crc = row
    if crc != crc_of(columns):
        raise Damaged(f"the row of object {columns[0]} {_MISMATCH}", hint=DAMAGED_HINT)
    return ObjectRow(*_decoded(columns, ObjectRow._fields, _OBJECT_TEXTS))


def checked_value(oid: int, row: Sequence[Any]) -> tuple[str, bytes]:
    """Return the name and the value in a row with the columns VALUE_COLUMNS.

    Raises `Damaged` if the row does not match its checksum.
    """
    name, value, crc = row
    if crc != crc_of((oid, name, value)):
        raise Damaged(f"value {name!r} of object {oid} {_MISMATCH}", hint=DAMAGED_HINT)
    return name.decode(), value


def checked_part(sid: int, row: Sequence[Any]) -> Part:
    """Return the part of the branch `sid` in a row with the columns source, end and crc.

    Raises `Damaged` if the row does not match its checksum.
    """
    source, end, crc = row
    if crc != crc_of((sid, source, end)):
        raise Damaged(f"a part of stream {sid} {_MISMATCH}", hint=DAMAGED_HINT)
    return Part(source, end)


def checked_usage(row: Sequence[Any]) -> Usage:
    """Return the usage of a stream in a row with the columns USAGE_COLUMNS.

    Raises `Damaged` if the row does not match its checksum.
    """
    *columns, crc = row
    stream = columns[0]
    if crc != crc_of(columns[:-1]):
        name = stream.hex() if isinstance(stream, bytes) else "unknown"
        raise Damaged(f"the usage of stream {name} {_MISMATCH}", hint=DAMAGED_HINT)
    return Usage(*_decoded(columns, Usage._fields, _USAGE_TEXTS))


def _decoded(columns: Sequence[Any], names: Sequence[str], texts: Sequence[str]) -> Iterator[Any]:
    for name, value in zip(names, columns, strict=True):
        is_text = name in texts and isinstance(value, bytes)
        yield value.decode(errors="replace") if is_text else value
