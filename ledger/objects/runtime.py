"""Runs objects: one instance per name, one event at a time, alarms and eviction.

The rules are those of Cloudflare's Durable Objects (its documentation: "Rules of Durable
Objects", "Storage API", "Alarms", "Lifecycle"), in asyncio:

**Instances.** An object is addressed by class and name. Its first event claims it in the
store, which fences every former owner, and creates the instance from stored data. Idle instances
are evicted and created again by the next event, so state that is only in memory is a cache.

**Input gate.** One event is in the object at a time, and stays inside during every await, also
during storage reads and `sync`. Other events can enter only while it is in `context.outside`, and
afterwards it waits for its turn to enter again. (Cloudflare opens the gate at every await that is
not storage. Here the object must call `outside` for that; without the call other events wait
longer, but nothing goes wrong.) An event is one task. It may create tasks and await them in
`outside`, but these tasks cannot use the storage. A call to another object is `outside`, so that
object may call this one back. `block_concurrency_while` keeps the gate shut even during `outside`,
for at most 30 s, and discards the instance if its work fails.

**Output gate.** Nothing leaves the object before all earlier changes, of any event, are durable:
no response, no exception, and no chunk of a live body. A coroutine that is passed to `outside` also
starts only then; a task that is passed has started when it was created. Changes are stored in the
background. All changes between two awaits that really wait are one write, which is atomic. One
write is in flight at a time; the next one collects the changes of all events in the meantime. The
object sees its own changes at once.

**Reads.** A class may answer some requests from stored data (`ReadableClass`). These requests are
not events: they claim nothing, wait for no gate, and see durable data. If the instance is in this
process, they wait for its write in flight, so that no client sees data that a crash may undo.

**Owners.** On a shared ledger, requests for an object that another live origin has claimed are
forwarded to that origin (`forward`). The object is claimed here only after the lease of that origin
has expired. The events there then start again or get an error, as after a failed write.

**Errors.** An exception of `fetch` reaches the caller unchanged. Changes made before the exception
are kept, as in Cloudflare's objects, except inside `transaction()`, whose changes are one write or
none. If a write fails or the object has another owner, the instance is discarded: events that have
started get a retryable `Unavailable` (or the `LedgerFailed` itself), queued events start on a new
instance. Ownership is checked when an event starts and when it returns from `outside`. So an event
that only reads may still answer from the old state while the object gets another owner.

**Callers.** A caller that disconnects does not stop its event while the event is inside the object.
In `outside`, the awaited work is cancelled, and the event gets the `CancelledError` once it holds
the gate again. At most 16 objects call one another in a chain.

**Live bodies** (`ObjectResponse.body`) run in their reader's task, concurrently with later events.
They may read the instance's memory and the ledger, but not the storage. The instance is not evicted
before they end.

**Alarms.** Each object has one alarm, whose handler runs at least once. A due alarm is an event
like a request. To the handler, the object has no alarm. The stored alarm is replaced only together
with the last changes of the handler: removed after success, postponed by 2, 4, 8, 16, 32, 64 s
after an exception, dropped after the sixth retry. An alarm that the handler sets replaces the
running alarm, which is then not retried. Deleting the running alarm has no effect. A crash during
the handler leaves the alarm stored, so the handler runs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import structlog

from tailrace.ledger.errors import CallerError, HeldElsewhere, NotFound, TailraceError, Unavailable
from tailrace.ledger.interface import Alarm, Ledger, ObjectKey, ObjectStore
from tailrace.ledger.objects.gate import Event, Stage, enter, lost
from tailrace.ledger.objects.object import (
    MAX_KEY_CHARS,
    Instance,
    LiveBody,
    ObjectFactory,
    ObjectLimits,
    ObjectRequest,
    ObjectResponse,
    Read,
    ReadableClass,
    ReadContext,
)
from tailrace.ledger.objects.storage import is_text

MAX_ALARMS_AT_ONCE = 64
"""Maximum concurrent alarm handlers; others wait, earliest first.

