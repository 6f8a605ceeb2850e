"""Queries of a ledger file: the reading half of `tailrace.ledger.sqlite.storage.Storage`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from tailrace.ledger.branch import Part
from tailrace.ledger.errors import Damaged
from tailrace.ledger.interface import ObjectKey, ValueRange
from tailrace.ledger.sqlite.disk.checksum import (
    DAMAGED_HINT,
    OBJECT_COLUMNS,
    STREAM_COLUMNS,
    VALUE_COLUMNS,
    checked_object,
    checked_part,
    checked_stream,
    checked_value,
)
from tailrace.ledger.sqlite.disk.connections import Reads
from tailrace.ledger.sqlite.storage import ObjectRow, SegmentRow, StreamRow
from tailrace.ledger.usage import UsageQuery, UsageSums, sql_of

log = structlog.get_logger("ledger")


class Queries:
    """The queries of one ledger file, on connections that only read."""

    def __init__(self, path: Path, reads: Reads) -> None:
        self.path = path
        self._reads = reads
        self._told_damage = ""  # the error of `unfinished` that was logged last

    async def stream_by_sid(self, sid: int) -> StreamRow | None:
        return self._stream("sid = ?", sid)

    async def stream_by_id(self, stream: bytes) -> StreamRow | None:
        return self._stream("id = ?", stream)

    async def stream_by_key(self, idempotency_key: str) -> StreamRow | None:
        return self._stream("idempotency_key = ?", idempotency_key)

    async def unfinished(self, kind: int) -> list[tuple[int, bytes]]:
        sql = "SELECT sid, id FROM stream WHERE ended = 0 AND kind = ? ORDER BY created_ms, sid"
        try:
            rows = await self._reads.read(sql, (kind,))
        except Damaged as error:
            rows = await self._unfinished_past_damage(kind, error)
        return [(sid, id_) for sid, id_ in rows if isinstance(id_, bytes)]

    async def _unfinished_past_damage(self, kind: int, error: Damaged) -> list[Any]:
        """Return the unfinished streams that can be read although a page is damaged.

        The table is read twice without its index: from its first row forward and from its last row
        backward, each time up to the first damaged page.
        """
        sql = "SELECT sid, id FROM stream NOT INDEXED WHERE ended = 0 AND kind = ? ORDER BY sid"
        read = self._reads.read_past_damage
        found = {*await read(sql, (kind,)), *await read(f"{sql} DESC", (kind,))}
        # Log each error only once, because an origin calls this twice a second.
        if str(error) != self._told_damage:
            self._told_damage = str(error)
            log.error("ledger.damaged", error=error.message, unfinished_found=len(found))
        return sorted(found)

    async def covered(self, sid: int) -> int:
        rows = self._reads.look(
            "SELECT first + length FROM segment WHERE sid = ? ORDER BY first DESC LIMIT 1", (sid,)
        )
        if rows and rows[0][0] is None:  # the columns are NOT NULL, so the page is damaged
            raise Damaged(f"{self.path}: a segment of stream {sid} is NULL", hint=DAMAGED_HINT)
        return rows[0][0] if rows else 0

    async def parts(self, sid: int) -> tuple[Part, ...]:
        rows = self._reads.look(
            'SELECT source, "end", crc FROM part WHERE sid = ? ORDER BY "end"', (sid,)
        )
        return tuple(checked_part(sid, row) for row in rows)

    async def answer(self, identity: bytes) -> bytes | None:
        rows = self._reads.look(
            "SELECT id FROM answer JOIN stream USING (sid) WHERE identity = ? AND ended = 1"
            " ORDER BY sid DESC LIMIT 1",
            (identity,),
        )
        return rows[0][0] if rows else None

    async def segments(self, sid: int, start: int, limit: int) -> list[SegmentRow]:
        rows = await self._reads.read(
            "SELECT sid, first, length, coding, records FROM segment WHERE sid = ?1"
            " AND first >= coalesce("
            "(SELECT max(first) FROM segment WHERE sid = ?1 AND first <= ?2), ?2)"
            " ORDER BY first LIMIT ?3",
            (sid, start, limit),
        )
        return [SegmentRow(*row) for row in rows]

    async def log_rows(self) -> list[int]:
        return [row[0] for row in await self._reads.read("SELECT seq FROM log ORDER BY seq", ())]

    async def log(self, rows: Sequence[int]) -> list[bytes]:
        numbers = ", ".join(map(str, rows))
        found = await self._reads.read(
            f"SELECT batch FROM log WHERE seq IN ({numbers}) ORDER BY seq", ()
        )
        return [row[0] for row in found]

    async def last_numbers(self) -> tuple[int, int]:
        rows = self._reads.look(
            "SELECT max((SELECT coalesce(max(sid), 0) FROM stream),"
            " (SELECT coalesce(max(sid), 0) FROM segment),"
            " (SELECT coalesce(max(sid), 0) FROM removed)),"
            " (SELECT coalesce(max(oid), 0) FROM object)",
            (),
        )
        return int(rows[0][0]), int(rows[0][1])

    async def expired(self, kind: int, now_ms: int, limit: int) -> list[int]:
        rows = self._reads.look(
            "SELECT sid FROM stream WHERE ended = 1 AND kind = ? AND expires_ms <= ?"
            " ORDER BY expires_ms LIMIT ?",
            (kind, now_ms, limit),
        )
        return [row[0] for row in rows]

    async def usage(self, query: UsageQuery) -> UsageSums:
        text, parameters = sql_of(query, "?")
        sums, groups = UsageSums(query), len(query.columns)
        for row in await self._reads.read(text, parameters):
            if row[groups]:  # without GROUP BY there is a row even if no stream is found
                sums.add(row[:groups], row[groups:])
        return sums

    async def old_usage(self, before_ms: int, limit: int) -> list[bytes]:
        sql = "SELECT stream FROM usage WHERE ended_ms < ? ORDER BY ended_ms LIMIT ?"
        return [row[0] for row in self._reads.look(sql, (before_ms, limit))]

    async def object_row(self, key: ObjectKey) -> ObjectRow | None:
        rows = self._reads.look(
            f"SELECT {OBJECT_COLUMNS} FROM object WHERE kind = ? AND name = ?", key
        )
        return checked_object(rows[0]) if rows else None

    async def values(self, oid: int, names: Sequence[str]) -> list[tuple[str, bytes]]:
        sql = f"SELECT {VALUE_COLUMNS} FROM object_value WHERE oid = ? AND name = ?"
        rows = [row for name in names for row in self._reads.look(sql, (oid, name))]
        return [checked_value(oid, row) for row in rows]

    async def value_range(self, oid: int, wanted: ValueRange) -> list[tuple[str, bytes]]:
        below = "" if wanted.beyond is None else " AND name < ?3"
        order = "DESC" if wanted.reverse else "ASC"
        rows = await self._reads.read(
            f"SELECT {VALUE_COLUMNS} FROM object_value WHERE oid = ?1 AND name >= ?2"
            f"{below} ORDER BY name {order} LIMIT ?4",
            (oid, wanted.first, wanted.beyond, wanted.limit),
        )
        return [checked_value(oid, row) for row in rows]

    async def alarms(self, now_ms: int, limit: int) -> list[ObjectRow]:
        rows = self._reads.look(
            f"SELECT {', '.join(ObjectRow._fields)} FROM object WHERE alarm_ms <= ?"
            " ORDER BY alarm_ms, oid LIMIT ?",
            (now_ms, limit),
        )
        return [ObjectRow(*row) for row in rows]

    async def object_names(self, kind: str, after: str, limit: int) -> list[str]:
        rows = await self._reads.read(
            "SELECT name FROM object WHERE kind = ? AND name > ? AND (alarm_ms IS NOT NULL"
            " OR EXISTS (SELECT 1 FROM object_value WHERE object_value.oid = object.oid))"
            " ORDER BY name LIMIT ?",
            (kind, after, limit),
        )
        return [row[0] for row in rows]

    def _stream(self, where: str, value: object) -> StreamRow | None:
        rows = self._reads.look(f"SELECT {STREAM_COLUMNS} FROM stream WHERE {where}", (value,))
        return checked_stream(rows[0]) if rows else None
