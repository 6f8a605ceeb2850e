"""The lease of an origin in a shared ledger, by the server's clock.

An origin that renews its lease in time keeps its streams and objects. When a lease has expired,
other origins may take over the streams and objects of its origin. A lease only says which origin
should act; epochs protect the stored data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from psycopg import AsyncConnection

from tailrace.ledger.errors import ConfigError, Damaged, LedgerAway, LedgerFailed, TailraceError
from tailrace.ledger.postgres.commit import replaced
from tailrace.ledger.postgres.schema import check_fsync
from tailrace.ledger.postgres.server import LastingConnection
from tailrace.ledger.postgres.statements import (
    END_OWNER,
    FORGET_OWNERS,
    FORGET_READERS,
    NEW_OWNER,
    OWN_HOST,
    RENEW,
)
from tailrace.ledger.process.tasks import cancel

RENEWALS_PER_LEASE = 3
"""Number of renewals per lease time. The lease stays valid if one of them succeeds."""

Reached = tuple[str | None, int]
"""Host and port at which other origins reach an origin; the host is None if it listens on all
addresses."""


class Lease:
    """A lease: a row in the table `owner`, which a task renews until `close` or `stop`."""

    def __init__(
        self, connection: LastingConnection, name: str, lease_s: float, reached: Reached | None
    ) -> None:
        self._connection = connection
        self._name = name.encode()
        self._lease_s = lease_s
        self._reached = reached
        self._lasts = timedelta(seconds=lease_s)
        self._renewed: datetime | None = None
        # The latest outage of the server: the time of the last renewal before the outage, and that
        # of the first renewal after it.
        self._outage: tuple[datetime, datetime] | None = None
        self._task: asyncio.Task[None] | None = None
        self.number = 0

    async def begin(self) -> None:
        """Become the owner with this name, and fence an earlier process that had the same name."""

        async def work(connection: AsyncConnection) -> int:
            link = await self._own_address(connection)
            async with connection.transaction():
                await connection.execute(END_OWNER, (self._name,))
                made = await connection.execute(NEW_OWNER, (self._name, self._lease_s, link))
                row = await made.fetchone()
            await connection.execute(FORGET_OWNERS)
            await connection.execute(FORGET_READERS)
            assert row is not None  # RETURNING returns the inserted row
            return int(row[0])

        self.number = await self._connection.run(work)

    async def _own_address(self, connection: AsyncConnection) -> bytes | None:
        """Return HOST:PORT at which other origins reach this one, or None.

        Without a configured host, the host is the address from which the database sees this origin.
        """
        if self._reached is None:
            return None
        host, port = self._reached
        if host is None:
            [host] = await (await connection.execute(OWN_HOST)).fetchone() or ["127.0.0.1"]
        return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()

    def keep(self, tick: Callable[[], None], lost: Callable[[TailraceError], None]) -> None:
        """Renew the lease regularly in a task, and call `tick` after each renewal or outage.

        If the lease cannot be kept, such as when another process has taken the owner's name, call
        `lost` with the error.
        """
        self._task = asyncio.create_task(self._keep(tick, lost), name="ledger-lease")

    async def _keep(self, tick: Callable[[], None], lost: Callable[[TailraceError], None]) -> None:
        while True:
            try:
                await self.renew()
            except LedgerAway:
                pass  # the loop renews the lease once the server is back, even if it has expired
            except (LedgerFailed, ConfigError) as error:
                lost(error)
                return
            except Damaged as error:
                lost(LedgerFailed(error.message, hint=error.hint))
                return
            tick()
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)

    async def renew(self) -> datetime:
        """Renew the lease and return the server's time."""

        async def work(connection: AsyncConnection) -> datetime:
            done = await connection.execute(RENEW, (self.number, self._lease_s))
            row = await done.fetchone()
            if row is None:
                raise replaced()
            now, fsync, standbys = row
            check_fsync(fsync)
            self._connection.server.synchronous = standbys != ""
            assert isinstance(now, datetime)
            return now

        now = await self._connection.run(work)
        if self._renewed is not None and now - self._renewed > self._lasts:
            self._outage = (self._renewed, now)
        self._renewed = now
        return now

    async def judged_at(self) -> datetime:
        """Return the server's time with which the expiries of other leases are to be compared.

        This is usually now. But during an outage of the server all leases expire, although their
        owners live. So for one lease time after an outage, the result is a time before the outage.
        """
        now = await self.renew()
        if self._outage is not None:
            before, after = self._outage
            if now - after < self._lasts:
                return before
            self._outage = None
        return now

    async def stop(self) -> None:
        """Stop renewing, so that the lease expires."""
        if self._task is not None:
            await cancel([self._task])

    async def close(self) -> None:
        """End the lease, so that other origins need not wait until it expires."""
        await self.stop()

        async def work(connection: AsyncConnection) -> None:
            await connection.execute("DELETE FROM owner WHERE lease = $1", (self.number,))

        try:
            await self._connection.run(work, timeout_s=0.0)
        except TailraceError:
            return  # the row stays, and the lease expires as after a crash
