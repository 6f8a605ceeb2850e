"""Every kind of ledger, opened the same way, and what tests put into one."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, Token, encode, index_of
from tailrace.ledger.interface import Append, Ledger, NewStream, Record, StreamKind
from tailrace.ledger.postgres.ledger import PostgresLedger
from tailrace.ledger.sqlite.ledger import SqliteLedger

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))
TTL_S = 60.0


class Clock:
    """A clock in Unix ms that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


class Backend(Protocol):
    """A place that holds a ledger, which may be opened again after it was closed."""

    clock: Clock

    async def open(self) -> Ledger: ...


class SqliteBackend:
    """A ledger in a file, on a clock that is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self._path = folder / "ledger.db"

    async def open(self) -> Ledger:
        return await SqliteLedger.open(self._path, self.clock)


class PostgresBackend:
    """Each time it is opened it is by another owner, as origins do."""

    def __init__(self, dsn: str) -> None:
        self.clock = Clock()
        self.dsn = dsn
        self._owners = itertools.count(1)

    async def open(self, lease_s: float = 3.0) -> PostgresLedger:
        owner = f"origin {next(self._owners)}"
        return await PostgresLedger.open(self.dsn, self.clock, owner=owner, lease_s=lease_s)


@asynccontextmanager
async def opened(backend: Backend) -> AsyncIterator[Ledger]:
    ledger = await backend.open()
    try:
        yield ledger
    finally:
        await ledger.close()


@asynccontextmanager
async def opened_file(path: Path, clock: Clock | None = None) -> AsyncIterator[SqliteLedger]:
    """Yield the ledger in a file, for tests of what only a file has."""
    ledger = await SqliteLedger.open(path, clock or Clock())
    try:
        yield ledger
    finally:
        await ledger.close()


def new(
    stream: bytes = A,
    durability: Durability = Durability.PROCESS,
    *,
    key: str | None = None,
    request_hash: bytes = b"",
    kind: StreamKind = StreamKind.GENERATION,
    ttl_s: float = TTL_S,
) -> NewStream:
    return NewStream(stream, '{"prompt_ids":[1,2]}', durability, ttl_s, key, request_hash, kind)


def token(index: int, text: str = " the") -> Record:
    return Record(encode(Token(text, index)), (index, index + 1))


def end(index: int) -> Record:
    return Record(encode(StreamEnd(index, FinishReason.LENGTH, index, 2)), (99,))


def tokens(stream: bytes, indexes: Iterable[int], epoch: int = 1) -> list[Append]:
    return [Append(stream, epoch, index, token(index)) for index in indexes]


async def finish(ledger: Ledger, stream: bytes, count: int) -> list[Record]:
    """Append `count` tokens and the end; returns the records."""
    records = [*(token(index) for index in range(count)), end(count)]
    batch = [Append(stream, 1, index, record) for index, record in enumerate(records)]
    assert await ledger.append(batch) == []
    return records


def indexes(records: Sequence[Record]) -> list[int]:
    return [index_of(record.frame) for record in records]


async def everything(ledger: Ledger, stream: bytes) -> list[Record]:
    """Return all records of a stream, some at a time."""
    records: list[Record] = []
    while more := await ledger.read(stream, len(records), 100):
        records += more
    return records


async def refusals(ledger: Ledger, *appends: Append) -> list[tuple[Append, type[TailraceError]]]:
    """Append a batch; return the refused appends with their errors."""
    return [(refused, type(error)) for refused, error in await ledger.append(list(appends))]
