"""Wakes the watchers of a stream when another origin appends to it, or its readers there change.

A notification (LISTEN/NOTIFY) only names streams. One query reads the changes of all streams that
were named since the last query. Notifications may be lost with the connection, so all watched
streams are read after a reconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial

import psycopg
from psycopg import AsyncConnection

from tailrace.ledger.errors import ConfigError, LedgerAway, LedgerFailed, TailraceError
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.postgres.presence import PostgresPresence
from tailrace.ledger.postgres.rows import Ints
from tailrace.ledger.postgres.server import RETRY_MAX_S, RETRY_MIN_S, Pool, Server
from tailrace.ledger.postgres.statements import CHANNEL, NEWS, PRESENCE_CHANNEL
from tailrace.ledger.postgres.tail import TAIL_FRAMES, PostgresTail, Residents, StreamHead
from tailrace.ledger.process.tasks import cancel


class Listener:
    """Keeps the tails of watched streams up to date until `close`."""

    def __init__(
        self,
        server: Server,
        pool: Pool,
        residents: Residents,
        presence: PostgresPresence,
        lease: int,
        failed: Callable[[TailraceError], None],
    ) -> None:
        """Start listening. `failed` is called if notifications can no longer be received."""
        self._server = server
        self._pool = pool
        self._residents = residents
        self._presence = presence
        self._own = str(lease)
        self._failed = failed
        self._stale: set[int] = set()
        self._work = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._guard(self._listen()), name="ledger-listener"),
            asyncio.create_task(self._guard(self._refresh()), name="ledger-refresh"),
        ]

    def look_at(self, sids: Iterable[int]) -> None:
        """Request that the changes of these streams be read from the tables soon."""
        self._stale.update(sids)
        self._work.set()

    async def close(self) -> None:
        await cancel(self._tasks)

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        """Run a task and report its failure, because readers would otherwise wait for ever."""
        try:
            await work
        except (ConfigError, LedgerFailed) as error:
            self._failed(error)
        except Exception as error:
            self._failed(LedgerFailed(f"cannot follow other origins: {error!r}"))
            raise

    # ---- notices ----

    async def _listen(self) -> None:
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S)
        while True:
            try:
                connection = await self._server.connect()
                backoff.reset()
                try:
                    await self._listen_on(connection)
                finally:
                    await connection.close()
            except psycopg.Error:
                await asyncio.sleep(backoff.next_delay_s())

    async def _listen_on(self, connection: AsyncConnection) -> None:
        for channel in (CHANNEL, PRESENCE_CHANNEL):
            await connection.execute(f"LISTEN {channel}".encode())
        self._look_at_all()
        self._presence.notice("*")
        async for heard in connection.notifies():
            sender, _, sids = heard.payload.partition(" ")
            if sender == self._own:
                continue
            if heard.channel == PRESENCE_CHANNEL:
                self._presence.notice(sids)
            elif sids == "*":
                self._look_at_all()
            else:
                self.look_at(map(int, sids.split()))

    def _look_at_all(self) -> None:
        self.look_at(tail.head.sid for tail in self._residents.watched())

    # ---- changes ----

    async def _refresh(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            stale, self._stale = self._stale, set()
            known = (self._residents.by_sid(sid) for sid in stale)
            watched = [tail for tail in known if tail is not None and tail.watchers]
            if not watched:
                continue
            try:
                await self._pool.run(partial(self._read, watched))
            except LedgerAway:
                self.look_at(stale)  # retry without a pause: the pool has waited for the server

    async def _read(self, tails: list[PostgresTail], connection: AsyncConnection) -> None:
        before = [tail.head.copy() for tail in tails]
        starts = Ints(head.next_index for head in before)
        known = Ints(tail.head.sid for tail in tails)
        cursor = await connection.execute(
            NEWS, (known, starts, TAIL_FRAMES), prepare=True, binary=True
        )
        heads: dict[int, StreamHead] = {}
        frames: dict[int, list[bytes]] = {}
        for sid, epoch, next_index, ended, index, frame in await cursor.fetchall():
            heads[sid] = StreamHead(sid, epoch, next_index, ended)
            if index is not None:
                frames.setdefault(sid, []).append(bytes(frame))
        for tail, seen in zip(tails, before, strict=True):
            head = heads.get(seen.sid)
            if head is None:
                self._residents.lose(tail)
            else:
                head.check_not_before(seen)
                tail.advance(head, seen.next_index, frames.get(seen.sid, []))
