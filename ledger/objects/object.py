"""What an object is and may touch: Durable Objects, as Cloudflare documents them, in Python.

An object is addressed by its class and its name. At most one instance of it lives at a time;
it answers requests one event at a time, keeps its values in a transactional storage and has
one alarm. The rules of its gates are in `ledger/objects/runtime.py`, which runs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ledger.errors import NotFound
from ledger.frame import Durability
from ledger.interface import Ledger, ObjectKey
from ledger.objects.alarm import RetryPolicy
from ledger.objects.storage import ObjectStorage

MAX_KEY_CHARS = 512
"""Longest class and longest name of an object, in characters; the shortest is 1."""
SCHEDULED = "SCHEDULED"
ERASE = "ERASE"
"""Methods of requests that no client can send: a cron's time has come; forget everything."""
AT_MS = "at-ms"
"""The header that says which time of a cron it is."""

T = TypeVar("T")

Headers = tuple[tuple[str, str], ...]
"""Header fields in order, names in lower case."""


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """A request to an object, like the Fetch API's Request.

    `url` is absolute, as the client sent it (scheme://host/path?query).
    """

    method: str
    url: str
    headers: Headers = ()
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """The first value of a header; `name` in lower case."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class ObjectResponse:
    """What an object answers.

    A `body` that is an iterator is live: it is read after the event has ended, outside of the
    object's gates, and keeps the instance in memory until it ends or is closed (`aclose`).
    """

    status: int
    headers: Headers = ()
    body: bytes | AsyncIterator[bytes] = b""

    def header(self, name: str) -> str | None:
        """The first value of a header; `name` in lower case."""
        return next((value for key, value in self.headers if key == name), None)


class ObjectContext(Protocol):
    """What an object may touch."""

    @property
    def key(self) -> ObjectKey: ...

    @property
    def storage(self) -> ObjectStorage: ...

    @property
    def ledger(self) -> Ledger:
        """To read and to watch streams; they are changed through `storage`.

        What may take long, like waiting for a frame, belongs in `outside`.
        """

    def now_ms(self) -> int:
        """Unix ms of the injected clock."""

    def random(self, size: int) -> bytes:
        """`size` bytes of the injected randomness."""

    async def block_concurrency_while(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` with the input gate closed, `outside` included.

        For what must happen before any other event, like an initialisation with calls to
        other objects. If it raises, the instance is discarded.
        """

    async def outside(self, waiting: Awaitable[T]) -> T:
        """Await something that is not storage: a timer, a stream's next frame, another task.

        What was written before is made durable first; other events may run meanwhile; what
        `waiting` gives is delivered when the input gate is free again.
        """

    async def call(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        """Ask another object, as in `outside`. `NotFound` for an unknown class."""


class DurableObject:
    """Base class of objects. The constructor may not await: load state in the first event."""

    def __init__(self, context: ObjectContext) -> None:
        self.context = context

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Answer a request. What it raises reaches the caller; changes made before it stay."""
        raise NotFound(f"objects of class {self.context.key.kind!r} take no requests")

    async def alarm(self, retries: int) -> None:
        """Do what the alarm was set for; `retries` is how often that has failed already.

        Called at least once. An exception has it called again later, up to a limit.
        """

    async def scheduled(self, cron: str, at_ms: int) -> None:
        """Do what a cron is for, whose time was `at_ms`; called in the object of that name."""
        raise NotFound(f"objects of class {self.context.key.kind!r} take no crons")


ObjectFactory = Callable[[ObjectContext], DurableObject]
"""Makes an instance; a class that takes only the context is one."""


@dataclass(frozen=True, slots=True)
class ReadContext:
    """What a read touches that needs no object: what is stored, by whomever it is owned."""

    key: ObjectKey
    ledger: Ledger
    now_ms: Callable[[], int]
    random: Callable[[int], bytes]
    ask: Callable[[ObjectRequest], Awaitable[ObjectResponse]]
    """Ask the object itself, as an event."""


Read = Callable[[ReadContext, ObjectRequest], Coroutine[None, None, ObjectResponse]]
"""Answers a request from what is stored."""


@dataclass(frozen=True, slots=True)
class ReadableClass:
    """A class of objects that can be read beside them: no claim, no gate, no instance.

    So readers stop no writer, wherever they are, and what is not there costs nothing. `reads`
    are the methods of requests that `read` answers.
    """

    make: ObjectFactory
    read: Read
    reads: frozenset[str]

    def __call__(self, context: ObjectContext) -> DurableObject:
        return self.make(context)


@dataclass(frozen=True, slots=True)
class ObjectLimits:
    """Of one runtime."""

    resident: int = 4_096
    """Instances in memory. Above it idle ones are evicted, the longest idle first."""
    idle_s: float = 60.0
    """An instance that had no event for so long is evicted."""
    waiting: int = 1_024
    """Events at the input gate of one object; who comes then is told `Overloaded`."""
    block_s: float = 30.0
    """What a `block_concurrency_while` may take, as in Durable Objects."""
    close_s: float = 5.0
    """What events may take to end when the runtime is closed."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    durability: Durability = Durability.PROCESS
    """Of all that objects store, except what goes into a stream that asks for more."""
    alarms_at_once: Mapping[str, int] = field(default_factory=dict)
    """Alarm handlers that run at the same time, of classes whose handlers wait for others: they
    take no places from the rest."""
