"""The two gates of an object: what may come in, and what may be seen outside.

An event is a request or an alarm on its way through them. The input gate is held by one event
at a time; the output gate opens when the changes made so far are durable. Both follow the
Durable Objects of Cloudflare; `ledger/objects/runtime.py` has the rules.
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
"""Objects that may call one another in one chain, the first one included."""


class Stage(Enum):
    """Where an event is. Its task may be cancelled where it does not hold the gate."""

    QUEUED = auto()
    """At the input gate for the first time."""
    INSIDE = auto()
    """Holding the input gate."""
    OUTSIDE = auto()
    """In `outside`: its `waiting` is awaited, or the changes made before it are stored."""
    RETURNING = auto()
    """At the input gate again, after `outside`."""
    LEAVING = auto()
    """Done; its changes are being stored."""
    ENDED = auto()


class Event:
    """An event, the task that runs it, and the event that called for it."""

    def __init__(self, key: ObjectKey) -> None:
        self.key = key
        self.parent = current()
        self.depth: int = 1 if self.parent is None else self.parent.depth + 1
        self.stage = Stage.QUEUED
        self.blocks = 0  # block_concurrency_while blocks that it is in
        self.abandoned = False  # nobody waits for its outcome
        self.resets = False  # its exception is why the instance is discarded
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
                    hint="block_concurrency_while cannot call what calls back",
                )
            caller = caller.parent

    @property
    def is_current(self) -> bool:
        """Whether the code that asks is this event's own, not that of a task it made."""
        return asyncio.current_task() is self.task

    def abandon(self) -> None:
        """Stop at the next place where the object is between events; nobody waits any more."""
        self.abandoned = True
        if self.stage in (Stage.QUEUED, Stage.OUTSIDE):
            self.interrupt()

    def interrupt(self) -> None:
        if self.task is not None:
            self.task.cancel()


_EVENT: ContextVar[Event | None] = ContextVar("event", default=None)


def enter(event: Event) -> None:
    """Make `event` the one that the current task, and what it starts, belongs to."""
    _EVENT.set(event)


def current() -> Event | None:
    """The event that the running code belongs to, while it lasts."""
    event = _EVENT.get()
    return None if event is None or event.stage is Stage.ENDED else event


@dataclass(slots=True, eq=False)
class Changes:
    """Changes that are stored together or not at all. In `values` None stands for deleted."""

    clear: bool = False  # before `values`
    values: dict[str, bytes | None] = field(default_factory=dict)
    alarm: Alarm | None = None
    sets_alarm: bool = False
    creates: list[NewStream] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    drops: list[bytes] = field(default_factory=list)
    size: int = 0
    """Bytes of names, values and frames."""
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
        """Take in the changes of a transaction that began after these."""
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
        """The same as the ledger takes it, at least as durable as the streams it creates."""
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
