"""The objects of a ledger on PostgreSQL: `ledger.interface.ObjectStore`.

Writes ride in the ledger's group commits. Epochs of objects come from one sequence, so that
one which was forgotten and made again never gets an epoch that somebody has had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ledger.errors import CallerError, HeldElsewhere
from ledger.interface import (
    ALL_VALUES,
    Alarm,
    ObjectKey,
    ObjectState,
    ObjectWrite,
    StreamKind,
    ValueRange,
)
from ledger.postgres import statements as sql
from ledger.postgres.commit import Writer
from ledger.postgres.plan import Item
from ledger.postgres.rows import Blobs
from ledger.postgres.server import Pool


class PostgresObjects:
    """Values by key, one alarm each, fenced by epoch. `lease` is this process's."""

    def __init__(self, pool: Pool, writer: Writer, lease: int, now_ms: Callable[[], int]) -> None:
        self._pool = pool
        self._writer = writer
        self._lease = lease
        self._now_ms = now_ms

    # ---- owners ----

    async def claim(self, key: ObjectKey) -> ObjectState:
        self._writer.check()
        while not (
            rows := await self._pool.rows(sql.CLAIM, *_address(key), self._lease, self._now_ms())
        ):
            for name, link in await self._pool.rows(sql.HOLDER, *_address(key)):
                held = HeldElsewhere(
                    f"{key.kind} {key.name!r} is held by origin {bytes(name).decode()}",
                    hint="ask that origin, or again when its lease has lapsed",
                )
                held.address = None if link is None else bytes(link).decode()
                raise held
        [(epoch, alarm_ms, retries)] = rows
        return ObjectState(epoch, None if alarm_ms is None else Alarm(alarm_ms, retries))

    async def seize(self, key: ObjectKey) -> None:
        self._writer.check()
        await self._pool.rows(sql.SEIZE, *_address(key), self._lease)

    async def owns(self, key: ObjectKey, epoch: int) -> bool:
        return await self._pool.rows(sql.OBJECT_EPOCH, *_address(key), self._lease) == [(epoch,)]

    # ---- reading ----

    async def get(self, key: ObjectKey, names: Sequence[str]) -> dict[str, bytes]:
        wanted = Blobs(name.encode() for name in names)
        return _values(await self._pool.rows(sql.GET_VALUES, *_address(key), wanted))

    async def list(self, key: ObjectKey, wanted: ValueRange = ALL_VALUES) -> dict[str, bytes]:
        first, beyond = wanted.first.encode(), wanted.beyond
        last = None if beyond is None else beyond.encode()
        statement = sql.LIST_VALUES.format(order="DESC" if wanted.reverse else "ASC")
        return _values(await self._pool.rows(statement, *_address(key), first, last, wanted.limit))

    async def due(self, now_ms: int, limit: int) -> Sequence[tuple[ObjectKey, Alarm]]:
        rows = await self._pool.rows(sql.DUE, now_ms, self._lease, limit)
        return [
            (ObjectKey(bytes(kind).decode(), bytes(name).decode()), Alarm(alarm_ms, retries))
            for kind, name, alarm_ms, retries in rows
        ]

    async def names(self, kind: str, *, after: str = "", limit: int = 1000) -> Sequence[str]:
        rows = await self._pool.rows(sql.OBJECT_NAMES, kind.encode(), after.encode(), limit)
        return [bytes(name).decode() for (name,) in rows]

    # ---- writing ----

    async def write(self, write: ObjectWrite) -> None:
        if any(new.kind is not StreamKind.OBJECT for new in write.creates):
            raise CallerError("an object's stream is of StreamKind.OBJECT", field="creates")
        await self._writer.room()
        item = Item(write)
        self._writer.forming.add(item, _size(write))
        await self._writer.commit()
        if item.error is not None:
            raise item.error


def _address(key: ObjectKey) -> tuple[bytes, bytes]:
    return key.kind.encode(), key.name.encode()


def _values(rows: Sequence[tuple[Any, ...]]) -> dict[str, bytes]:
    return {bytes(name).decode(): bytes(value) for name, value in rows}


def _size(write: ObjectWrite) -> int:
    frames = sum(len(append.record.frame) for append in write.appends)
    return frames + sum(map(len, write.puts.values()))