Handlers of classes in `ObjectLimits.alarms_at_once` do not count.
"""
POLL_MS = 5_000
"""Interval in ms between checks of the store if nothing wakes the loop.

Another origin that shares the store may have set an alarm and died.
"""
HORIZON_MS = 2**62
"""A Unix time in ms that is later than any alarm."""

T = TypeVar("T")

Forward = Callable[[HeldElsewhere, ObjectKey, ObjectRequest], Awaitable[ObjectResponse | None]]
"""Type of functions that send a request to the origin that has claimed the object.

They return None if the runtime must try here again, because that origin cannot be reached or no
longer runs the object.
"""

log = structlog.get_logger("objects")


class ObjectRuntime:
    """The objects of a ledger. `run` handles alarms and eviction; close it before the ledger.

    `classes` has the factory of each class; call `reset` after changing one. `now_ms` returns Unix
    time in ms, `random(n)` returns n random bytes.
    """

    def __init__(
        self,
        ledger: Ledger,
        classes: Mapping[str, ObjectFactory],
        now_ms: Callable[[], int],
        random: Callable[[int], bytes],
        *,
        limits: ObjectLimits | None = None,
        timer: Timer | None = None,
        forward: Forward | None = None,
    ) -> None:
        self.ledger = ledger
        self.now_ms = now_ms
        self.random = random
        self.limits = limits or ObjectLimits()
        self._classes = classes
        self._forward = forward
        self._timer = timer or LoopTimer(now_ms)
        self._instances: dict[ObjectKey, Instance] = {}
        # The Unix time in ms at which each instance became idle, earliest first.
        self._idle: dict[ObjectKey, int] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._reads: set[asyncio.Task[ObjectResponse]] = set()
        self._closing: TailraceError | None = None
        self._wake = asyncio.Event()
        self._alarms = Alarms(
            ledger.objects,
            self._ring,
            now_ms,
            self._wake,
            self.limits,
        )

    @property
    def resident(self) -> int:
        """Number of instances in memory."""
        return len(self._instances)

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        """Send a request to an object, at whichever origin it is; raise what the object raises.

        If the response has a live body, the caller must read it to its end or close it.

        Raises:
            NotFound: The class is unknown.
        """
        self._check(key)
        found = self._classes[key.kind]
        if isinstance(found, ReadableClass) and request.method in found.reads:
            return await self._aside(key, found.read, request)
        return await self._ask(key, request)

    async def fetch_here(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        """Send a request to an object in this process.

        Raises:
            HeldElsewhere: Another origin has claimed the object.
        """
        return await self._event(key, lambda instance, event: instance.fetch(event, request))

    async def _ask(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        while True:
            try:
                return await self.fetch_here(key, request)
            except HeldElsewhere as held:
                if self._forward is None:
                    raise
                response = await self._forward(held, key, request)
                if response is not None:
                    return response

    async def run(self) -> None:
        """Run due alarms and evict idle instances, until cancelled."""
        while True:
            self._wake.clear()
            await self._timer.wait(self._wake, await self.wake_due())

    async def wake_due(self) -> int:
        """Start due alarms and evict idle instances: one iteration of `run`.

        Returns the Unix time in ms at which the next alarm is due, or at which to check again.
        """
        self._evict_idle()
        return await self._alarms.start_due()

    async def alarms_ended(self) -> None:
        """Wait for the running alarm handlers."""
        await self._alarms.ended()

    async def close(self) -> None:
        """Refuse new events, interrupt the events in `outside`, and store all changes."""
        self._closing = Unavailable("the objects are being closed", code="closing")
        for instance in list(self._instances.values()):
            instance.stop(self._closing)
        for read in self._reads:
            read.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self.limits.close_s)
            for task in late:
                task.cancel()
            if late:
                log.warning("objects.events_cancelled", events=len(late))
                await asyncio.wait(late, timeout=self.limits.close_s)
        for instance in list(self._instances.values()):
            instance.output.shut(self._closing)

    # ---- reads ----

    async def _aside(self, key: ObjectKey, read: Read, request: ObjectRequest) -> ObjectResponse:
        context = ReadContext(key, self.ledger, self.now_ms, self.random, partial(self._ask, key))
        # A separate task, so that `close` can cancel the read without cancelling its caller.
        task = asyncio.get_running_loop().create_task(self._read(context, read, request))
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closing is not None and task.cancelled():
                raise self._closing from None
            raise

    async def _read(
        self, context: ReadContext, read: Read, request: ObjectRequest
    ) -> ObjectResponse:
        response = await read(context, request)
        instance = self._instances.get(context.key)
        if instance is not None:
            await instance.output.wait()
        return response

    # ---- events ----

    async def _ring(self, key: ObjectKey) -> None:
        await self._event(key, lambda instance, event: instance.alarm(event))

    async def _event(self, key: ObjectKey, visit: Callable[[Instance, Event], Awaitable[T]]) -> T:
        self._check(key)
        event = Event(key)
        # A separate task, because cancelling the caller must not stop the event halfway.
        task = asyncio.get_running_loop().create_task(self._visit(event, visit))
        event.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            event.abandon()
            task.add_done_callback(self._unheard)
            raise

    async def _visit(self, event: Event, visit: Callable[[Instance, Event], Awaitable[T]]) -> T:
        enter(event)
        try:
            while True:
                instance = self._resident(event.key)
                if await instance.begin(event):
                    return await visit(instance, event)
        except asyncio.CancelledError as error:
            if event.abandoned:
                raise
            raise lost("an operation that its event awaited was cancelled") from error
        finally:
            event.stage = Stage.ENDED

    def _unheard(self, task: asyncio.Task[T]) -> None:
        """Log the error, or close the live body, of an event whose caller has disconnected."""
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.info("event.failed_without_caller", error=repr(error))
            return
        result = task.result()
        if isinstance(result, ObjectResponse) and isinstance(result.body, LiveBody):
            closing = asyncio.get_running_loop().create_task(result.body.aclose())
            self._tasks.add(closing)
            closing.add_done_callback(self._tasks.discard)

    def _check(self, key: ObjectKey) -> None:
        if self._closing is not None:
            raise self._closing
        for field, text in zip(("kind", "name"), key, strict=True):
            if not 1 <= len(text) <= MAX_KEY_CHARS or not is_text(text):
                raise CallerError(
                    f"the {field} of an object has {len(text)} characters",
                    field=field,
                    hint=f"use 1 to {MAX_KEY_CHARS} characters of Unicode text",
                )
        if key.kind not in self._classes:
            raise NotFound(f"there is no class of objects {key.kind!r}", field="kind")

    # ---- instances ----

    def reset(self, kind: str) -> None:
        """Discard the instances of a class, because its factory in `classes` has changed."""
        for key in [key for key in self._instances if key.kind == kind]:
            self._instances[key].output.shut(lost("its class has changed"))

    def _resident(self, key: ObjectKey) -> Instance:
        instance = self._instances.get(key)
        if instance is None:
            instance = Instance(key, self._classes[key.kind], self)
            self._instances[key] = instance
            self._make_room()
        return instance

    def discard(self, instance: Instance) -> None:
        if self._instances.get(instance.key) is instance:
            del self._instances[instance.key]
            self._idle.pop(instance.key, None)

    def used(self, instance: Instance) -> None:
        if self._instances.get(instance.key) is not instance:
            return
        self._idle.pop(instance.key, None)
        if not instance.busy:
            self._idle[instance.key] = self.now_ms()
            self._make_room()

    def alarm_stored(self) -> None:
        self._wake.set()

    def _make_room(self) -> None:
        while len(self._instances) > self.limits.resident and self._idle:
            self._evict(next(iter(self._idle)))

    def _evict_idle(self) -> None:
        last_ms = self.now_ms() - int(self.limits.idle_s * 1000)
        while self._idle and next(iter(self._idle.values())) <= last_ms:
            self._evict(next(iter(self._idle)))

    def _evict(self, key: ObjectKey) -> None:
        self._instances[key].output.shut(lost("it was evicted"))


class Timer(Protocol):
    """The way in which `run` waits; tests inject their own."""

    async def wait(self, wake: asyncio.Event, until_ms: int) -> None:
        """Wait until `wake` is set or the time is `until_ms` (Unix ms)."""


class LoopTimer:
    """A timer of the event loop."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms

    async def wait(self, wake: asyncio.Event, until_ms: int) -> None:
        try:
            async with asyncio.timeout(max(0, until_ms - self._now_ms()) / 1000):
                await wake.wait()
        except TimeoutError:
            return


