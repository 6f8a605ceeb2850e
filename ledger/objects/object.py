"""Durable Objects, as Cloudflare documents them, in Python: base class, context and instance.

An object is addressed by its class and its name, and has at most one live instance. It handles one
event at a time, has transactional storage, and one alarm. `ledger/objects/runtime.py` runs objects
and has the rules of their gates.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

import structlog

from tailrace.ledger.errors import NotFound, Overloaded, TailraceError
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Alarm, Ledger, ObjectKey
from tailrace.ledger.objects.gate import Changes, Event, InputGate, OutputGate, Stage, current, lost
from tailrace.ledger.objects.storage import ObjectStorage

MAX_KEY_CHARS = 512
"""Maximum length of an object's class and name, in characters; the minimum is 1."""
SCHEDULED = "scheduled"
"""Operation of every object: call `scheduled`, because a cron is due.

The body is the Unix time in ms at which the cron was due, in decimal digits.
"""
ERASE = "erase"
"""Operation of every object: delete everything."""

T = TypeVar("T")

Headers = tuple[tuple[str, str], ...]
"""Header fields in order, names in lower case."""

log = structlog.get_logger("objects")


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """A request to an object, like the Fetch API's Request.

    `url` is absolute, as the client sent it (scheme://host/path?query).

    A request from another object may have an `operation` instead of method and URL. Clients cannot
    send an operation, because no frame from an edge has a field for it.
    """

    method: str
    url: str
    headers: Headers = ()
    body: bytes = b""
    operation: str | None = None

    @classmethod
    def internal(cls, operation: str, body: bytes = b"", headers: Headers = ()) -> Self:
        """Return a request for an operation, from one object to another."""
        return cls("", "", headers, body, operation)

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None; `name` is in lower case."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class ObjectResponse:
    """The response of an object to a request.

    A `body` that is an iterator is a live body: its chunks are read after `fetch` has returned,
    while the object handles other requests. A live body keeps the instance in memory until the
    body ends or is closed (`aclose`).
    """

    status: int
    headers: Headers = ()
    body: bytes | AsyncIterator[bytes] = b""

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None; `name` is in lower case."""
        return next((value for key, value in self.headers if key == name), None)


class ObjectContext:
    """The services that an object may use.

    `ledger` reads and watches streams; `storage` changes them. Await anything that may take long,
    such as a stream's next frame, in `outside`. `now_ms` returns Unix time in ms, and `random(n)`
    returns n random bytes; tests inject both.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.key = instance.key
        self.storage = instance.storage
        self.ledger = instance.host.ledger
        self.now_ms = instance.host.now_ms
        self.random = instance.host.random

    async def block_concurrency_while(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, and let no other event run before it ends, even while `work` is in `outside`.

        Use this for work that must finish before any other event begins, such as an initialisation
        that calls other objects. If `work` raises, the instance is discarded.
        """
        return await self._instance.block(work)

    async def outside(self, waiting: Awaitable[T]) -> T:
        """Await something other than storage: a timer, a stream's next frame, another task.

        Earlier changes are made durable first. Other events of the object may run in the meantime.
        The result is returned when it is this event's turn again.
        """
        return await self._instance.outside(waiting)

    async def call(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        """Send a request to another object and await the response in `outside`.

        Raises:
            NotFound: The class is unknown.
        """
        return await self._instance.outside(self._instance.host.fetch(key, request))


class DurableObject:
    """Base class of objects. The constructor may not await: load state in the first event."""

    def __init__(self, context: ObjectContext) -> None:
        self.context = context

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Answer a request. An exception reaches the caller; changes made before it are kept."""
        raise NotFound(f"objects of class {self.context.key.kind!r} take no requests")

    async def alarm(self, retries: int) -> None:
        """Handle the alarm; `retries` is the number of failed tries so far.

        The runtime calls this at least once for each alarm. After an exception it tries again
        later, as `RetryPolicy` says.
        """

    async def scheduled(self, cron: str, at_ms: int) -> None:
        """Handle a cron that was due at `at_ms` (Unix time); `cron` is the cron expression.

        The object whose name is that expression gets this call.
        """
        raise NotFound(f"objects of class {self.context.key.kind!r} take no crons")


ObjectFactory = Callable[[ObjectContext], DurableObject]
"""Creates an instance. A class whose constructor takes only the context is a factory."""


@dataclass(frozen=True, slots=True)
class ReadContext:
    """The services for a `Read`, which answers from stored data, without the object's instance.

    A read may run at any origin, also while another origin owns the object.
    """

    key: ObjectKey
    ledger: Ledger
    now_ms: Callable[[], int]
    random: Callable[[int], bytes]
    ask: Callable[[ObjectRequest], Awaitable[ObjectResponse]]
    """Send a request to the object's instance, at the origin that owns it, as a usual event."""


Read = Callable[[ReadContext, ObjectRequest], Coroutine[None, None, ObjectResponse]]
"""Type of functions that answer a request from stored data."""


@dataclass(frozen=True, slots=True)
class ReadableClass:
    """A class of objects that can be read without a claim, a gate or an instance.

    So reads never delay a write, at any origin, and a read of an object that does not exist costs
    nothing. `read` answers requests whose method is in `reads`; an instance answers all others.
    """

    make: ObjectFactory
    read: Read
    reads: frozenset[str]

    def __call__(self, context: ObjectContext) -> DurableObject:
        return self.make(context)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retries of a failed alarm, with the delays that Cloudflare documents."""

    first_ms: int = 2_000  # the delay doubles with each retry
    most: int = 6

    def delay_ms(self, retry: int) -> int:
        """Return the ms between a failure and retry number `retry` (1, 2, …)."""
        return self.first_ms << max(0, min(retry, self.most) - 1)

    def after(self, alarm: Alarm, now_ms: int) -> Alarm | None:
        """Return the next try of a failed alarm, or None after the last one."""
        retry = alarm.retries + 1
        return None if retry > self.most else Alarm(now_ms + self.delay_ms(retry), retry)


@dataclass(frozen=True, slots=True)
class ObjectLimits:
    """Limits of an `ObjectRuntime` and of the objects that it runs."""

    resident: int = 4_096
    """Maximum instances in memory; above it idle instances are evicted, the longest idle first."""
    idle_s: float = 60.0
    """Seconds without an event after which an instance is evicted."""
    waiting: int = 1_024
    """Maximum events that wait to run in one object; further events get `Overloaded`."""
    block_s: float = 30.0
    """Timeout of `block_concurrency_while` in seconds, as in Durable Objects."""
    close_s: float = 5.0
    """Timeout in seconds for events to end when the runtime is closed."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    durability: Durability = Durability.PROCESS
    """Durability of writes; a write to a stream of higher durability has the stream's."""
    alarms_at_once: Mapping[str, int] = field(default_factory=dict)
    """Maximum concurrent alarm handlers by class, for classes whose handlers wait for other work.

    These handlers do not count towards MAX_ALARMS_AT_ONCE, so other classes need not wait.
    """


# ---- one live instance: its gates, its storage and the events in it ----


class InstanceHost(Protocol):
    """The part of the object runtime that an instance uses."""

    ledger: Ledger
    limits: ObjectLimits
    now_ms: Callable[[], int]
    random: Callable[[int], bytes]

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse: ...

    def discard(self, instance: Instance) -> None:
        """Remove an instance that has failed."""

    def used(self, instance: Instance) -> None:
        """Report that an instance became busy or idle."""

    def alarm_stored(self) -> None:
        """Report that an alarm was stored, because it may be due before all other alarms."""


class Instance:
    """A live instance of an object, created by its first event; see `runtime.py`."""

    def __init__(self, key: ObjectKey, factory: ObjectFactory, host: InstanceHost) -> None:
        self.key = key
        self.host = host
        self.events: set[Event] = set()
        self._bodies = 0
        self.holder: Event | None = None
        self.stopping: TailraceError | None = None
        self._factory = factory
        self._store = host.ledger.objects
        self._epoch = 0
        self._input = InputGate()
        self.output = OutputGate(self._write, self._stored, self._failed)
        self.storage: ObjectStorage
        self._object: DurableObject | None = None

    @property
    def busy(self) -> bool:
        return bool(self.events or self._bodies)

    # ---- the input gate ----

    async def begin(self, event: Event) -> bool:
        """Let `event` enter through the input gate.

        Return False if this instance was discarded: the event then needs a new instance.
        """
        if self._input.waiting >= self.host.limits.waiting:
            raise Overloaded(
                f"{self.key.kind} {self.key.name!r} has {self._input.waiting} requests waiting",
                hint="try again later",
            )
        self.events.add(event)
        self.host.used(self)
        ready = False
        try:
            await self._input.enter()
            self._hold(event)
            ready = self.output.failure is None and await self._prepare()
        finally:
            if not ready:
                self._let_go(event, Stage.QUEUED)
                self._forget(event)
        return ready

    async def run(self, event: Event, work: Callable[[DurableObject], Awaitable[T]]) -> T:
        """Run `work` and end `event`; return or raise its outcome when all changes are durable."""
        assert self._object is not None
        try:
            return await work(self._object)
        finally:
            self._let_go(event, Stage.LEAVING)
            try:
                if not event.resets:
                    await self.output.wait()
            finally:
                self._forget(event)

    def _hold(self, event: Event) -> None:
        event.stage, self.holder = Stage.INSIDE, event

    def _let_go(self, event: Event, stage: Stage) -> None:
        event.stage = stage
        if self.holder is event:
            self.holder = None
            self._input.leave()

    def _forget(self, event: Event) -> None:
        self.events.discard(event)
        self.host.used(self)

    async def _prepare(self) -> bool:
        """Create the instance if it does not exist; return True if it still owns the object."""
        if self._object is None:
            await self._make()
            return True
        return await self._is_owner()

    async def _make(self) -> None:
        try:
            state = await self._store.claim(self.key)
            self._epoch = state.epoch
            self.storage = ObjectStorage(
                self.key, self._store, state.alarm, self.output, self._guard
            )
            self._object = self._factory(ObjectContext(self))
        finally:
            if self._object is None:
                self.output.shut(lost("it could not be created"))

    async def _is_owner(self) -> bool:
        owner = await self._store.owns(self.key, self._epoch)
        if not owner:
            self.output.shut(lost("it has another owner"))
        return owner

    # ---- stopping and discarding the instance ----

    def stop(self, reason: TailraceError) -> None:
        """Interrupt events in `outside`; events inside may finish and store their changes."""
        self.stopping = reason
        for event in self.events:
            if event.stage is Stage.OUTSIDE and not event.blocks:
                event.interrupt()

    def _failed(self, failure: TailraceError) -> None:
        self.stop(failure)
        self.host.discard(self)

    def _guard(self) -> None:
        if self.holder is None or not self.holder.is_current:
            raise RuntimeError(
                f"the storage of {self.key.kind} {self.key.name!r} may be used only by the event"
                " that holds the input gate, not by a task that the event created, nor by the"
                " iterator of a response body"
            )

    # ---- storing ----

    async def _write(self, changes: Changes) -> None:
        limits = self.host.limits
        await self._store.write(changes.write(self.key, self._epoch, limits.durability))

    def _stored(self, changes: Changes) -> None:
        self.storage.stored(changes)
        if changes.sets_alarm:
            self.host.alarm_stored()

    # ---- methods of `ObjectContext` ----

    async def outside(self, waiting: Awaitable[T]) -> T:
        event = current()
        if event is None or event not in self.events:
            # Called by a `LiveBody`, or by a task that outlived its event: neither holds the gate.
            return await waiting
        try:
            self._check_outside(event)
            if event.blocks:
                await self.output.wait()
                return await waiting
            result = await self._wait_outside(event, waiting)
        finally:
            if inspect.iscoroutine(waiting):
                waiting.close()  # else Python warns if the coroutine was never awaited
        if not await self._is_owner():
            self.output.check()
        return result

    def _check_outside(self, event: Event) -> None:
        if not event.is_current or self.holder is not event:
            raise RuntimeError(
                "outside() can be called only by the event's own task, while it holds the input"
                " gate; that task can await other tasks in outside()"
            )
        if self.storage.in_transaction:
            raise RuntimeError(
                "outside() cannot be called inside a transaction: its uncommitted changes would"
                " become visible"
            )

    async def _wait_outside(self, event: Event, waiting: Awaitable[T]) -> T:
        if event.abandoned:
            raise asyncio.CancelledError
        self._let_go(event, Stage.OUTSIDE)
        try:
            self._check_stopping()
            await self.output.wait()
            return await waiting
        except asyncio.CancelledError:
            self._check_stopping()
            raise
        finally:
            event.stage = Stage.RETURNING
            try:
                await self._input.enter_again()
            finally:
                self._hold(event)

    def _check_stopping(self) -> None:
        if self.stopping is not None:
            raise self.stopping

    async def block(self, work: Callable[[], Awaitable[T]]) -> T:
        event = self.holder
        if event is None or not event.is_current:
            raise RuntimeError(
                "block_concurrency_while can be called only by the event that holds the input gate"
            )
        done, limit = False, asyncio.timeout(self.host.limits.block_s)
        event.blocks += 1
        try:
            async with limit:
                result = await work()
            done = True
            return result
        except TimeoutError as error:
            if limit.expired():
                raise lost("its block_concurrency_while took too long") from error
            raise
        finally:
            event.blocks -= 1
            if not done:
                event.resets = True
                self.output.shut(lost("its block_concurrency_while failed"))

    # ---- requests and alarms from the runtime ----

    async def fetch(self, event: Event, request: ObjectRequest) -> ObjectResponse:
        body: LiveBody | None = None

        async def answer(target: DurableObject) -> ObjectResponse:
            nonlocal body
            response = await self._asked(target, request)
            if isinstance(response.body, bytes):
                return response
            self._bodies += 1
            body = LiveBody(response.body, self.output, self._body_ended)
            return ObjectResponse(response.status, response.headers, body)

        heard = False
        try:
            response = await self.run(event, answer)
            heard = True
            return response
        finally:
            if body is not None and not heard:
                await body.aclose()

    async def _asked(self, target: DurableObject, request: ObjectRequest) -> ObjectResponse:
        if request.operation == SCHEDULED:
            await target.scheduled(self.key.name, int(request.body))
            return ObjectResponse(204)
        if request.operation == ERASE:
            async with self.storage.transaction():
                self.storage.delete_alarm()
                self.storage.delete_all()
            return ObjectResponse(204)
        return await target.fetch(request)

    def _body_ended(self) -> None:
        self._bodies -= 1
        self.host.used(self)

    async def alarm(self, event: Event) -> None:
        await self.run(event, self._ring)

    async def _ring(self, target: DurableObject) -> None:
        """Run the alarm's handler if the alarm is still due.

        The alarm stays stored until the handler has ended, so that a crash cannot lose it.
        """
        alarm = self.storage.begin_alarm(self.host.now_ms())
        if alarm is None:
            return
        done = False
        try:
            await target.alarm(alarm.retries)
            done = True
        finally:
            if done:
                self.storage.end_alarm(None)
            elif self.stopping is not None:
                self.storage.interrupt_alarm()
            else:
                again = self.host.limits.retries.after(alarm, self.host.now_ms())
                if self.storage.end_alarm(again) and again is None:
                    log.error("alarm.dropped", kind=self.key.kind, name=self.key.name)


class LiveBody:
    """A live body: gives each chunk of `source` out once all earlier changes are durable.

    `ended` is called once, when `source` ends or `aclose` is called.
    """

    def __init__(
        self, source: AsyncIterator[bytes], output: OutputGate, ended: Callable[[], None]
    ) -> None:
        self._source = source
        self._output = output
        self._ended: Callable[[], None] | None = ended

    def __aiter__(self) -> LiveBody:
        return self

    async def __anext__(self) -> bytes:
        if self._ended is None:
            raise StopAsyncIteration
        more = False
        try:
            self._output.check()
            chunk = await anext(self._source)
            # The chunk may depend on changes that are still being stored.
            await self._output.wait()
            more = True
            return chunk
        finally:
            if not more:
                await self.aclose()

    async def aclose(self) -> None:
        """Close the source. The caller must first cancel a pending read of this body."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        try:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
        finally:
            ended()
