"""A read-only view of a ledger on PostgreSQL while origins use it.

A snapshot is a transaction that is REPEATABLE READ READ ONLY, so a standby can serve it, too.
During the transaction a lock keeps origins from dropping partitions of frames: a snapshot keeps
deleted rows, but it loses a dropped table at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from tailrace.ledger.errors import ConfigError, Damaged, LedgerFailed, TailraceError, unknown_stream
from tailrace.ledger.frame import StreamEnd, tag_of
from tailrace.ledger.inspection.reader import STREAMS_AT_ONCE, LedgerStatus, per_frame
from tailrace.ledger.interface import Record
from tailrace.ledger.postgres.rows import stored_record, stored_sums
from tailrace.ledger.postgres.schema import SCHEMA_VERSION, version_in
from tailrace.ledger.postgres.server import PostgresUrl
from tailrace.ledger.postgres.statements import TABLE_BYTES
from tailrace.ledger.sqlite.storage import StreamRow
from tailrace.ledger.usage import Usage, UsageQuery, UsageSums, sql_of

MAX_INDEX = 2**63 - 1
RECORDS_AT_ONCE = 512
"""Maximum records in memory: 32 MiB, if all are the 64 KiB chunks that objects store."""

_STREAM = """
SELECT s.sid, s.id, s.kind, h.epoch, h.ended::int, s.durability, s.recipe, s.created_ms,
    h.ttl_ms, h.expires_ms, s.idempotency_key, s.request_hash
FROM stream s JOIN head h ON h.sid = s.sid
"""
_RECORDS = """
SELECT index, frame, ids, extra FROM frame WHERE sid = %s AND index >= %s AND index < %s
ORDER BY index LIMIT %s
"""
_STATUS = f"""
SELECT to_jsonb(status) FROM (SELECT * FROM (
    SELECT count(*) AS streams, count(*) FILTER (WHERE NOT ended AND kind = 0) AS unfinished,
        count(*) FILTER (WHERE ended) AS ended, count(*) FILTER (WHERE kind = 1) AS object_streams,
        min(expires_ms) FILTER (WHERE ended AND kind = 0) AS next_expiry_ms,
        coalesce(sum(next_index), 0)::bigint AS frames
    FROM head) AS streams, (
    SELECT count(*) AS objects, count(alarm_ms) AS alarms, min(alarm_ms) AS next_alarm_ms
    FROM object) AS objects, (
    SELECT count(*) AS partitions,
        coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint AS frame_bytes
    FROM pg_inherits WHERE inhparent = 'frame'::regclass) AS partitions,
    (SELECT count(*) AS expired_streams FROM expired) AS expired,
    (SELECT count(*) AS origins FROM owner WHERE expires > clock_timestamp()) AS owners,
    ({TABLE_BYTES}) AS tables
) AS status
"""
"""Query for the fields of `PostgresStatus`."""
_STRAYS = {
    "streams have no head": """
SELECT count(*) FROM stream s WHERE NOT EXISTS (SELECT FROM head h WHERE h.sid = s.sid)
""",
    "heads belong to no stream": """
SELECT count(*) FROM head h WHERE NOT EXISTS (SELECT FROM stream s WHERE s.sid = h.sid)
""",
    "heads are of another kind than their stream": """
SELECT count(*) FROM head h JOIN stream s ON s.sid = h.sid WHERE h.kind <> s.kind
""",
    "values belong to no object": """
SELECT count(*) FROM value v WHERE NOT EXISTS (SELECT FROM object o WHERE o.oid = v.oid)
""",
    "parts of branches belong to no stream": """
SELECT count(*) FROM part p WHERE NOT EXISTS (SELECT FROM stream s WHERE s.sid = p.sid)
    OR (NOT EXISTS (SELECT FROM stream s WHERE s.sid = p.source)
        AND NOT EXISTS (SELECT FROM expired e WHERE e.sid = p.source))
""",
    "sids of frames belong to no stream": """
