"""Whether a ledger is whole: every stream contiguous, ended once, matching its checksums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ledger.errors import Damaged, FrameError
from ledger.frame import Logged, StreamEnd, decode, tag_of
from ledger.life import tokens_of
from ledger.tools.pieces import StreamPiece, pieces
from ledger.tools.reader import LedgerReader


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not whole; `stream` in hex, or None where it is no stream's."""

    stream: str | None
    what: str


@dataclass(slots=True)
class Audit:
    """What was looked at, and what is wrong with it."""

    streams: int = 0
    frames: int = 0
    ended: int = 0
    tokens: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.findings


async def verify(
    reader: LedgerReader, progress: Callable[[int], None] = lambda _done: None
) -> Audit:
    """Look at everything; `progress` is called with the number of streams done."""
    verdict = Audit(findings=[Finding(None, what) async for what in reader.damage()])
    await reader.release()
    stream = _Stream()
    try:
        async for piece in pieces(reader, reader.streams()):
            if piece.first:
                stream = _Stream()
            _check_piece(piece, stream, verdict)
            if piece.last:
                verdict.streams += 1
                verdict.ended += stream.ended_at is not None
                progress(verdict.streams)
    except Damaged as error:
        verdict.findings.append(Finding(None, error.message))
    return verdict


@dataclass(slots=True)
class _Stream:
    """What was found so far in the one that is looked at."""

    ended_at: int | None = None
    broken: bool = False


def _check_piece(piece: StreamPiece, stream: _Stream, verdict: Audit) -> None:
    if stream.broken:
        return  # one finding for each
    try:
        for index, record in piece.records:
            if stream.ended_at is not None:
                raise Damaged(f"index {index} follows the end at index {stream.ended_at}")
            _check_frame(record.frame, index)
            if tag_of(record.frame) == StreamEnd.tag:
                stream.ended_at = index
            verdict.frames += 1
            verdict.tokens += len(tokens_of(record))
        if piece.damage is not None:
            raise piece.damage
        if piece.last and piece.row.ended and stream.ended_at is None:
            raise Damaged("it is marked as ended, and has no StreamEnd")
    except (Damaged, FrameError) as error:
        stream.broken = True
        name = piece.row.id.hex()
        verdict.findings.append(Finding(name, error.message.removeprefix(f"stream {name}: ")))


def _check_frame(raw: bytes, index: int) -> None:
    """That it is one canonical logged frame on corr 0, and says the index that it has."""
    corr, frame = decode(raw)
    if not isinstance(frame, Logged):
        raise Damaged(f"index {index} holds a {type(frame).__name__}, which is never logged")
    if corr != 0 or frame.index != index:
        raise Damaged(f"index {index} holds a frame of corr {corr} that says index {frame.index}")
