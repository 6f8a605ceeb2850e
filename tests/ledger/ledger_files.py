"""Ledgers with known streams, for the tests of what looks into them from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlencode

import apsw
import psycopg
from psycopg.conninfo import conninfo_to_dict

from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import Append, Ledger, NewStream, ObjectKey, ObjectWrite, Record
from tailrace.ledger.sqlite.disk.checksum import add_functions, crc_of, restated
from tailrace.ledger.sqlite.disk.file_locks import require_closed_here
from tailrace.ledger.sqlite.encoding import column, pack_batch
from tests.ledger.backends import Backend, PostgresBackend, SqliteBackend

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))
WORDS = ("The", " tide", " turns", " é", "…")
SECRET = "s3cret@/of ours"


def token(index: int) -> Record:
    return Record(encode(Token(WORDS[index % len(WORDS)], index)), (index, 7))


def end(index: int) -> Record:
    return Record(encode(StreamEnd(index, FinishReason.LENGTH, index, 2)), ())


async def append(ledger: Ledger, stream: bytes, records: Sequence[Record]) -> None:
    first = (await ledger.info(stream)).next_index
    batch = [Append(stream, 1, first + n, record) for n, record in enumerate(records)]
    assert await ledger.append(batch) == []


async def three_streams(backend: Backend) -> Ledger:
    """Return a long ended stream A, a running one B, an empty one C; an object with a value.

    The ledger is left open.
    """
    ledger = await backend.open()
    for stream in (A, B, C):
        await ledger.create(NewStream(stream, '{"model":"demo"}', Durability.PROCESS, 60))
    for index in range(0, 1200, 100):
        await append(ledger, A, [token(n) for n in range(index, index + 100)])
    await append(ledger, A, [end(1200)])
    await append(ledger, B, [token(n) for n in range(5)])
    key = ObjectKey("stream", "one")
    claimed = await ledger.objects.claim(key)
    await ledger.objects.write(ObjectWrite(key, claimed.epoch, {"value": b"1"}))
    return ledger


class Place(Backend, Protocol):
    """The place of a closed ledger, and ways in which another program can damage it."""

    @property
    def place(self) -> Path | str: ...

    def edit(self, sql: str, *values: object) -> None: ...

    def mark_ended(self, stream: bytes) -> None:
        """Only claim that it has ended."""
        ...

    def put(self, stream: bytes, index: int, frame: bytes) -> None:
        """Add a frame without any check."""
        ...

    def lose_some_of(self, stream: bytes) -> None:
        """Remove some frames from the middle of a stream."""
        ...

    def add_stray_value(self) -> None:
        """Add a value of an object that does not exist."""
        ...


class SqlitePlace(SqliteBackend):
    """A file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.place = folder / "ledger.db"

    def edit(self, sql: str, *values: object) -> None:
        with self.opened() as connection:
            connection.execute(sql, values)

    @contextmanager
    def opened(self) -> Iterator[apsw.Connection]:
        """With the SQLite of owners, so nothing here may be reading it with another one."""
        require_closed_here(self.place)
        with closing(apsw.Connection(str(self.place))) as connection:
            add_functions(connection)
            yield connection

    def mark_ended(self, stream: bytes) -> None:
        sql = f"UPDATE stream SET ended = 1, crc = {restated(ended='1')} WHERE id = ?"
        self.edit(sql, stream)

    def put(self, stream: bytes, index: int, frame: bytes) -> None:
        with self.opened() as connection:
            [(sid,)] = connection.execute("SELECT sid FROM stream WHERE id = ?", (stream,))
        row = pack_batch(column([sid]), [index], [frame], [()])
        self.edit("INSERT INTO log VALUES (1000, ?)", row)

    def lose_some_of(self, stream: bytes) -> None:
        """Remove one of several segments."""
        self.edit(
            "DELETE FROM segment WHERE first = (SELECT min(first) FROM segment WHERE first > 0)"
            " AND sid = (SELECT sid FROM stream WHERE id = ?)",
            stream,
        )

    def add_stray_value(self) -> None:
        crc = crc_of((99, "name", b"\0"))
        self.edit("INSERT INTO object_value VALUES (99, 'name', x'00', ?)", crc)


class PostgresPlace(PostgresBackend):
    """A database, named by a URL with a password, which a test server never asks for."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        given = conninfo_to_dict(dsn)
        user, database = given.pop("user"), given.pop("dbname")
        where = urlencode({name: str(value) for name, value in given.items()})
        self.place = f"postgresql://{user}:{quote(SECRET, safe='')}@/{database}?{where}"

    def edit(self, sql: str, *values: object) -> None:
        with psycopg.connect(self.dsn, options="-c search_path=tailrace") as connection:
            connection.execute(sql.encode(), values)

    def mark_ended(self, stream: bytes) -> None:
        self.edit(f"UPDATE head SET ended = true WHERE sid = {_SID}", stream)

    def put(self, stream: bytes, index: int, frame: bytes) -> None:
        self.edit(f"INSERT INTO frame VALUES ({_SID}, %s, NULL, %s)", stream, index, frame)

    def lose_some_of(self, stream: bytes) -> None:
        self.edit(f"DELETE FROM frame WHERE sid = {_SID} AND index IN (700, 701)", stream)

    def add_stray_value(self) -> None:
        self.edit("INSERT INTO value VALUES (99, 'name', '')")


_SID = "(SELECT sid FROM stream WHERE id = %s)"
