"""A ledger in numbers, and one stream in words."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.frame import FinishReason, StreamEnd, Token, decode
from ledger.interface import StreamKind
from ledger.reader import LedgerReader, Logged
from ledger.storage import StreamRow

TEXT_CHARS = 2_000
"""Characters of a stream's text that `show` gives."""


@dataclass(frozen=True, slots=True)
class Status:
    """All counts are of this moment; `frames` and `bytes_per_frame` leave out the log's."""

    path: str
    file_bytes: int
    free_bytes: int
    wal_bytes: int
    streams: int
    unfinished: int
    ended: int
    object_streams: int
    objects: int
    alarms: int
    next_alarm_ms: int | None
    segments: int
    cold_segments: int
    frames: int
    segment_bytes: int
    bytes_per_frame: float | None
    log_rows: int
    next_expiry_ms: int | None


def status(reader: LedgerReader) -> Status:
    """Counts; segments are counted without reading what is in them."""
    number = reader.number
    [(segments, cold, frames, size)] = reader.rows(
        "SELECT count(*), coalesce(sum(coding > 0), 0), coalesce(sum(length), 0),"
        " coalesce(sum(length(records)), 0) FROM segment"
    )
    return Status(
        path=str(reader.path),
        file_bytes=reader.file_bytes,
        free_bytes=number("PRAGMA freelist_count") * number("PRAGMA page_size"),
        wal_bytes=reader.wal_bytes,
        streams=number("SELECT count(*) FROM stream"),
        unfinished=number(
            "SELECT count(*) FROM stream WHERE ended = 0 AND kind = ?", StreamKind.GENERATION
        ),
        ended=number("SELECT count(*) FROM stream WHERE ended = 1"),
        object_streams=number("SELECT count(*) FROM stream WHERE kind = ?", StreamKind.OBJECT),
        objects=number("SELECT count(*) FROM object"),
        alarms=number("SELECT count(*) FROM object WHERE alarm_ms IS NOT NULL"),
        next_alarm_ms=number("SELECT min(alarm_ms) FROM object") or None,
        segments=segments,
        cold_segments=cold,
        frames=frames,
        segment_bytes=size,
        bytes_per_frame=round(size / frames, 2) if frames else None,
        log_rows=number("SELECT count(*) FROM log"),
        next_expiry_ms=number("SELECT min(expires_ms) FROM stream WHERE ended = 1 AND kind = 0")
        or None,
    )


@dataclass(slots=True)
class Story:
    """One stream, read from its beginning to its tip."""

    frames: int = 0
    tokens: int = 0
    frame_bytes: int = 0
    text: str = ""
    end: StreamEnd | None = None

    @property
    def state(self) -> str:
        if self.end is None:
            return "unfinished"
        return f"ended: {FinishReason(self.end.finish_reason).word}"


def story(reader: LedgerReader, row: StreamRow, logged: Logged) -> Story:
    """What a stream's frames tell; `Damaged` where it is not whole."""
    told, pieces = Story(), []
    for _, record in reader.records(row, logged):
        told.frames += 1
        told.tokens += len(record.ids)
        told.frame_bytes += len(record.frame)
        _, frame = decode(record.frame)
        if isinstance(frame, Token):
            pieces.append(frame.text)
        elif isinstance(frame, StreamEnd):
            told.end = frame
    told.text = "".join(pieces)
    return told
