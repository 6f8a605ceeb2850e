"""The contents of a stream's log that a worker needs to continue the stream."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tailrace.ledger.frame import Notice, ScoredToken, StreamEnd, Token, ToolCall, decode
from tailrace.ledger.interface import Ledger, Record
from tailrace.ledger.record_extra import IdSpan, RecordExtra
from tailrace.ledger.stream_text import StreamText
from tailrace.origin.core.frame_tokens import FrameTokens

RETRIED = "retried"
"""Code of the Notice that an origin adds when it continues a stream whose run has failed."""
SLICE_RECORDS = 512
"""Maximum number of records that are read and decoded at a time. Decoding them blocks the event
loop for a few milliseconds."""


@dataclass(slots=True)
class History:
    """The contents of a stream's records, which are added in order.

    `steered` has, for each Steer order, the span of `ids` that the order inserted. `sent_bytes`
    counts the UTF-8 bytes of the text, and of names and arguments of tool calls. `calls` is the
    number of tool calls. `engine` is the engine's fingerprint if a record stores it; None if only
    the stream's recipe has it. `at_ms` is the last stored time as Unix ms, or 0 (see
    `frame_times`). Records before index `begin` belong to the prompt and are not added.
    `last_output` is the index of the last frame other than a notice, or -1.
    """

    next_index: int = 0
    ids: list[int] = field(default_factory=list)
    steered: list[IdSpan] = field(default_factory=list)
    engine: str | None = None
    sent_bytes: int = 0
    calls: int = 0
    text: StreamText = field(default_factory=StreamText)
    frame_tokens: FrameTokens = field(default_factory=FrameTokens)
    notices: list[Notice] = field(default_factory=list)
    has_end: bool = False
    at_ms: int = 0
    begin: int = 0
    last_output: int = -1

    @property
    def is_begun(self) -> bool:
        """Return True if the log has any frame other than notices, so that generation has begun."""
        return self.next_index - self.begin > len(self.notices)

    @property
    def retried(self) -> list[int]:
        """Return the indexes of the notices that say that a failed run was retried."""
        return [notice.index for notice in self.notices if notice.code == RETRIED]

    def add(self, record: Record) -> None:
        _, frame = decode(record.frame)
        self.frame_tokens.add(self.next_index, len(record.ids))
        self.next_index += 1
        if record.extra:
            self._add_extra(RecordExtra.of(record))
        self.ids += record.ids
        self.text.add(frame)
        if not isinstance(frame, Notice):
            self.last_output = self.next_index - 1
        match frame:
            case Token() | ScoredToken():
                self.sent_bytes += len(frame.text.encode())
            case ToolCall():
                self.sent_bytes += len(frame.name.encode()) + len(frame.arguments.encode())
                self.calls = frame.call + 1
            case Notice():
                self.notices.append(frame)
            case StreamEnd():
                self.has_end = True

    def _add_extra(self, extra: RecordExtra) -> None:
        before = len(self.ids)
        self.steered += [IdSpan(before + span.start, span.count) for span in extra.steered]
        self.engine = self.engine or extra.engine
        self.at_ms = extra.at_ms or self.at_ms


async def read_history(
    ledger: Ledger, stream: bytes, turn: asyncio.Lock, begin: int = 0, until: int | None = None
) -> History:
    """Read the log of a stream, from index `begin` up to but not `until`.

    The lock `turn` is held meanwhile, so that only one log is read at a time. Other tasks can run
    before each log, and while a read waits for the disk or the database.
    """
    history = History(begin, begin=begin)
    async with turn:
        await asyncio.sleep(0)  # let other tasks run, as reading a log in memory never waits
        while records := await ledger.read(stream, history.next_index, _room(history, until)):
            for record in records:
                history.add(record)
    return history


def _room(history: History, until: int | None) -> int:
    return SLICE_RECORDS if until is None else min(SLICE_RECORDS, until - history.next_index)