class Held(NamedTuple):
    """An alarm whose failure could not be stored; it is not tried before `until_ms` (Unix time)."""

    alarm: Alarm
    until_ms: int
    times: int


class Alarms:
    """Starts the handlers of due alarms; `ring` runs one handler and raises its error."""

    def __init__(
        self,
        store: ObjectStore,
        ring: Callable[[ObjectKey], Coroutine[None, None, None]],
        now_ms: Callable[[], int],
        wake: asyncio.Event,
        limits: ObjectLimits,
    ) -> None:
        self._store = store
        self._ring = ring
        self._now_ms = now_ms
        self._wake = wake
        self._policy, self._at_once = limits.retries, limits.alarms_at_once
        self._running: dict[ObjectKey, asyncio.Task[None]] = {}
        self._held: dict[ObjectKey, Held] = {}

    async def start_due(self) -> int:
        """Start due alarms and return when to check again, in Unix ms."""
        # The store also returns the alarms that are running or held, which cannot be started now.
        # So request more alarms than can be started, by their number.
        limit = MAX_ALARMS_AT_ONCE + sum(self._at_once.values())
        limit += len(self._running) + len(self._held)
        try:
            rows = await self._store.due(HORIZON_MS, limit)
        except TailraceError as error:
            log.warning("alarms.cannot_be_read", error=str(error))
            return self._now_ms() + self._policy.first_ms
        now = self._now_ms()
        self._forget_held(dict(rows))
        again = now + POLL_MS
        for key, alarm in rows:
            at_ms = max(alarm.at_ms, self._held[key].until_ms if key in self._held else 0)
            if at_ms > now:
                again = min(again, at_ms)
            elif key not in self._running and self._has_place(key.kind):
                self._start(key, alarm)
        return again

    async def ended(self) -> None:
        """Wait for the running handlers."""
        if self._running:
            await asyncio.wait(self._running.values())

    def _has_place(self, kind: str) -> bool:
        if kind in self._at_once:
            return sum(key.kind == kind for key in self._running) < self._at_once[kind]
        shared = sum(key.kind not in self._at_once for key in self._running)
        return shared < MAX_ALARMS_AT_ONCE

    def _start(self, key: ObjectKey, alarm: Alarm) -> None:
        task = self._running[key] = asyncio.get_running_loop().create_task(self._ring(key))

        def ended(task: asyncio.Task[None]) -> None:
            del self._running[key]
            self._wake.set()
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.warning("alarm.failed", kind=key.kind, name=key.name, error=repr(error))
                self._hold(key, alarm)

        task.add_done_callback(ended)

    def _hold(self, key: ObjectKey, alarm: Alarm) -> None:
        """Schedule another try of this alarm here, because its failure could not be stored."""
        times = self._held[key].times + 1 if key in self._held else 1
        until_ms = self._now_ms() + self._policy.delay_ms(times)
        self._held[key] = Held(alarm, until_ms, times)

    def _forget_held(self, stored: dict[ObjectKey, Alarm]) -> None:
        self._held = {
            key: held for key, held in self._held.items() if stored.get(key) == held.alarm
        }
