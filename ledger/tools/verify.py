"""Whether a ledger is whole: every stream contiguous, ended once, matching its checksums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ledger.errors import Damaged, FrameError
from ledger.frame import Logged, Tag, decode, tag_of
from ledger.sqlite.storage import StreamRow
from ledger.tools.reader import LedgerReader


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not whole; `stream` in hex, or None where it is no stream's."""

    stream: str | None
    what: str


@dataclass(slots=True)
class Verdict:
    """What was looked at, and what is wrong with it."""

    streams: int = 0
    frames: int = 0
    ended: int = 0
    tokens: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.findings


def verify(reader: LedgerReader, progress: Callable[[int], None] | None = None) -> Verdict:
    """Look at everything; `progress` is called with the number of streams done."""
    verdict = Verdict(findings=[Finding(None, what) for what in reader.damage()])
    try:
        for row in reader.streams():
            _check_stream(reader, row, verdict)
            verdict.streams += 1
            if progress is not None:
                progress(verdict.streams)
    except Damaged as error:
        verdict.findings.append(Finding(None, error.message))
    return verdict


def _check_stream(reader: LedgerReader, row: StreamRow, verdict: Verdict) -> None:
    ended_at: int | None = None
    try:
        for index, record in reader.records(row):
            if ended_at is not None:
                raise Damaged(f"index {index} follows the end at index {ended_at}")
            _check_frame(record.frame, index)
            if tag_of(record.frame) == Tag.STREAM_END:
                ended_at = index
            verdict.frames += 1
            verdict.tokens += len(record.ids)
        if row.ended and ended_at is None:
            raise Damaged("it is marked as ended, and has no StreamEnd")
    except (Damaged, FrameError) as error:
        what = error.message.removeprefix(f"stream {row.id.hex()}: ")
        verdict.findings.append(Finding(row.id.hex(), what))
    verdict.ended += ended_at is not None


def _check_frame(raw: bytes, index: int) -> None:
    """That it is one canonical logged frame on corr 0, and says the index that it has."""
    corr, frame = decode(raw)
    if not isinstance(frame, Logged):
        raise Damaged(f"index {index} holds a {type(frame).__name__}, which is never logged")
    if corr != 0 or frame.index != index:
        raise Damaged(f"index {index} holds a frame of corr {corr} that says index {frame.index}")
