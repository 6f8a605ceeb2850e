"""Group commit: while one group is being written, the next one forms.

The appends of all streams that arrive during a commit share the next one, so the cost of
a commit (a thread hop, a WAL frame, perhaps an fsync) is paid once for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ledger.errors import LedgerFailed
from ledger.interface import Record
from ledger.tail import Tail

MAX_FORMING_BYTES = 4 * 1024 * 1024
"""Frame bytes that may wait for the next commit; producers beyond that wait."""


@dataclass(slots=True)
class Group:
    """The appends of one commit, each with the tail that reserved its index."""

    done: asyncio.Future[None]
    entries: list[tuple[Tail, int, Record]] = field(default_factory=list)
    bytes: int = 0
    power: bool = False

    def add(self, tail: Tail, index: int, record: Record) -> None:
        self.entries.append((tail, index, record))
        self.bytes += len(record.frame)


class GroupCommit:
    """One writer. `write` stores and releases a whole group; an error from it is final."""

    def __init__(self, write: Callable[[Group], Awaitable[None]]) -> None:
        self._write = write
        self._forming = self._new_group()
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._failure: LedgerFailed | None = None
        self._closing = False
        self._task = asyncio.create_task(self._run(), name="ledger-writer")

    async def room(self) -> None:
        """Wait until the forming group may grow; raises the failure of a broken ledger."""
        await self._room.wait()
        self.check()

    def check(self) -> None:
        """Raise the failure that stopped the writer, if any."""
        if self._failure is not None:
            raise self._failure

    @property
    def forming(self) -> Group:
        """The group that the next commit takes. Add to it without awaiting in between."""
        return self._forming

    async def commit(self, group: Group) -> None:
        """Wait until the group is durable and released."""
        if group.bytes >= MAX_FORMING_BYTES:
            self._room.clear()
        self._work.set()
        # Shielded: a producer that is cancelled must not cancel its neighbours' commit.
        await asyncio.shield(group.done)

    async def close(self) -> None:
        """Write what has formed, then stop."""
        self._closing = True
        self._work.set()
        await self._task

    def _new_group(self) -> Group:
        return Group(asyncio.get_running_loop().create_future())

    async def _run(self) -> None:
        while self._failure is None and not (self._closing and not self._forming.entries):
            await self._work.wait()
            self._work.clear()
            # One swap with no await in it: an append is in the old group or in the new one.
            group, self._forming = self._forming, self._new_group()
            self._room.set()
            if not group.entries:
                continue
            try:
                await self._write(group)
            except LedgerFailed as error:
                self._fail(error, group)
            else:
                group.done.set_result(None)

    def _fail(self, error: LedgerFailed, group: Group) -> None:
        self._failure = error
        for broken in (group, self._forming):
            broken.done.set_exception(error)
            broken.done.exception()  # seen here; those who wait on it see it too
        self._room.set()
