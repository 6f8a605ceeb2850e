"""A ledger seen from outside, read-only, beside the origins that write it.

What the tools of `tailrace ledger` are made of. Everything is read in one transaction, so
that it is the state of one moment, until that is released; the origins go on writing meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from ledger.errors import NotFound
from ledger.frame import Durability
from ledger.interface import Record, StreamKind
from ledger.sqlite.storage import StreamRow

STREAMS_AT_ONCE = 1_000
"""Rows of streams that are in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """What every ledger can count. `ledger` says where it is, without secrets."""

    ledger: str
    streams: int
    unfinished: int
    ended: int
    object_streams: int
    objects: int
    alarms: int
    next_alarm_ms: int | None
    next_expiry_ms: int | None
    frames: int


def per_frame(size: int, frames: int) -> float | None:
    """Bytes for each frame; None where there is no frame."""
    return round(size / frames, 2) if frames else None


class LedgerReader(Protocol):
    """A ledger as it was at one moment. Make it with `reading`.

    Methods raise `Damaged` for what was stored and is not whole, `LedgerFailed` where the
    storage has gone away.
    """

    async def status(self) -> LedgerStatus: ...

    async def ledger_bytes(self) -> int:
        """What the ledger takes where it is stored."""

    async def expired(self, now_ms: int) -> int:
        """How many streams have outlived their retention at `now_ms` (Unix time)."""

    def streams(self) -> AsyncIterator[StreamRow]:
        """Every stream, those of an hour in the order of their creation."""

    async def stream(self, stream: bytes) -> StreamRow:
        """One stream; `NotFound` if there is none."""

    async def stored(self, row: StreamRow) -> dict[str, int]:
        """What one stream takes where it is stored: `stored_bytes` of frames and ids, and more."""

    def records(self, row: StreamRow, start: int = 0) -> AsyncGenerator[tuple[int, Record], None]:
        """(index, record) from `start` on; `Damaged` where the stream is not whole."""

    def damage(self) -> AsyncIterator[str]:
        """What is not whole and belongs to no stream, in words. Looks at everything."""

    async def release(self) -> None:
        """Let go of the moment: what is read next is of a later one."""


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
