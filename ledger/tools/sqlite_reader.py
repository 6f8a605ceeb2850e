"""A ledger file seen from outside, beside the origin that owns it (`ledger.tools.reader`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from ledger.errors import ConfigError, Damaged, damaged_stream, unknown_stream
from ledger.interface import Record, StreamKind
from ledger.sqlite.cold import unpack_row
from ledger.sqlite.dictionary import Dictionary
from ledger.sqlite.file import DAMAGED_HINT
from ledger.sqlite.record import Entry, unpack_batch
from ledger.sqlite.schema import BUSY_TIMEOUT_MS, refuse_foreign
from ledger.sqlite.storage import SegmentRow, StreamRow
from ledger.tools.reader import STREAMS_AT_ONCE
from ledger.tools.status import Status, Stored, per_frame

SEGMENTS_AT_ONCE = 64
"""Segments that are in memory at a time."""
PAGE_FINDINGS = 100
"""What SQLite's own check may name before it stops."""

_COLUMNS = ", ".join(StreamRow._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteStatus(Status):
    """`frames` are those in segments: the last ones, which are in the log, are left out.

    Bytes of segments are of their records alone, without what SQLite adds, and those of
    cold ones without their dictionaries. `removed_streams` are gone, their segments are not
    yet.
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
    dictionaries: int
    dictionary_bytes: int
    removed_streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteStored(Stored):
    segments: int
    cold_segments: int


@dataclass(slots=True)
class Logged:
    """What the log has of each stream, of which segments may not have it yet; its damage."""

    by_sid: dict[int, list[Entry]] = field(default_factory=dict)
    damage: list[Damaged] = field(default_factory=list)


class SqliteReader:
    """An open ledger file. Make it with `reading_file`."""

    def __init__(self, path: Path, connection: apsw.Connection) -> None:
        self._path = path
        self._connection = connection
        self._dictionaries: dict[int, Dictionary] = {}
        self._logged: Logged | None = None

    # ---- the whole ----

    def status(self) -> SqliteStatus:
        """Segments are counted without reading what is in them."""
        number = self._number
        segments = dict.fromkeys((False, True), (0, 0, 0))  # plain and cold ones
        for cold, *figures in self._rows(
            "SELECT coding > 0, count(*), sum(length), sum(length(records)) FROM segment"
            " WHERE sid NOT IN (SELECT sid FROM removed) GROUP BY 1"
        ):
            segments[bool(cold)] = tuple(figures)
        cold_segments, cold_frames, cold_bytes = segments[True]
        count, frames, size = (sum(two) for two in zip(*segments.values(), strict=True))
        [(dictionaries, dictionary_bytes)] = self._rows(
            "SELECT count(*), coalesce(sum(length(bytes)), 0) FROM dictionary"
        )
        return SqliteStatus(
            ledger=str(self._path),
            streams=self.stream_count(),
            unfinished=number(
                "SELECT count(*) FROM stream WHERE ended = 0 AND kind = ?", StreamKind.GENERATION
            ),
            ended=number("SELECT count(*) FROM stream WHERE ended = 1"),
            object_streams=number("SELECT count(*) FROM stream WHERE kind = ?", StreamKind.OBJECT),
            objects=number("SELECT count(*) FROM object"),
            alarms=number("SELECT count(*) FROM object WHERE alarm_ms IS NOT NULL"),
            next_alarm_ms=number("SELECT min(alarm_ms) FROM object") or None,
            next_expiry_ms=number("SELECT min(expires_ms) FROM stream WHERE ended = 1 AND kind = 0")
            or None,
            frames=frames,
            file_bytes=self.ledger_bytes(),
            free_bytes=number("PRAGMA freelist_count") * number("PRAGMA page_size"),
            wal_bytes=self._wal_bytes(),
            log_rows=number("SELECT count(*) FROM log"),
            segments=count,
            segment_bytes=size,
            bytes_per_frame=per_frame(size, frames),
            cold_segments=cold_segments,
            cold_frames=cold_frames,
            cold_bytes=cold_bytes,
            cold_bytes_per_frame=per_frame(cold_bytes, cold_frames),
            dictionaries=dictionaries,
            dictionary_bytes=dictionary_bytes,
            removed_streams=number("SELECT count(*) FROM removed"),
        )

    def stream_count(self) -> int:
        return self._number("SELECT count(*) FROM stream")

    def ledger_bytes(self) -> int:
        return self._path.stat().st_size

    def expired(self, now_ms: int) -> int:
        return self._number(
            "SELECT count(*) FROM stream WHERE ended = 1 AND kind = 0 AND expires_ms <= ?", now_ms
        )

    def damage(self) -> Iterator[str]:
        for look in (self._broken_pages, self._broken_log_rows, self._strays):
            try:
                yield from look()
            except Damaged as error:
                yield error.message

    def _broken_pages(self) -> Iterator[str]:
        for (line,) in self._rows(f"PRAGMA quick_check({PAGE_FINDINGS})"):
            if line != "ok":
                yield f"the file's pages: {line}"

    def _broken_log_rows(self) -> Iterator[str]:
        for error in self._log().damage:
            yield error.message

    def _strays(self) -> Iterator[str]:
        values = self._number(
            "SELECT count(*) FROM object_value WHERE oid NOT IN (SELECT oid FROM object)"
        )
        if values:
            yield f"{values} values belong to no object"
        segments = self._number(
            "SELECT count(*) FROM segment WHERE sid NOT IN (SELECT sid FROM stream)"
            " AND sid NOT IN (SELECT sid FROM removed)"
        )
        if segments:
            yield f"{segments} segments belong to no stream"

    def copy_to(self, target: Path) -> None:
        """A consistent copy of the whole file, while its owner goes on (SQLite's backup)."""
        if target.exists():
            raise ConfigError(f"{target} exists", field="--out", hint="name a new file")
        copy = apsw.Connection(str(target))
        try:
            with copy.backup("main", self._connection, "main") as backup:
                while not backup.done:
                    backup.step(1_024)
        finally:
            copy.close()

    def release(self) -> None:
        self._logged = None
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")

    # ---- streams ----

    def streams(self) -> Iterator[StreamRow]:
        sid = 0
        while rows := self._rows(
            f"SELECT {_COLUMNS} FROM stream WHERE sid > ? ORDER BY sid LIMIT ?",
            sid,
            STREAMS_AT_ONCE,
        ):
            yield from (StreamRow(*row) for row in rows)
            sid = rows[-1][0]

    def stream(self, stream: bytes) -> StreamRow:
        rows = self._rows(f"SELECT {_COLUMNS} FROM stream WHERE id = ?", stream)
        if not rows:
            raise unknown_stream(stream)
        return StreamRow(*rows[0])

    def stored(self, row: StreamRow) -> SqliteStored:
        [(segments, cold, size)] = self._rows(
            "SELECT count(*), coalesce(sum(coding > 0), 0), coalesce(sum(length(records)), 0)"
            " FROM segment WHERE sid = ?",
            row.sid,
        )
        return SqliteStored(stored_bytes=size, segments=segments, cold_segments=cold)

    def records(self, row: StreamRow, start: int = 0) -> Iterator[tuple[int, Record]]:
        at = 0
        for segment in self._segments(row.sid, start):
            at = at or segment.first * bool(start)  # those before it were not asked for
            if segment.first != at:
                raise damaged_stream(
                    row.id, f"segment at index {segment.first} does not follow index {at - 1}"
                )
            for record in self._unpack(segment, row.id):
                if at >= start:
                    yield at, record
                at += 1
        for entry in self._log().by_sid.get(row.sid, ()):
            if entry.at < at:
                continue  # a segment holds it too
            if entry.at != at:
                raise damaged_stream(row.id, f"the log jumps from index {at - 1} to {entry.at}")
            if at >= start:
                yield at, entry.record
            at += 1

    def _segments(self, sid: int, start: int) -> Iterator[SegmentRow]:
        """A stream's segments in order, from the one that holds index `start` on."""
        first = self._number(
            "SELECT max(first) FROM segment WHERE sid = ? AND first <= ?", sid, start
        )
        while rows := self._rows(
            "SELECT sid, first, length, coding, records FROM segment"
            " WHERE sid = ? AND first >= ? ORDER BY first LIMIT ?",
            sid,
            first,
            SEGMENTS_AT_ONCE,
        ):
            yield from (SegmentRow(*row) for row in rows)
            first = rows[-1][1] + 1

    def _unpack(self, segment: SegmentRow, stream: bytes) -> list[Record]:
        where = f"stream {stream.hex()}: segment at index {segment.first}"
        dictionary = self._dictionary(segment.coding, where) if segment.coding else None
        records = unpack_row(segment, dictionary, where=where).records()
        if len(records) != segment.length:
            raise Damaged(f"{where} holds {len(records)} records, not {segment.length}")
        return records

    def _dictionary(self, coding: int, where: str) -> Dictionary:
        known = self._dictionaries.get(coding)
        if known is None:
            rows = self._rows("SELECT bytes FROM dictionary WHERE id = ?", coding)
            known = Dictionary.unpack(rows[0][0] if rows else b"", where=where)
            self._dictionaries[coding] = known
        return known

    def _log(self) -> Logged:
        """The whole log, in order; damaged rows are told of, the others are read."""
        if self._logged is not None:
            return self._logged
        logged = Logged()
        for seq, blob in self._rows("SELECT seq, batch FROM log ORDER BY seq"):
            try:
                entries = list(unpack_batch(blob, where=f"log row {seq}"))
            except Damaged as error:
                logged.damage.append(error)
                continue
            for entry in entries:
                logged.by_sid.setdefault(entry.sid, []).append(entry)
        self._logged = logged
        return logged

    # ---- the file ----

    def _wal_bytes(self) -> int:
        wal = self._path.with_name(self._path.name + "-wal")
        return wal.stat().st_size if wal.exists() else 0

    def _number(self, sql: str, *values: Any) -> int:
        """One number that a query gives; 0 for NULL."""
        rows = self._rows(sql, *values)
        return int(rows[0][0] or 0) if rows else 0

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        try:
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN")
            return self._connection.execute(sql, values).fetchall()
        except apsw.Error as error:
            raise Damaged(f"{self._path} cannot be read: {error}", hint=DAMAGED_HINT) from error


@contextmanager
def reading_file(path: Path) -> Iterator[SqliteReader]:
    """The ledger at `path`, as it is at this moment; `ConfigError` if there is none."""
    if not path.is_file():
        raise ConfigError(
            f"there is no ledger at {path}",
            field="ledger.path",
            hint="name the file with --path, or the folder of the origin with --data",
        )
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    except apsw.Error as error:
        raise ConfigError(f"{path}: {error}", field="ledger.path") from error
    try:
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        _begin(connection, path)
        yield SqliteReader(path, connection)
    finally:
        connection.close()


def _begin(connection: apsw.Connection, path: Path) -> None:
    try:
        refuse_foreign(connection, path)
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    except apsw.Error as error:
        raise ConfigError(f"{path}: {error}", field="ledger.path") from error
