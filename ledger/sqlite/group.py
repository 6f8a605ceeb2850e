"""Group commit: all that arrives in one turn of the event loop, or during a commit, is one.

A commit of class `process` is a few microseconds of SQLite on the event loop itself: a
hop to a thread and back would cost seven times as much. One of class `power` waits for the
disk in a thread, and the next group forms meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ledger.errors import LedgerFailed
from ledger.sqlite.storage import Commit, Storage
from ledger.sqlite.tail import Tail

MAX_FORMING_BYTES = 4 * 1024 * 1024
"""Bytes of frames and values that may wait for the next commit; who comes then, waits."""


@dataclass(slots=True)
class Group:
    """What the next commit stores, who waits for it, and which tails it moves on."""

    commit: Commit = field(default_factory=Commit)
    tails: list[Tail] = field(default_factory=list)  # one for each frame
    indexes: list[int] = field(default_factory=list)
    bytes: int = 0
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    taken_over: list[Tail] = field(default_factory=list)
    segmented: list[tuple[Tail, int]] = field(default_factory=list)  # stored until

    def add(self, tail: Tail, index: int, size: int) -> None:
        self.tails.append(tail)
        self.indexes.append(index)
        self.bytes += size


class GroupCommit:
    """The one writer. `prepare` completes a group's commit, `release` is told of its success."""

    def __init__(
        self,
        storage: Storage,
        prepare: Callable[[Group], None],
        release: Callable[[Group], None],
    ) -> None:
        self._storage = storage
        self._prepare = prepare
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._in_flight: asyncio.Task[None] | None = None
        self._failure: LedgerFailed | None = None
        self._room_waiters: list[asyncio.Future[None]] = []
        self.forming = Group()

    # ---- for who writes ----

    def check(self) -> None:
        """Raise the failure that stopped the writer, if any."""
        if self._failure is not None:
            raise self._failure

    @property
    def has_room(self) -> bool:
        return self.forming.bytes < MAX_FORMING_BYTES

    @property
    def ready(self) -> bool:
        """Whether the forming group may grow now."""
        return self._failure is None and self.forming.bytes < MAX_FORMING_BYTES

    async def room(self) -> None:
        """Wait until the forming group may grow; raises the failure of a broken ledger."""
        while not self.has_room and self._failure is None:
            await self._wait_in(self._room_waiters)
        self.check()

    def schedule(self) -> None:
        """Commit what has formed at the end of this turn of the event loop."""
        if not self._scheduled and self._in_flight is None:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    @property
    def settled(self) -> bool:
        """Whether all that was ever given to it is stored."""
        forming = self.forming
        nothing_forms = forming.commit.empty and not forming.tails
        return nothing_forms and self._in_flight is None

    async def commit(self) -> None:
        """Schedule, and wait until what is forming now is as durable as it asks."""
        self.check()
        self.schedule()
        await self._wait_in(self.forming.waiters)

    async def _wait_in(self, waiters: list[asyncio.Future[None]]) -> None:
        # A future each, so that a producer that is cancelled takes nobody with it.
        waiter = self._loop.create_future()
        waiters.append(waiter)
        await waiter

    # ---- the writer ----

    def _turn(self) -> None:
        self._scheduled = False
        if self._failure is not None:
            self._fail(self._failure, Group())
            return
        # One swap with no await in it: an append is in the old group or in the new one.
        group, self.forming = self.forming, Group()
        _resolve(self._room_waiters)
        self._room_waiters = []
        try:
            self._prepare(group)
            if group.commit.power:
                self._in_flight = self._loop.create_task(self._durably(group))
                return
            if not group.commit.empty:
                self._storage.commit(group.commit)
        except LedgerFailed as error:
            self._fail(error, group)
            return
        except Exception as error:
            # Whatever it is, nobody may wait for ever.
            self._fail(LedgerFailed(f"the commit could not be made: {error!r}"), group)
            raise
        self._done(group)

    async def _durably(self, group: Group) -> None:
        try:
            await self._storage.commit_durably(group.commit)
        except LedgerFailed as error:
            self._in_flight = None
            self._fail(error, group)
            return
        self._in_flight = None
        self._done(group)
        if self.forming.waiters or not self.settled:
            self.schedule()

    def _done(self, group: Group) -> None:
        self._release(group)
        _resolve(group.waiters)

    def _fail(self, error: LedgerFailed, group: Group) -> None:
        self._failure = error
        waiting = [*group.waiters, *self.forming.waiters, *self._room_waiters]
        self.forming, self._room_waiters = Group(), []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_exception(error)


def _resolve(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
