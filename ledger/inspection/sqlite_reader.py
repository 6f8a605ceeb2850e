"""A read-only view of a ledger file, while the origin that owns it may write to it.

It is a `LedgerReader` of `ledger/inspection/reader.py`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

from tailrace.ledger.end_usage import usage_of
from tailrace.ledger.errors import ConfigError, Damaged, damaged_stream, unknown_stream
from tailrace.ledger.frame import StreamEnd, tag_of
from tailrace.ledger.inspection.reader import STREAMS_AT_ONCE, LedgerStatus, per_frame
from tailrace.ledger.interface import Record, StreamKind
from tailrace.ledger.sqlite.disk.checksum import (
    OBJECT_COLUMNS,
    STREAM_COLUMNS,
    USAGE_COLUMNS,
    VALUE_COLUMNS,
    checked_object,
    checked_stream,
    checked_usage,
    checked_value,
    unchecked_stream,
)
from tailrace.ledger.sqlite.disk.connections import Snapshot
from tailrace.ledger.sqlite.disk.file_locks import existing, require_closed_here
from tailrace.ledger.sqlite.disk.queries import Queries
from tailrace.ledger.sqlite.disk.schema import refuse_foreign
from tailrace.ledger.sqlite.disk.wal_mark import Lost, lost_file, lost_wal, read_mark
from tailrace.ledger.sqlite.encoding import COLD_CODINGS, Entry, unpack_batch, unpack_segment
from tailrace.ledger.sqlite.storage import SegmentRow, StreamRow
from tailrace.ledger.usage import Usage, UsageQuery, UsageSums

SEGMENTS_AT_ONCE = 64
"""Maximum segments in memory."""
COPIED_PAGES = 1_024
"""Pages that each step of a backup copies."""
PAGE_FINDINGS = 100
"""Maximum findings that SQLite's `quick_check` reports."""

_IS_COLD = f"coding IN {COLD_CODINGS}"

