"""Group commit: one commit stores all writes that have come since the previous one began.

A commit with durability `process` runs on the event loop itself, where SQLite takes a few
microseconds; running it in a thread would take seven times as long. A commit with durability
`power` also waits for the disk. During that wait the next group forms, and clean-up runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.sqlite.storage import Commit, Storage
from tailrace.ledger.sqlite.tail import Tail

MAX_FORMING_BYTES = 4 * 1024 * 1024
"""Maximum bytes of frames and values that wait for the next commit; further writers wait."""


@dataclass(slots=True)
class Group:
    """The content of one commit, its waiters, and the tails to which it appends.

    Appends are stored in columns: append n is entry n of `tails`, `indexes`, `frames`, `ids` and
    `extras`.
    """

    commit: Commit = field(default_factory=Commit)
    tails: list[Tail] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    extras: list[bytes] = field(default_factory=list)
    size: int = 0  # total bytes of frames and values
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    taken_over: list[Tail] = field(default_factory=list)
    reached: dict[Tail, int] = field(default_factory=dict)  # each tail's last index in this group
    # Tails whose records before the given index become segments with this commit.
    segmented: list[tuple[Tail, int]] = field(default_factory=list)

    def add(
        self,
        tails: Iterable[Tail],
        indexes: Iterable[int],
        frames: Iterable[bytes],
        ids: Iterable[tuple[int, ...]],
        extras: Iterable[bytes],
    ) -> None:
        """Add appends; each argument has one entry for each append."""
        self.tails += tails
        self.indexes += indexes
        self.frames += frames
        self.ids += ids
        self.extras += extras


class GroupCommit:
    """The only writer of a ledger.

    `prepare` adds to a group's commit the rows that must be stored before the group is released.
    `tidy` adds clean-up to a commit, which may also be stored later. `release` is called after a
    successful commit and returns True if there is more to clean up.
    """

    def __init__(
        self,
        storage: Storage,
        prepare: Callable[[Group], None],
        tidy: Callable[[Group, Commit], None],
        release: Callable[[Group], bool],
    ) -> None:
        self._storage = storage
        self._prepare = prepare
        self._tidy = tidy
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._in_flight: asyncio.Future[None] | None = None
        self._begun_at = 0.0  # time at which the commit in flight began (event loop's clock)
        self._failure: LedgerFailed | None = None
        self._room_waiters: list[asyncio.Future[None]] = []
        self._quiet = False
        self.forming = Group()

    # ---- for writers ----

    def check(self) -> None:
        """Raise the failure that stopped the writer, if any."""
        if self._failure is not None:
            raise self._failure

    @property
    def ready(self) -> bool:
        """True if the forming group has room."""
        return self._failure is None and self.forming.size < MAX_FORMING_BYTES

    async def room(self) -> None:
        """Wait until the forming group has room; raise the failure that stopped the writer."""
        while self.forming.size >= MAX_FORMING_BYTES and self._failure is None:
            await self._wait_in(self._room_waiters)
        self.check()

    def schedule(self) -> None:
        """Commit the forming group at the end of this iteration of the event loop."""
        if not self._scheduled and self._in_flight is None:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    @property
    def settled(self) -> bool:
        """True if no write is waiting or in flight."""
        forming = self.forming
        nothing_forms = forming.commit.empty and not forming.tails
        return nothing_forms and self._in_flight is None

    def is_quiet(self) -> bool:
        """Return True if nothing was appended since the last call."""
        quiet, self._quiet = self._quiet, True
        return quiet

    def silent_s(self) -> float:
        """Return the seconds for which the commit in flight has waited for the disk."""
        return 0.0 if self._in_flight is None else self._loop.time() - self._begun_at

    def commit(self) -> asyncio.Future[None]:
        """Schedule a commit; the future is done when the forming group is durable."""
        self.check()
        self.schedule()
        return self._wait_in(self.forming.waiters)

    def _wait_in(self, waiters: list[asyncio.Future[None]]) -> asyncio.Future[None]:
        # One future per waiter, so that cancelling one does not affect the others.
        waiter = self._loop.create_future()
        waiters.append(waiter)
        return waiter

    # ---- the writer ----

    def _turn(self) -> None:
        self._scheduled = False
        if self._failure is not None:
            self._fail(self._failure, Group())
            return
        # No await between these two assignments, so no append is added between them and lost.
        group, self.forming = self.forming, Group()
        _resolve(self._room_waiters)
        self._room_waiters = []
        if group.tails:
            self._quiet = False
        try:
            self._prepare(group)
            if group.commit.power or self._storage.waits:
                self._begin(group)
                return
            self._tidy(group, group.commit)
            if not group.commit.empty:
                self._storage.commit(group.commit)
        except LedgerFailed as error:
            self._fail(error, group)
            return
        except Exception as error:
            # Even after an unexpected error, the waiters must not wait for ever.
            self._fail(LedgerFailed(f"the commit could not be made: {error!r}"), group)
            raise
        self._done(group)

    def _begin(self, group: Group) -> None:
        durable = self._storage.commit_durably(group.commit, partial(self._behind, group))
        self._begun_at = self._loop.time()
        self._in_flight = asyncio.ensure_future(durable)
        self._in_flight.add_done_callback(partial(self._end, group))

    def _behind(self, group: Group) -> Commit:
        commit = Commit()
        self._tidy(group, commit)
        return commit

    def _end(self, group: Group, durable: asyncio.Future[None]) -> None:
        self._in_flight = None
        if durable.cancelled():
            self._fail(LedgerFailed("the commit was cancelled"), group)
            return
        error = durable.exception()
        if error is None:
            self._done(group)
            if self.forming.waiters or not self.settled:
                self.schedule()
        elif isinstance(error, LedgerFailed):
            self._fail(error, group)
        else:
            self._fail(LedgerFailed(f"the commit could not be made: {error!r}"), group)
            raise error

    def _done(self, group: Group) -> None:
        more = self._release(group)
        _resolve(group.waiters)
        if more:
            # The waiters run before the commit that is scheduled here. So this commit includes the
            # appends that they make next.
            self.schedule()

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
