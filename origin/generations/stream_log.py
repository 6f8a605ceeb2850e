"""The log of a stream, as far as a worker needs it to go on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tailrace.ledger.frame import Notice, ScoredToken, StreamEnd, Token, ToolCall, decode
from tailrace.ledger.interface import Ledger, Record
from tailrace.ledger.record_extra import IdSpan, RecordExtra
from tailrace.ledger.stream_text import StreamText

SLICE_RECORDS = 512
"""Records that are read and decoded between two turns of the event loop: a few milliseconds."""


@dataclass(slots=True)
class History:
    """The contents of a stream's records, which are added in order.

    `steered` are the spans of `ids` that came from Steer orders, one for each order. `sent_bytes`
    counts the UTF-8 bytes of its text, and of the names and arguments of its `calls`. `engine` is
    the fingerprint that its first record of an engine has, if its recipe has none.
    """

    next_index: int = 0
    ids: list[int] = field(default_factory=list)
    steered: list[IdSpan] = field(default_factory=list)
    engine: str | None = None
    sent_bytes: int = 0
    calls: int = 0
    text: StreamText = field(default_factory=StreamText)
    notices: list[Notice] = field(default_factory=list)
    has_end: bool = False

    @property
    def is_begun(self) -> bool:
        """Return True if an engine has made a frame of it: the others are notices."""
        return self.next_index > len(self.notices)

    def add(self, record: Record) -> None:
        _, frame = decode(record.frame)
        self.next_index += 1
        if record.extra:
            self._add_extra(RecordExtra.of(record))
        self.ids += record.ids
        self.text.add(frame)
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


async def read_history(ledger: Ledger, stream: bytes, turn: asyncio.Lock) -> History:
    """Return what a stream's whole log says.

    The lock `turn` is held meanwhile, so that many reads at once do not block the event loop: other
    work has its turns between two logs, and while a read waits for the disk or a server.
    """
    history = History()
    async with turn:
        await asyncio.sleep(0)  # a short log is in memory, and is read without waiting
        while records := await ledger.read(stream, history.next_index, SLICE_RECORDS):
            for record in records:
                history.add(record)
    return history
