"""One live instance of an object: its gates, its storage and the events in it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

import structlog

from ledger.errors import Overloaded, TailraceError
from ledger.interface import Ledger, ObjectKey
from ledger.objects.changes import Changes
from ledger.objects.event import Event, Stage, current
from ledger.objects.gate import InputGate, OutputGate, lost
from ledger.objects.object import (
    AT_MS,
    ERASE,
    SCHEDULED,
    DurableObject,
    ObjectFactory,
    ObjectLimits,
    ObjectRequest,
    ObjectResponse,
)
from ledger.objects.storage import ObjectStorage

T = TypeVar("T")

log = structlog.get_logger("objects")


class InstanceHost(Protocol):
    """What an instance needs of the runtime."""

    ledger: Ledger
    limits: ObjectLimits
    now_ms: Callable[[], int]
    random: Callable[[int], bytes]

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse: ...

    def discard(self, instance: Instance) -> None:
        """Forget an instance that has failed."""

    def used(self, instance: Instance) -> None:
        """An instance has become busy, or idle."""

    def alarm_stored(self) -> None:
        """The next alarm may be an earlier one now."""


class Instance:
    """An instance, made by its first event from what storage has; see `runtime.py`."""

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

    # ---- an event's way ----

    async def begin(self, event: Event) -> bool:
        """Bring `event` in. False where the instance was lost before: ask a new one."""
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
        """Do `work` and end `event`. Nothing of its outcome is seen before it is durable."""
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
        """Whether the instance is there and still the object's owner."""
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
            self._object = self._factory(Context(self))
        finally:
            if self._object is None:
                self.output.shut(lost("it could not be made"))

    async def _is_owner(self) -> bool:
        owner = await self._store.owns(self.key, self._epoch)
        if not owner:
            self.output.shut(lost("it has another owner"))
        return owner

    # ---- its end ----

    def stop(self, reason: TailraceError) -> None:
        """End what waits outside; what is inside may finish, and store what it changes."""
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
                f"the storage of {self.key.kind} {self.key.name!r} belongs to the event that is"
                " in the object: not to a task it made, nor to a live body"
            )

    # ---- storing ----

    async def _write(self, changes: Changes) -> None:
        limits = self.host.limits
        await self._store.write(changes.write(self.key, self._epoch, limits.durability))

    def _stored(self, changes: Changes) -> None:
        self.storage.stored(changes)
        if changes.sets_alarm:
            self.host.alarm_stored()

    # ---- what an object may do ----

    async def outside(self, waiting: Awaitable[T]) -> T:
        event = current()
        if event is None or event not in self.events:
            return await waiting  # a live body, or a task that outlived its event
        try:
            self._check_outside(event)
            if event.blocks:
                await self.output.wait()
                return await waiting
            result = await self._wait_outside(event, waiting)
        finally:
            if inspect.iscoroutine(waiting):
                waiting.close()  # or Python warns of one that was never awaited
        if not await self._is_owner():
            self.output.check()
        return result

    def _check_outside(self, event: Event) -> None:
        if not event.is_current or self.holder is not event:
            raise RuntimeError("only the task of the event can go outside; wait for others there")
        if self.storage.in_transaction:
            raise RuntimeError("outside a transaction, what it has buffered would be seen")

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
            raise RuntimeError("block_concurrency_while is for the event that is in the object")
        done, limit = False, asyncio.timeout(self.host.limits.block_s)
        event.blocks += 1
        try:
            async with limit:
                result = await work()
            done = True
            return result
        except TimeoutError as error:
            if limit.expired():
                raise lost("its initialisation took too long") from error
            raise
        finally:
            event.blocks -= 1
            if not done:
                event.resets = True
                self.output.shut(lost("its initialisation failed"))

    # ---- what the runtime has it do ----

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
        if request.method == SCHEDULED:
            at_ms = request.header(AT_MS) or "0"
            await target.scheduled(self.key.name, int(at_ms))
            return ObjectResponse(204)
        if request.method == ERASE:
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
        """Run the alarm if it is still due. It is stored as it was until this has ended."""
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


class Context:
    """`ledger.objects.object.ObjectContext` of an instance."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self.key = instance.key
        self.storage = instance.storage
        self.ledger = instance.host.ledger
        self.now_ms = instance.host.now_ms
        self.random = instance.host.random

    async def block_concurrency_while(self, work: Callable[[], Awaitable[T]]) -> T:
        return await self._instance.block(work)

    async def outside(self, waiting: Awaitable[T]) -> T:
        return await self._instance.outside(waiting)

    async def call(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        return await self._instance.outside(self._instance.host.fetch(key, request))


class LiveBody:
    """Reads `source` behind the output gate. It ends when read to its end, or with `aclose`.

    `ended` is called once, whichever comes first.
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
            # It may tell of changes that are on their way to storage.
            await self._output.wait()
            more = True
            return chunk
        finally:
            if not more:
                await self.aclose()

    async def aclose(self) -> None:
        """Close the source. Not while a chunk is being waited for: cancel that first."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        try:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
        finally:
            ended()
