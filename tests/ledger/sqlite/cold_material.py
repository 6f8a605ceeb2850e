"""Streams to keep, pack and remove: sentences of a few words, a token a word."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import apsw

from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import Append, NewStream, Record
from tailrace.ledger.sqlite.encoding import COLD_CODINGS, PLAIN, pack_segment
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.ledger.sqlite.storage import SegmentRow

WORDS = "the cat sat on a mat and then it went to sleep by an old door of wood".split()
TTL_S = 1_000.0
COLD_AFTER_S = 60.0


class Clock:
    """A clock in Unix ms that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def __call__(self) -> int:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += int(seconds * 1000)


def stream_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def token(index: int, word: int) -> Record:
    return Record(encode(Token(f" {WORDS[word]}", index)), (1_000 + word,))


def sentence(count: int, seed: int = 0, *, ends: bool = True) -> list[Record]:
    """Return the records of a stream of `count` tokens."""
    random = Random(seed)
    records = [token(index, random.randrange(len(WORDS))) for index in range(count)]
    if ends:
        records.append(Record(encode(StreamEnd(count, FinishReason.STOP, count, 0)), ()))
    return records


async def store(
    ledger: SqliteLedger, number: int, records: list[Record], ttl_s: float = TTL_S
) -> bytes:
    """Return a new stream of these records, a few with each commit; returns its id."""
    stream = stream_id(number)
    await ledger.create(NewStream(stream, "{}", Durability.PROCESS, ttl_s))
    await extend(ledger, stream, records)
    return stream


async def extend(
    ledger: SqliteLedger, stream: bytes, records: list[Record], first: int = 0
) -> None:
    for at in range(0, len(records), 100):
        batch = [
            Append(stream, 1, first + at + n, record)
            for n, record in enumerate(records[at : at + 100])
        ]
        assert await ledger.append(batch) == []


def plain_rows(sid: int, records: list[Record], each: int = 50) -> list[SegmentRow]:
    """Return the segments of a stream of these records."""
    rows = []
    for first in range(0, len(records), each):
        some = records[first : first + each]
        blob = pack_segment([record.frame for record in some], [record.ids for record in some])
        rows.append(SegmentRow(sid, first, len(some), PLAIN, blob))
    return rows


# ---- in a ledger ----


@asynccontextmanager
async def opened(folder: Path, clock: Clock, vfs: str | None = None) -> AsyncIterator[SqliteLedger]:
    """Yield a ledger that packs at once what the test asks for."""
    retention = RetentionSettings(cold_after_s=COLD_AFTER_S, pause_s=0)
    ledger = await SqliteLedger.open(folder / "ledger.db", clock, vfs=vfs, retention=retention)
    try:
        yield ledger
    finally:
        await ledger.close()


def codings(folder: Path) -> list[tuple[int, int]]:
    """(1 for cold ones, number of segments) as they are in the file."""
    connection = apsw.Connection(str(folder / "ledger.db"))
    try:
        sql = f"SELECT coding IN {COLD_CODINGS}, count(*) FROM segment GROUP BY 1 ORDER BY 1"
        return [(row[0], row[1]) for row in connection.execute(sql)]
    finally:
        connection.close()


def flip_bit(folder: Path, sid: int, at: int) -> None:
    """Flip a bit of a stream's first segment."""
    connection = apsw.Connection(str(folder / "ledger.db"))
    try:
        [(first, records)] = connection.execute(
            "SELECT first, records FROM segment WHERE sid = ? ORDER BY first LIMIT 1", (sid,)
        ).fetchall()
        assert isinstance(records, bytes)
        blob = bytearray(records)
        blob[at] ^= 1
        sql = "UPDATE segment SET records = ? WHERE sid = ? AND first = ?"
        connection.execute(sql, (bytes(blob), sid, first))
    finally:
        connection.close()


async def all_is_there(ledger: SqliteLedger, held: dict[bytes, list[Record]]) -> None:
    for stream, records in held.items():
        assert await ledger.read(stream, 0, 10**6) == records
        for start in (1, 99, len(records) - 1):
            assert await ledger.read(stream, start, 50) == records[start : start + 50]
            frames = await ledger.frames(stream, start, 50)
            assert frames == [record.frame for record in records[start : start + 50]]


async def fill(
    ledger: SqliteLedger, streams: int = 20, tokens: int = 300
) -> dict[bytes, list[Record]]:
    held = {}
    for number in range(streams):
        records = sentence(tokens, seed=number)
        held[await store(ledger, number, records)] = records
    return held
