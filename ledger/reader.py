"""A ledger file seen from outside, read-only, beside the origin that owns it.

What the tools of `tailrace ledger` are made of. Everything is read in one transaction, so
that it is the state of one moment; the owner goes on writing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from ledger.errors import ConfigError, Damaged, NotFound
from ledger.frame import Durability
from ledger.interface import Record, StreamKind
from ledger.record import Entry, segment_frames, segment_ids, unpack_batch
from ledger.sqlite import unknown_stream
from ledger.sqlite_schema import BUSY_TIMEOUT_MS, refuse_foreign
from ledger.storage import SegmentRow, StreamRow

STREAMS_AT_ONCE = 1_000
"""Rows of streams that are in memory at a time."""
SEGMENTS_AT_ONCE = 64
"""Segments likewise."""


@dataclass(slots=True)
class Logged:
    """What the log, which segments do not hold yet, has of each stream; and its damage."""

    rows: int = 0
    by_sid: dict[int, list[Entry]] = field(default_factory=dict)
    damage: list[Damaged] = field(default_factory=list)


class LedgerReader:
    """An open ledger file. Make it with `reading`."""

    def __init__(self, path: Path, connection: apsw.Connection) -> None:
        self.path = path
        self._connection = connection
        self._dictionaries: dict[int, bytes] = {}

    # ---- streams ----

    def streams(self) -> Iterator[StreamRow]:
        """Every stream, in the order of their creation in this file."""
        columns = ", ".join(StreamRow._fields)
        sid = 0
        while rows := self._rows(
            f"SELECT {columns} FROM stream WHERE sid > ? ORDER BY sid LIMIT ?",
            sid,
            STREAMS_AT_ONCE,
        ):
            yield from (StreamRow(*row) for row in rows)
            sid = rows[-1][0]

    def stream(self, stream: bytes) -> StreamRow:
        """One stream; `NotFound` if there is none."""
        columns = ", ".join(StreamRow._fields)
        rows = self._rows(f"SELECT {columns} FROM stream WHERE id = ?", stream)
        if not rows:
            raise unknown_stream(stream)
        return StreamRow(*rows[0])

    def segments(self, sid: int, start: int = 0) -> Iterator[SegmentRow]:
        """A stream's segments in order, from the one that holds index `start` on."""
        first = self.number(
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

    def unpack(self, row: SegmentRow, *, where: str) -> list[Record]:
        """The records of a segment, plain or cold; `Damaged`, naming `where`."""
        frames = segment_frames(row.records, where=where)
        return [Record(*pair) for pair in zip(frames, segment_ids(row.records), strict=True)]

    def log(self) -> Logged:
        """The whole log, in order; damaged rows are told of, the others are read."""
        logged = Logged()
        for seq, blob in self._rows("SELECT seq, batch FROM log ORDER BY seq"):
            logged.rows += 1
            try:
                entries = list(unpack_batch(blob, where=f"log row {seq}"))
            except Damaged as error:
                logged.damage.append(error)
                continue
            for entry in entries:
                logged.by_sid.setdefault(entry.sid, []).append(entry)
        return logged

    def records(
        self, row: StreamRow, logged: Logged, start: int = 0
    ) -> Iterator[tuple[int, Record]]:
        """(index, record) from `start` on; `Damaged` where the stream is not whole."""
        at = 0
        for segment in self.segments(row.sid, start):
            at = at or segment.first * bool(start)
            where = f"stream {row.id.hex()}: segment at index {segment.first}"
            if segment.first != at:
                raise Damaged(f"{where} does not follow index {at - 1}")
            for record in self.unpack(segment, where=where):
                if at >= start:
                    yield at, record
                at += 1
        for entry in logged.by_sid.get(row.sid, ()):
            if entry.at < at:
                continue  # a segment holds it too
            if entry.at != at:
                raise Damaged(
                    f"stream {row.id.hex()}: the log jumps from index {at - 1} to {entry.at}"
                )
            if at >= start:
                yield at, entry.record
            at += 1

    # ---- the file ----

    def number(self, sql: str, *values: Any) -> int:
        """One number that a query gives; 0 for NULL."""
        rows = self._rows(sql, *values)
        return int(rows[0][0] or 0) if rows else 0

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """What a query gives; `Damaged` if the file cannot be read there."""
        return self._rows(sql, *values)

    @property
    def file_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def wal_bytes(self) -> int:
        wal = self.path.with_name(self.path.name + "-wal")
        return wal.stat().st_size if wal.exists() else 0

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

    def _rows(self, sql: str, *values: Any) -> list[Any]:
        try:
            return self._connection.execute(sql, values).fetchall()
        except apsw.Error as error:
            raise Damaged(
                f"{self.path} cannot be read: {error}",
                hint="see to the disk; restore the file from a copy",
            ) from error


@contextmanager
def reading(path: Path) -> Iterator[LedgerReader]:
    """The ledger at `path`, as it is at this moment."""
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
        yield LedgerReader(path, connection)
    finally:
        connection.close()


def _begin(connection: apsw.Connection, path: Path) -> None:
    try:
        refuse_foreign(connection, path)
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    except apsw.Error as error:
        raise ConfigError(f"{path}: {error}", field="ledger.path") from error


def kind_word(row: StreamRow) -> str:
    return StreamKind(row.kind).name.lower()


def durability_word(row: StreamRow) -> str:
    return Durability(row.durability).name.lower()


def parse_stream(text: str) -> bytes:
    """The id that somebody typed; `NotFound` for what cannot be one."""
    try:
        stream = bytes.fromhex(text)
    except ValueError:
        stream = b""
    if len(stream) != 16 or len(text) != 32:
        raise NotFound(
            f"{text!r} is not a stream id", code="unknown_stream", hint="it has 32 hex digits"
        )
    return stream
