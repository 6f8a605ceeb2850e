"""A ledger seen from outside, read-only, beside the origins that write it.

What the tools of `tailrace ledger` are made of. Everything is read in one transaction, so
that it is the state of one moment; the origins go on writing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ledger.errors import NotFound
from ledger.frame import Durability
from ledger.interface import Record, StreamKind
from ledger.sqlite.storage import StreamRow
from ledger.tools.status import Status, Stored

STREAMS_AT_ONCE = 1_000
"""Rows of streams that are in memory at a time."""


class LedgerReader(Protocol):
    """A ledger as it was at one moment. Make it with `reading`.

    Methods raise `Damaged` for what was stored and is not whole, `LedgerFailed` where the
    storage has gone away.
    """

    def status(self) -> Status: ...

    def stream_count(self) -> int: ...

    def ledger_bytes(self) -> int:
        """What the ledger takes where it is stored."""
        ...

    def expired(self, now_ms: int) -> int:
        """How many streams have outlived their retention at `now_ms` (Unix time)."""
        ...

    def streams(self) -> Iterator[StreamRow]:
        """Every stream, those of an hour in the order of their creation."""
        ...

    def stream(self, stream: bytes) -> StreamRow:
        """One stream; `NotFound` if there is none."""
        ...

    def stored(self, row: StreamRow) -> Stored:
        """What one stream takes where it is stored."""
        ...

    def records(self, row: StreamRow, start: int = 0) -> Iterator[tuple[int, Record]]:
        """(index, record) from `start` on; `Damaged` where the stream is not whole."""
        ...

    def damage(self) -> Iterator[str]:
        """What is not whole and belongs to no stream, in words. Looks at everything."""
        ...

    def release(self) -> None:
        """Let go of the moment: what is read next is of a later one."""
        ...


def reading(place: Path | str) -> AbstractContextManager[LedgerReader]:
    """The ledger in a file, or in the database that a URL names, as it is at this moment.

    Raises `ConfigError` where there is none, `LedgerFailed` where the server is away.
    """
    # Imported here, because the driver for PostgreSQL is an extra.
    if isinstance(place, Path):
        from ledger.tools.sqlite_reader import reading_file

        return reading_file(place)
    from ledger.tools.postgres_reader import reading_database

    return reading_database(place)


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
