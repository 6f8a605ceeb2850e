"""One stream in words, read from its beginning to its tip."""

from __future__ import annotations

from dataclasses import dataclass

from ledger.frame import FinishReason, StreamEnd, decode
from ledger.sqlite.storage import StreamRow
from ledger.text import StreamText
from ledger.tools.reader import LedgerReader

TEXT_CHARS = 2_000
"""Characters of a stream's text that `show` gives."""


@dataclass(slots=True)
class Story:
    """What a stream's frames tell."""

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


def story(reader: LedgerReader, row: StreamRow) -> Story:
    """Read it all; `Damaged` where it is not whole."""
    told, text = Story(), StreamText()
    for _, record in reader.records(row):
        told.frames += 1
        told.tokens += len(record.ids)
        told.frame_bytes += len(record.frame)
        _, frame = decode(record.frame)
        text.add(frame)
        if isinstance(frame, StreamEnd):
            told.end = frame
    told.text = text.text
    return told
