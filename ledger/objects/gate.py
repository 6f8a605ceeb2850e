"""The input gate and the output gate of an object.

An event is a request or an alarm. One event at a time holds the input gate. The output gate lets
results out when all changes made so far are durable. Both follow Cloudflare's Durable Objects;
`ledger/objects/runtime.py` has the rules.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto

from tailrace.ledger.errors import CallerError, Conflict, StreamFull, TailraceError, Unavailable
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Alarm, Append, NewStream, ObjectKey, ObjectWrite

MAX_CALL_DEPTH = 16
"""Maximum number of objects in a chain of calls, the first one included."""


class Stage(Enum):
    """Progress of an event. Its task may be cancelled while it does not hold the input gate."""

    QUEUED = auto()
    """Waiting at the input gate for the first time."""
    INSIDE = auto()
    """Holding the input gate."""
    OUTSIDE = auto()
    """In a call of `context.outside`, without the gate: the event first waits until its changes are
    stored, then awaits something."""
    RETURNING = auto()
    """Waiting at the input gate again, after `outside`."""
    LEAVING = auto()
    """The event's code has ended, and the event waits until its changes are stored."""
    ENDED = auto()
    """The caller was given the event's result or error."""


class Event:
    """An event, the task that runs it, and the event that caused it (`parent`)."""

    def __init__(self, key: ObjectKey) -> None:
        self.key = key
        self.parent = current()
        self.depth: int = 1 if self.parent is None else self.parent.depth + 1
        self.stage = Stage.QUEUED
        self.blocks = 0  # number of nested calls of block_concurrency_while
        self.abandoned = False  # True if the caller has disconnected
        self.resets = False  # True if the event's exception discards the instance
        self.task: asyncio.Task[object] | None = None
        self._check_callers()

    def _check_callers(self) -> None:
        if self.depth > MAX_CALL_DEPTH:
            raise Conflict(
                f"{MAX_CALL_DEPTH} objects call one another in a chain",
                code="call_depth",
                hint="an object seems to call itself, directly or through others",
            )
        caller = self.parent
        while caller is not None:
            if caller.blocks and caller.key == self.key:
                raise Conflict(
                    f"{self.key.kind} {self.key.name!r} waits for itself",
                    code="call_deadlock",
                    hint="inside block_concurrency_while, call no object that calls this one",
                )
            caller = caller.parent

    @property
    def is_current(self) -> bool:
        """True if the calling code runs in this event's own task, not in a task that it created."""
        return asyncio.current_task() is self.task

    def abandon(self) -> None:
        """Stop the event as soon as it does not hold the gate: its caller has disconnected."""
        self.abandoned = True
        if self.stage in (Stage.QUEUED, Stage.OUTSIDE):
            self.interrupt()

    def interrupt(self) -> None:
        """Cancel the event's task."""
        if self.task is not None:
            self.task.cancel()


_EVENT: ContextVar[Event | None] = ContextVar("event", default=None)


def enter(event: Event) -> None:
    """Make `event` the current event of this task and of the tasks that it starts."""
    _EVENT.set(event)


def current() -> Event | None:
    """Return the event of the running code; None outside of events."""
    event = _EVENT.get()
    return None if event is None or event.stage is Stage.ENDED else event


