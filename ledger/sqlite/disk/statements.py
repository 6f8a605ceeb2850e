"""The SQL statements of a commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.ledger.branch import Part
from tailrace.ledger.sqlite.disk.checksum import crc_of, restated, stream_crc, usage_crc
from tailrace.ledger.sqlite.storage import Commit, ObjectRow, SegmentRow, StreamRow
from tailrace.ledger.usage import Usage

Rows = Sequence[Sequence[Any]]


def _insert(table: str, columns: int, *, replace: bool = False) -> str:
    verb = "REPLACE" if replace else "INSERT"
    return f"{verb} INTO {table} VALUES ({', '.join('?' * columns)})"


INSERT_LOG = _insert("log", 2)
_INSERT_STREAM = _insert(
    f"stream ({', '.join(StreamRow._fields)}, crc)", len(StreamRow._fields) + 1
)
_SET_EPOCH = f"UPDATE stream SET epoch = ?1, crc = {restated(epoch='?1')} WHERE sid = ?2"
_SET_ENDED = (
    "UPDATE stream SET ended = 1, expires_ms = ?1,"
    f" crc = {restated(ended='1', expires_ms='?1')} WHERE sid = ?2"
)
_SET_EXPIRY = (
    f"UPDATE stream SET expires_ms = ?1, crc = {restated(expires_ms='?1')}"
    " WHERE sid = ?2 AND expires_ms < ?1"
)
_INSERT_PART = _insert('part (sid, source, "end", crc)', 4)
_INSERT_SEGMENT = _insert("segment", len(SegmentRow._fields), replace=True)
_UPSERT_OBJECT = (
    _insert("object", len(ObjectRow._fields) + 1) + " ON CONFLICT (oid) DO UPDATE SET"
    " epoch = excluded.epoch, alarm_ms = excluded.alarm_ms,"
    " alarm_retries = excluded.alarm_retries, crc = excluded.crc"
)
_INSERT_USAGE = (
    _insert(f"usage ({', '.join(Usage._fields)}, crc)", len(Usage._fields) + 1)
    + " ON CONFLICT (stream) DO NOTHING"
)
_SET_DELIVERED = (
    "UPDATE usage SET delivered_tokens = max(delivered_tokens, min(?1, output_tokens))"
    " WHERE stream = ?2"
)
_PUT_VALUE = _insert("object_value", 4, replace=True)


def _part_row(part: tuple[int, Part]) -> tuple[int, int, int]:
    return part[0], *part[1]


def statements(commit: Commit) -> list[tuple[str, Rows]]:
    """Return the statements of a commit in their order, each with the rows to execute it for."""
    steps: list[tuple[str, Rows]] = [
        # Removals come first, because a new stream of the same commit may reuse a removed id.
        ("INSERT OR IGNORE INTO removed VALUES (?)", [(sid,) for sid in commit.removed]),
        ("DELETE FROM stream WHERE sid = ?", [(sid,) for sid in commit.removed]),
        (_INSERT_STREAM, [(*row, stream_crc(row)) for row in commit.streams]),
        ("DELETE FROM part WHERE sid = ?", [(sid,) for sid in commit.removed]),
        ("DELETE FROM answer WHERE sid = ?", [(sid,) for sid in commit.removed]),
        (_insert("answer (identity, sid)", 2), commit.answers),
        (_INSERT_PART, [(*row, crc_of(row)) for row in map(_part_row, commit.parts)]),
        (_SET_EPOCH, commit.epochs),
        (INSERT_LOG, [(commit.seq, commit.log)] if commit.log else ()),
        ("DELETE FROM segment WHERE sid = ? AND first >= ? AND first < ?", commit.replaced),
        (_INSERT_SEGMENT, commit.segments),
        (_SET_ENDED, commit.ended),
        (_SET_EXPIRY, commit.touched),
        ("UPDATE stream SET cold = 1 WHERE sid = ?", [(sid,) for sid in commit.cold]),
        (_INSERT_USAGE, [(*row, usage_crc(row)) for row in commit.usage]),
        (_SET_DELIVERED, commit.delivered),
        ("DELETE FROM usage WHERE stream = ?", [(stream,) for stream in commit.forgotten]),
        (_UPSERT_OBJECT, [(*row, crc_of(row)) for row in commit.objects]),
    ]
    for oid, name, value in commit.values:
        if name is None:
            steps.append(("DELETE FROM object_value WHERE oid = ?", [(oid,)]))
        elif value is None:
            steps.append(("DELETE FROM object_value WHERE oid = ? AND name = ?", [(oid, name)]))
        else:
            steps.append((_PUT_VALUE, [(oid, name, value, crc_of((oid, name, value)))]))
    if commit.keep_from is not None:
        steps.append(("DELETE FROM log WHERE seq < ?", [(commit.keep_from,)]))
    return [step for step in steps if step[1]]
