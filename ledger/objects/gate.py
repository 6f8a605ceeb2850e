"""The two gates of an object: what may come in, and what may be seen outside.

The input gate is held by one event at a time; the output gate opens when the changes made
so far are durable. Both follow the Durable Objects of Cloudflare; `ledger/objects/runtime.py`
has the rules.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from ledger.errors import CallerError, StreamFull, TailraceError, Unavailable
from ledger.objects.changes import Changes


class InputGate:
    """Held by one event at a time, handed on in the order of coming."""

    # A turn whose event was cancelled stays in the queue until it is passed over.

    def __init__(self) -> None:
        self._held = False
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many events are at the gate."""
        return sum(not turn.done() for turn in self._queue)

    async def enter(self) -> None:
        """Wait for one's turn; who is cancelled has no turn."""
        if not self._held:
            self._held = True
            return
        turn = self._join()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came in the same step as the cancellation
                self.leave()
            raise

    async def enter_again(self) -> None:
        """Wait for one's turn whatever happens: a cancellation is raised once inside.

        For an event that is under way: what unwinds in it must not run beside another.
        """
        if not self._held:
            self._held = True
            return
        turn, cancelled = self._join(), None
        while not turn.done():
            try:
                await asyncio.wait((turn,))
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def leave(self) -> None:
        """Hand the gate to the next in the queue; nobody overtakes it in between."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._held = False

    def _join(self) -> asyncio.Future[None]:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        return turn


class OutputGate:
    """Stores an object's changes in order and lets nothing pass before they are durable.

    One write is under way at a time and the next one forms meanwhile. So changes are stored
    in order on every store, and a burst of events costs two commits, not one each. After a
    write that failed the gate stays shut: everything that waits or comes gets `failure`.
    """

    def __init__(
        self,
        store: Callable[[Changes], Awaitable[None]],
        stored: Callable[[Changes], None],
        failed: Callable[[TailraceError], None],
    ) -> None:
        self._store = store
        self._stored = stored
        self._failed = failed
        self._writer: asyncio.Task[None] | None = None
        self.forming = Changes()
        self.in_flight: Changes | None = None
        self.failure: TailraceError | None = None

    @property
    def pending(self) -> list[Changes]:
        """What is not durable yet, oldest first."""
        return [self.forming] if self.in_flight is None else [self.in_flight, self.forming]

    def check(self) -> None:
        """Raise what shut the gate, if anything did."""
        if self.failure is not None:
            raise self.failure

    def schedule(self) -> None:
        """Store what is forming as soon as the event that runs now awaits something."""
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())
            self._writer.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Until all changes made by now are durable."""
        self.check()
        last = self.in_flight if self.forming.empty else self.forming
        if last is None:
            return
        # A future each, so that an event that is cancelled takes nobody with it.
        waiter = asyncio.get_running_loop().create_future()
        last.waiters.append(waiter)
        await waiter

    def shut(self, failure: TailraceError) -> None:
        """Let nothing pass any more; of what is under way nobody learns how it ends."""
        if self.failure is not None:
            return
        self.failure = failure
        waiters = [waiter for changes in self.pending for waiter in changes.waiters]
        self.forming, self.in_flight = Changes(), None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(failure)
        self._failed(failure)

    async def _write(self) -> None:
        while not self.forming.empty:
            changes, self.forming = self.forming, Changes()
            self.in_flight = changes
            await self._store(changes)
            if self.in_flight is not changes:
                return  # shut meanwhile
            self.in_flight = None
            self._stored(changes)
            for waiter in changes.waiters:
                if not waiter.done():
                    waiter.set_result(None)
        self._writer = None

    def _ended(self, writer: asyncio.Task[None]) -> None:
        if writer.cancelled():
            self.shut(lost("a write was cancelled"))
        elif (error := writer.exception()) is not None:
            self.shut(failure_of(error))


def lost(why: str) -> Unavailable:
    """What the events of an instance get that has to be made anew from storage."""
    return Unavailable(
        f"the object was reset: {why}",
        code="object_reset",
        hint="send the request again; it may have been carried out",
    )


def failure_of(error: BaseException) -> TailraceError:
    """What an object's events get for an error of its storage.

    A `CallerError` there (the object has another owner, a stream has another end) says that
    this instance is out of date, not that its caller is at fault. Only where a stream is full
    would the same request fail again.
    """
    if isinstance(error, TailraceError) and not isinstance(error, CallerError):
        return error
    if isinstance(error, StreamFull):
        return error
    failure = lost(str(error) or type(error).__name__)
    failure.__cause__ = error
    return failure
