"""Ledger files with known streams, for the tests of what looks into them from outside."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from ledger.interface import Append, NewStream, Record
from ledger.sqlite import SqliteLedger

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))
WORDS = ("The", " tide", " turns", " é", "…")


def token(index: int) -> Record:
    return Record(encode(Token(WORDS[index % len(WORDS)], index)), (index, 7))


def end(index: int) -> Record:
    return Record(encode(StreamEnd(index, FinishReason.LENGTH, index, 2)), ())


async def append(ledger: SqliteLedger, stream: bytes, records: Sequence[Record]) -> None:
    first = (await ledger.info(stream)).next_index
    batch = [Append(stream, 1, first + n, record) for n, record in enumerate(records)]
    assert await ledger.append(batch) == []


async def three_streams(path: Path) -> SqliteLedger:
    """A long ended stream A, a running one B, an empty one C; the ledger is left open."""
    ledger = await SqliteLedger.open(path, lambda: 1_000_000)
    for stream in (A, B, C):
        await ledger.create(NewStream(stream, '{"model":"demo"}', Durability.PROCESS, 60))
    for index in range(0, 1200, 100):
        await append(ledger, A, [token(n) for n in range(index, index + 100)])
    await append(ledger, A, [end(1200)])
    await append(ledger, B, [token(n) for n in range(5)])
    return ledger


@contextmanager
def editing(path: Path) -> Iterator[sqlite3.Connection]:
    """The closed file, to be damaged with another program."""
    connection = sqlite3.connect(path)
    try:
        yield connection
        connection.commit()
    finally:
        connection.close()