SELECT count(*) FROM (SELECT DISTINCT sid FROM frame) f
WHERE NOT EXISTS (SELECT FROM stream s WHERE s.sid = f.sid)
    AND NOT EXISTS (SELECT FROM expired e WHERE e.sid = f.sid)
""",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresStatus(LedgerStatus):
    """Figures of a ledger on PostgreSQL. Sizes of tables include their indexes and free space.

    `frames` counts the frames of streams that have not expired. `frame_bytes` is the size of the
    tables of frames, which may still have frames of the `expired_streams`. `bytes_per_frame` is
    `frame_bytes` divided by `frames`. `origins` counts the origins with a valid lease.
    """

    table_bytes: int
    frame_bytes: int
    bytes_per_frame: float | None
    partitions: int
    expired_streams: int
    origins: int


class PostgresReader:
    """A `LedgerReader` on an open connection; create it with `reading_database`."""

    def __init__(self, url: PostgresUrl, connection: psycopg.AsyncConnection) -> None:
        self._url = url
        self._connection = connection

    # ---- the whole ----

    async def status(self) -> PostgresStatus:
        [(figures,)] = await self._rows(_STATUS)
        size = per_frame(figures["frame_bytes"], figures["frames"])
        return PostgresStatus(ledger=str(self._url), bytes_per_frame=size, **figures)

    async def ledger_bytes(self) -> int:
        return await self._number(TABLE_BYTES)

    async def expired(self, now_ms: int) -> int:
        return await self._number(
            "SELECT count(*) FROM head WHERE ended AND kind = 0 AND expires_ms <= %s", (now_ms,)
        )

    async def damage(self) -> AsyncIterator[str]:
        for what, sql in _STRAYS.items():
            try:
                strays = await self._number(sql)
            except Damaged as error:
                yield error.message
                continue
            if strays:
                yield f"{strays} {what}"

    async def release(self) -> None:
        await self._connection.rollback()

    # ---- streams ----

    async def streams(self) -> AsyncIterator[StreamRow]:
        sid = -1
        while rows := await self._rows(
            f"{_STREAM} WHERE s.sid > %s ORDER BY s.sid LIMIT %s", (sid, STREAMS_AT_ONCE)
        ):
            for row in rows:
                yield _stream_row(row)
            sid = rows[-1][0]

    async def stream(self, stream: bytes) -> StreamRow:
        rows = await self._rows(f"{_STREAM} WHERE s.id = %s", (stream,))
        if not rows:
            raise unknown_stream(stream)
        return _stream_row(rows[0])

    async def usage(self, query: UsageQuery) -> UsageSums:
        text, parameters = sql_of(query, "%s")
        values = tuple(one.encode() if isinstance(one, str) else one for one in parameters)
        return stored_sums(query, await self._rows(text, values))

    async def usage_row(self, stream: bytes) -> Usage | None:
        columns = ", ".join(Usage._fields)
        rows = await self._rows(f"SELECT {columns} FROM usage WHERE stream = %s", (stream,))
        if not rows:
            return None
        id_, ended_ms, *texts_and_counts = rows[0]
        told: list[Any] = [one if isinstance(one, int) else _text(one) for one in texts_and_counts]
        return Usage(bytes(id_), ended_ms, *told)

    async def stored(self, row: StreamRow) -> dict[str, int]:
        size = await self._number(
            "SELECT sum(octet_length(frame) + coalesce(octet_length(ids), 0)"
            " + coalesce(octet_length(extra), 0)) FROM frame"
            " WHERE sid = %s",
            (row.sid,),
        )
        return {"stored_bytes": size}

    async def records(
        self, row: StreamRow, start: int = 0
    ) -> AsyncGenerator[tuple[int, Record], None]:
        at, last = start, None
        parts = await self._rows(
            'SELECT source, "end" FROM part WHERE sid = %s ORDER BY "end"', (row.sid,)
        )
        for sid, end in (*parts, (row.sid, MAX_INDEX)):
            while rows := await self._rows(_RECORDS, (sid, at, end, RECORDS_AT_ONCE)):
                for index, *stored in rows:
                    record = stored_record(*stored)
                    if index != at:
                        raise _damaged(row, f"index {index} does not follow index {at - 1}")
                    yield at, record
                    at, last = at + 1, record.frame
        next_index = await self._number("SELECT next_index FROM head WHERE sid = %s", (row.sid,))
        if at != max(start, next_index):
            raise _damaged(row, f"it has {at} frames, but its head says {next_index}")
        if last is not None and tag_of(last) == StreamEnd.tag and not row.ended:
            raise _damaged(row, "it has a StreamEnd, but is not marked as ended")

    # ---- the server ----

    async def _number(self, sql: str, values: Any = ()) -> int:
        """Return the number that a query returns; 0 for NULL or no row."""
        rows = await self._rows(sql, values)
        return int(rows[0][0] or 0) if rows else 0

    async def _rows(self, sql: str, values: Any = ()) -> list[Any]:
        connection = self._connection
        try:
            if connection.info.transaction_status == TransactionStatus.IDLE:
                # The lock comes first, because the next statement takes the snapshot.
                await connection.execute("LOCK TABLE frame IN ACCESS SHARE MODE")
                await connection.execute("SAVEPOINT moment")
            cursor = await connection.execute(sql.encode(), values, binary=True)
            return await cursor.fetchall()
        except psycopg.Error as error:
            if connection.info.transaction_status == TransactionStatus.INERROR:
                # After an error PostgreSQL refuses every statement until this rollback. The reader
                # can go on after it, because other data may be undamaged.
                await connection.execute("ROLLBACK TO moment")
            raise _explained(error, self._url) from error


@asynccontextmanager
async def reading_database(url: str) -> AsyncIterator[PostgresReader]:
    """Open a snapshot of the ledger in a database.

    Raises:
        ConfigError: There is no ledger.
    """
    address = PostgresUrl(url)
    connection = await address.connect("tailrace ledger")
    try:
        await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        await connection.set_read_only(True)
        await _check_version(connection, address)
        yield PostgresReader(address, connection)
    finally:
        await connection.close()


async def _check_version(connection: psycopg.AsyncConnection, address: PostgresUrl) -> None:
    try:
        found = await version_in(connection, "tailrace")
        await connection.rollback()
    except psycopg.Error as error:
        raise _explained(error, address) from error
    if found is None:
        raise ConfigError(
            f"there is no ledger in {address}",
            field="ledger.url",
            hint="start an origin with this URL as ledger.url: it creates the ledger",
        )
    if found != SCHEMA_VERSION:
        raise ConfigError(
            f"the ledger in {address} has another version than {SCHEMA_VERSION}",
            field="ledger.url",
            hint="another version of Tailrace created it; inspect it with that version",
        )


def _explained(error: psycopg.Error, address: PostgresUrl) -> TailraceError:
    """Convert an error of PostgreSQL into one of Tailrace."""
    message = address.first_line(error)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return ConfigError(
            message,
            field="ledger.url",
            hint="the role needs USAGE on the schema tailrace and SELECT on its tables",
        )
    if isinstance(error, psycopg.errors.DataCorrupted | psycopg.errors.IndexCorrupted):
        return Damaged(message, hint="check the disk, and restore the database from a backup")
    return LedgerFailed(f"PostgreSQL: {message}", hint="see the log of the PostgreSQL server")


def _stream_row(row: Any) -> StreamRow:
    found = StreamRow(*row)
    key = found.idempotency_key
    return found._replace(
        recipe=_text(found.recipe), idempotency_key=None if key is None else _text(key)
    )


def _text(stored: Any) -> str:
    return bytes(stored).decode(errors="replace")


def _damaged(row: StreamRow, what: str) -> Damaged:
    return Damaged(f"stream {row.id.hex()}: {what}", hint="restore the database from a backup")