_COUNTS = {
    "streams": "count(*) FROM stream",
    "unfinished": f"count(*) FROM stream WHERE ended = 0 AND kind = {StreamKind.GENERATION:d}",
    "ended": "count(*) FROM stream WHERE ended = 1",
    "object_streams": f"count(*) FROM stream WHERE kind = {StreamKind.OBJECT:d}",
    "objects": "count(*) FROM object",
    "alarms": "count(*) FROM object WHERE alarm_ms IS NOT NULL",
    "free_bytes": "freelist_count * page_size FROM pragma_freelist_count, pragma_page_size",
    "log_rows": "count(*) FROM log",
    "removed_streams": "count(*) FROM removed",
}
"""Maps fields of `SqliteStatus` to the SQL that computes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteStatus(LedgerStatus):
    """Figures of a ledger file.

    `frames` counts only frames in segments, not the newest ones, which are still in the log.
    The size of a segment is that of its records, without SQLite's overhead. `removed_streams`
    counts streams that were removed, but whose segments are not all deleted yet.
    """

    file_bytes: int
    free_bytes: int
    wal_bytes: int
    log_rows: int
    segments: int
    segment_bytes: int
    bytes_per_frame: float | None
    cold_segments: int
    cold_frames: int
    cold_bytes: int
    cold_bytes_per_frame: float | None
    removed_streams: int


class SqliteReader:
    """A `LedgerReader` on an open ledger file; create it with `reading_file`."""

    def __init__(self, path: Path, snapshot: Snapshot, lost: Lost | None) -> None:
        self._path = path
        self._lost = lost
        self._snapshot = snapshot
        self._queries = Queries(path, snapshot)
        self._logged: dict[int, list[Entry]] | None = None
        self._log_damage: list[Damaged] = []
        self._rotten: dict[int, Damaged] = {}  # the error of each stream with a damaged row, by sid

    # ---- the whole ----

    async def status(self) -> SqliteStatus:
        """Return figures of the file, counting segments without reading their content."""
        segments = dict.fromkeys((False, True), (0, 0, 0))  # the key is True for cold segments
        for cold, *figures in self._rows(
            f"SELECT {_IS_COLD}, count(*), sum(length), sum(length(records)) FROM segment"
            " WHERE sid NOT IN (SELECT sid FROM removed) GROUP BY 1"
        ):
            segments[bool(cold)] = tuple(figures)
        cold_segments, cold_frames, cold_bytes = segments[True]
        count, frames, size = (sum(two) for two in zip(*segments.values(), strict=True))
        return SqliteStatus(
            ledger=str(self._path),
            **{name: self._snapshot.number(f"SELECT {count}") for name, count in _COUNTS.items()},
            next_alarm_ms=self._snapshot.number("SELECT min(alarm_ms) FROM object") or None,
            next_expiry_ms=self._snapshot.number(
                "SELECT min(expires_ms) FROM stream WHERE ended = 1 AND kind = 0"
            )
            or None,
            frames=frames,
            file_bytes=await self.ledger_bytes(),
            wal_bytes=self._wal_bytes(),
            segments=count,
            segment_bytes=size,
            bytes_per_frame=per_frame(size, frames),
            cold_segments=cold_segments,
            cold_frames=cold_frames,
            cold_bytes=cold_bytes,
            cold_bytes_per_frame=per_frame(cold_bytes, cold_frames),
        )

    async def ledger_bytes(self) -> int:
        return self._path.stat().st_size

    async def expired(self, now_ms: int) -> int:
        return self._snapshot.number(
            "SELECT count(*) FROM stream WHERE ended = 1 AND kind = 0 AND expires_ms <= ?", now_ms
        )

    async def damage(self) -> AsyncIterator[str]:
        looks = (
            self._lost_commits,
            self._broken_pages,
            self._broken_log_rows,
            self._broken_objects,
            self._broken_values,
            self._broken_usage,
            self._strays,
        )
        for look in looks:
            try:
                async for what in look():
                    yield what
            except Damaged as error:
                yield error.message

    async def _lost_commits(self) -> AsyncIterator[str]:
        if self._lost is not None:
            yield f"it lacks acknowledged commits: {self._lost.what}"

    async def _broken_pages(self) -> AsyncIterator[str]:
        for (line,) in self._rows(f"PRAGMA quick_check({PAGE_FINDINGS})"):
            if line != "ok":
                yield f"the file's pages: {line}"

    async def _broken_log_rows(self) -> AsyncIterator[str]:
        await self._log()
        for error in self._log_damage:
            yield error.message

    async def _broken_objects(self) -> AsyncIterator[str]:
        for row in self._snapshot.each(f"SELECT {OBJECT_COLUMNS} FROM object"):
            for what in _damage(checked_object, row):
                yield what

    async def _broken_values(self) -> AsyncIterator[str]:
        for oid, *row in self._snapshot.each(f"SELECT oid, {VALUE_COLUMNS} FROM object_value"):
            for what in _damage(checked_value, oid, row):
                yield what

    async def _broken_usage(self) -> AsyncIterator[str]:
        for row in self._snapshot.each(f"SELECT {USAGE_COLUMNS} FROM usage"):
            for what in _damage(checked_usage, row):
                yield what

    async def _strays(self) -> AsyncIterator[str]:
        values = self._snapshot.number(
            "SELECT count(*) FROM object_value WHERE oid NOT IN (SELECT oid FROM object)"
        )
        if values:
            yield f"{values} values belong to no object"
        segments = self._snapshot.number(
            "SELECT count(*) FROM segment WHERE sid NOT IN (SELECT sid FROM stream)"
            " AND sid NOT IN (SELECT sid FROM removed)"
        )
        if segments:
            yield f"{segments} segments belong to no stream"
        parts = self._snapshot.number(
            "SELECT count(*) FROM part WHERE sid NOT IN (SELECT sid FROM stream)"
            " OR (source NOT IN (SELECT sid FROM stream)"
            " AND source NOT IN (SELECT sid FROM removed))"
        )
        if parts:
            yield f"{parts} parts of branches belong to no stream"

    async def copy_to(self, target: Path) -> None:
        """Copy the whole file consistently while its owner writes (SQLite's backup)."""
        if target.exists():
            raise ConfigError(f"{target} exists", field="--out", hint="name a new file")
        with (
            closing(apsw.Connection(str(target))) as copy,
            copy.backup("main", self._snapshot.connection, "main") as backup,
        ):
            while not backup.done:
                backup.step(COPIED_PAGES)

    async def release(self) -> None:
        self._logged = None
        self._snapshot.release()

    # ---- streams ----

    async def streams(self) -> AsyncIterator[StreamRow]:
        sid = 0
        while rows := self._rows(
            f"SELECT {STREAM_COLUMNS} FROM stream WHERE sid > ? ORDER BY sid LIMIT ?",
            sid,
            STREAMS_AT_ONCE,
        ):
            for row in rows:
                try:
                    yield checked_stream(row)
                except Damaged as error:  # `records` raises this error for the stream
                    self._rotten[row[0]] = error
                    yield unchecked_stream(row)
            sid = rows[-1][0]

    async def stream(self, stream: bytes) -> StreamRow:
        row = await self._queries.stream_by_id(stream)
        if row is None:
            raise unknown_stream(stream)
        return row

    async def usage(self, query: UsageQuery) -> UsageSums:
        sums = await self._queries.usage(query)
        for usage in await self._logged_usage():
            sums.add_usage(usage)
        return sums

    async def _logged_usage(self) -> list[Usage]:
        """Return the usage of streams whose end is in the log, but not yet in a segment."""
        found = []
        for sid, entries in (await self._log()).items():
            last = entries[-1].record
            if not last.extra or tag_of(last.frame) != StreamEnd.tag:
                continue
            rows = self._rows("SELECT id FROM stream WHERE sid = ? AND ended = 0", sid)
            if rows and (usage := usage_of(rows[0][0], last)) is not None:
                found.append(usage)
        return found

    async def usage_row(self, stream: bytes) -> Usage | None:
        rows = self._rows(f"SELECT {USAGE_COLUMNS} FROM usage WHERE stream = ?", stream)
        return checked_usage(rows[0]) if rows else None

    async def stored(self, row: StreamRow) -> dict[str, int]:
        [(segments, cold, size)] = self._rows(
            f"SELECT count(*), coalesce(sum({_IS_COLD}), 0), coalesce(sum(length(records)), 0)"
            " FROM segment WHERE sid = ?",
            row.sid,
        )
        return {"stored_bytes": size, "segments": segments, "cold_segments": cold}

    async def records(
        self, row: StreamRow, start: int = 0
    ) -> AsyncGenerator[tuple[int, Record], None]:
        if (damage := self._rotten.get(row.sid)) is not None:
            raise damage
        at = 0
        async for at, record in self._inherited(row, start):
            yield at, record
        parts = await self._queries.parts(row.sid)
        at = parts[-1].end if parts else 0
        async for segment in self._segments(row.sid, start):
            if at < segment.first <= start:  # records before `start` are not requested
                at = segment.first
            if segment.first != at:
                raise damaged_stream(
                    row.id, f"segment at index {segment.first} does not follow index {at - 1}"
                )
            for record in self._unpack(segment, row.id):
                if at >= start:
                    yield at, record
                at += 1
        for entry in (await self._log()).get(row.sid, ()):
            if entry.at < at:
                continue  # this record is also in a segment
            if entry.at != at:
                raise damaged_stream(row.id, f"the log jumps from index {at - 1} to {entry.at}")
            if at >= start:
                yield at, entry.record
            at += 1

    async def _inherited(self, row: StreamRow, start: int) -> AsyncIterator[tuple[int, Record]]:
        """Yield the records from `start` on that a branch shares with other streams."""
        at = start
        for part in await self._queries.parts(row.sid):
            async for segment in self._segments(part.sid, at):
                if segment.first >= part.end:
                    break
                for index, record in enumerate(self._unpack(segment, row.id), segment.first):
                    if at <= index < part.end:
                        yield index, record
            at = max(at, part.end)

    async def _segments(self, sid: int, start: int) -> AsyncIterator[SegmentRow]:
        """Yield a stream's segments in order, beginning with the one that has index `start`."""
        last = -1
        while True:
            rows = await self._queries.segments(sid, max(start, last + 1), SEGMENTS_AT_ONCE)
            for row in rows:
                if row.first > last:
                    yield row
            if len(rows) < SEGMENTS_AT_ONCE:
                return
            last = rows[-1].first

    def _unpack(self, segment: SegmentRow, stream: bytes) -> list[Record]:
        where = f"stream {stream.hex()}: segment at index {segment.first}"
        records = unpack_segment(segment, where=where).records()
        if len(records) != segment.length:
            raise Damaged(f"{where} holds {len(records)} records, not {segment.length}")
        return records

    async def _log(self) -> dict[int, list[Entry]]:
        """Return the records in the log, in order, by the sid of their stream.

        Some of these records may be in segments, too. Errors of damaged rows go to `_log_damage`.
        """
        if self._logged is not None:
            return self._logged
        logged: dict[int, list[Entry]] = {}
        self._log_damage = []
        for seq, blob in self._rows("SELECT seq, batch FROM log ORDER BY seq"):
            try:
                entries = list(unpack_batch(blob, where=f"log row {seq}"))
            except Damaged as error:
                self._log_damage.append(error)
                continue
            for entry in entries:
                logged.setdefault(entry.sid, []).append(entry)
        self._logged = logged
        return logged

    # ---- the file ----

    def _wal_bytes(self) -> int:
        wal = self._path.with_name(self._path.name + "-wal")
        return wal.stat().st_size if wal.exists() else 0

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        return self._snapshot.look(sql, values)


def _damage(check: Callable[..., object], *row: object) -> Iterator[str]:
    try:
        check(*row)
    except Damaged as error:
        yield error.message


@asynccontextmanager
async def reading_file(path: Path) -> AsyncIterator[SqliteReader]:
    """Open a snapshot of the ledger at `path`.

    Raises:
        ConfigError: There is no ledger.
        Damaged: The file is empty, although it had acknowledged data.
    """
    require_closed_here(existing(path))
    real = Path(os.path.realpath(path))
    mark = read_mark(real)
    if (lost := lost_file(real, mark)) is not None:
        raise Damaged(f"{path} lacks acknowledged commits: {lost.what}")
    try:
        snapshot = Snapshot(real)
    except apsw.Error as error:
        raise ConfigError(f"{path}: {error}", field="ledger.path") from error
    try:
        frames = _checked_frames(path, snapshot)
        lost = lost_wal(real, mark, frames)
        if read_mark(real) != mark:
            lost = None  # the origin has just written, so `mark` may not fit the WAL
        yield SqliteReader(path, snapshot, lost)
    finally:
        snapshot.close()


def _checked_frames(path: Path, snapshot: Snapshot) -> int:
    """Return the number of whole frames in a ledger's WAL.

    Raises:
        ConfigError: The file is not a ledger.
    """
    try:
        frames = snapshot.wal_frames()
        connection = snapshot.connection
        tables = connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
        [(version, application)] = connection.execute(
            "SELECT user_version, application_id FROM pragma_user_version, pragma_application_id"
        )
    except apsw.Error as error:
        raise ConfigError(f"{path}: {error}", field="ledger.path") from error
    refuse_foreign(path, version, application, has_tables=bool(tables))
    return frames