@dataclass(slots=True, eq=False)
class Changes:
    """Changes that are stored atomically. None in `values` marks a deleted value.

    `clear` deletes all stored values, before `values` are stored.
    """

    clear: bool = False
    values: dict[str, bytes | None] = field(default_factory=dict)
    alarm: Alarm | None = None
    sets_alarm: bool = False
    creates: list[NewStream] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    drops: list[bytes] = field(default_factory=list)
    size: int = 0
    """Total bytes of names, values and frames in these changes."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        streams = self.appends or self.creates or self.drops
        return not (self.values or self.clear or self.sets_alarm or streams)

    def put(self, name: str, value: bytes | None) -> None:
        if name in self.values:
            self.size -= len(name) + len(self.values[name] or b"")
        self.values[name] = value
        self.size += len(name) + len(value or b"")

    def clear_values(self) -> None:
        self.size -= sum(len(name) + len(value or b"") for name, value in self.values.items())
        self.values.clear()
        self.clear = True

    def set_alarm(self, alarm: Alarm | None) -> None:
        self.alarm, self.sets_alarm = alarm, True

    def append(self, append: Append) -> None:
        self.appends.append(append)
        self.size += len(append.record.frame)

    def add(self, later: Changes) -> None:
        """Append the changes of a later transaction."""
        if later.clear:
            self.clear_values()
        for name, value in later.values.items():
            self.put(name, value)
        if later.sets_alarm:
            self.set_alarm(later.alarm)
        self.creates += later.creates
        for append in later.appends:
            self.append(append)
        self.drops += later.drops

    def write(self, key: ObjectKey, epoch: int, durability: Durability) -> ObjectWrite:
        """Return the changes as a write for the ledger.

        The write is as durable as the most durable stream that it creates, or as `durability` if
        that is higher.
        """
        return ObjectWrite(
            key=key,
            epoch=epoch,
            puts={name: value for name, value in self.values.items() if value is not None},
            deletes=[name for name, value in self.values.items() if value is None],
            clear=self.clear,
            alarm=self.alarm,
            sets_alarm=self.sets_alarm,
            creates=self.creates,
            appends=self.appends,
            drops=self.drops,
            durability=max((durability, *(new.durability for new in self.creates))),
        )


class InputGate:
    """A fair lock: events enter in order of arrival."""

    # The entry of a cancelled event stays in the queue until it is skipped.

    def __init__(self) -> None:
        self._held = False
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Number of events waiting at the gate."""
        return sum(not turn.done() for turn in self._queue)

    async def enter(self) -> None:
        """Wait for the gate. A cancelled event does not get it."""
        if not self._held:
            self._held = True
            return
        turn = self._join()
        try:
            await turn
        except asyncio.CancelledError:
            # If `turn` is not cancelled, the event has got the gate in the same iteration of the
            # event loop in which it was cancelled.
            if not turn.cancelled():
                self.leave()
            raise

    async def enter_again(self) -> None:
        """Wait for the gate even if cancelled; raise the cancellation once the event is inside.

        This is for an event that was inside before, so that no other event is inside while this
        event cleans up.
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
        """Pass the gate to the next event in the queue."""
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
    """Stores an object's changes in order, and holds results back until they are durable.

    One write is in flight at a time, and the next one collects changes. So changes are stored in
    order, and a burst of events costs two commits. After a failed write the gate stays shut: all
    current and later waiters get `failure`.
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
        """Changes that are not durable yet, oldest first."""
        return [self.forming] if self.in_flight is None else [self.in_flight, self.forming]

    def check(self) -> None:
        """Raise the failure that shut the gate, if there is one."""
        if self.failure is not None:
            raise self.failure

    def schedule(self) -> None:
        """Begin to store the collected changes when the running event next awaits something."""
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())
            self._writer.add_done_callback(self._ended)

    async def wait(self) -> None:
        """Wait until all changes made so far are durable."""
        self.check()
        last = self.in_flight if self.forming.empty else self.forming
        if last is None:
            return
        # Each waiting event gets its own future: cancelling one event does not affect the others.
        waiter = asyncio.get_running_loop().create_future()
        last.waiters.append(waiter)
        await waiter

    def shut(self, failure: TailraceError) -> None:
        """Fail all waiters and later calls. The outcome of a write in flight is not reported."""
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
                return  # `shut` was called during the write
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
    """Return the error for events of an instance that was discarded."""
    return Unavailable(
        f"the object was reset: {why}",
        code="object_reset",
        hint="send the request again; the object may already have carried out the first one",
    )


def failure_of(error: BaseException) -> TailraceError:
    """Return the error for an object's events after an error of its storage.

    A `CallerError` from storage, such as `StaleEpoch` or `WrongIndex`, means that this instance is
    out of date, not that its caller is at fault. So the caller gets a retryable error instead,
    except for `StreamFull`, which would happen again.
    """
    if isinstance(error, TailraceError) and not isinstance(error, CallerError):
        return error
    if isinstance(error, StreamFull):
        return error
    failure = lost(str(error) or type(error).__name__)
    failure.__cause__ = error
    return failure
