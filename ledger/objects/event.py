"""One event of an object: a request or an alarm on its way through the object's gates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum, auto

from ledger.errors import Conflict
from ledger.interface import ObjectKey

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
        if any(caller.blocks and caller.key == self.key for caller in self._callers()):
            raise Conflict(
                f"{self.key.kind} {self.key.name!r} waits for itself",
                code="call_deadlock",
                hint="block_concurrency_while cannot call what calls back",
            )

    def _callers(self) -> Iterator[Event]:
        caller = self.parent
        while caller is not None:
            yield caller
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
