"""An object on a real ledger against a dict, in random sequences of events, over restarts."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tailrace.ledger.objects.object import ObjectRequest
from tailrace.ledger.objects.storage import ObjectStorage
from tests.ledger.next_alarm import next_alarm_ms
from tests.ledger.objects.object_world import START_MS, Scripted, World, world_at

NAMES = st.sampled_from(["a", "ab", "abc", "b", "é", "\uffff", "\U0001f600", "~"])
VALUES = st.binary(max_size=3)
BIG = 40_000  # times a value: more than the cache keeps of four


@dataclass(frozen=True)
class Step:
    """One thing that an event does to its storage."""

    verb: str
    name: str = ""
    value: bytes = b""
    reverse: bool = False
    limit: int | None = None


STEPS = st.lists(
    st.builds(Step, st.sampled_from(["put", "put big"]), NAMES, VALUES)
    | st.builds(Step, st.sampled_from(["delete", "get", "prefix", "from", "until"]), NAMES)
    | st.builds(
        Step,
        st.just("list"),
        reverse=st.booleans(),
        limit=st.none() | st.integers(0, 5),
    )
    | st.sampled_from([Step("sync"), Step("delete_all"), Step("alarm"), Step("no alarm")]),
    max_size=8,
)


@dataclass
class Modelled:
    """An object as it should be."""

    values: dict[str, bytes]
    alarm: int | None = None

    def copy(self) -> Modelled:
        return Modelled(dict(self.values), self.alarm)

    def list(self, step: Step) -> dict[str, bytes]:
        names = sorted(self.values, key=str.encode, reverse=step.reverse)
        return {name: self.values[name] for name in names[: step.limit]}


class Rollback(Exception):
    """Ends a transaction."""


class ObjectMachine(RuleBasedStateMachine):
    """Random operations on objects, compared with a model of them."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.model = Modelled({})
        self.world = self.runner.run(self.open())

    async def open(self) -> World:
        self.stack = AsyncExitStack()
        world = await self.stack.enter_async_context(world_at(Path(self.folder.name)))
        world.scripts["steps"] = self.script
        return world

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.stack.aclose())
            self.runner.close()
            self.folder.cleanup()

    async def script(self, target: Scripted, request: ObjectRequest) -> bytes:
        storage = target.context.storage
        if self.ending is None:
            await self.take(storage)
        else:
            async with storage.transaction():
                await self.take(storage)
                if self.ending is Rollback:
                    raise Rollback
        return b""

    async def take(self, storage: ObjectStorage) -> None:
        for step in self.steps:
            await self.one(storage, step)

    async def one(self, storage: ObjectStorage, step: Step) -> None:
        model = self.model
        match step.verb:
            case "put" | "put big":
                value = step.value * (BIG if step.verb == "put big" else 1)
                storage.put(step.name, value)
                model.values[step.name] = value
            case "delete":
                storage.delete(step.name)
                model.values.pop(step.name, None)
            case "delete_all":
                storage.delete_all()
                model.values.clear()
            case "alarm":
                storage.set_alarm(START_MS + len(model.values))
                model.alarm = START_MS + len(model.values)
            case "no alarm":
                storage.delete_alarm()
                model.alarm = None
            case "sync" if self.ending is None:
                await storage.sync()
            case _:
                await self.read(storage, step)

    async def read(self, storage: ObjectStorage, step: Step) -> None:
        whole, name = self.model.list(step), step.name
        match step.verb:
            case "get":
                assert await storage.get(name) == self.model.values.get(name)
            case "prefix":
                got = await storage.list(prefix=name)
                assert list(got) == [other for other in whole if other.startswith(name)]
            case "from":
                got = await storage.list(start=name)
                assert list(got) == [other for other in whole if other >= name]
            case "until":
                got = await storage.list(end=name)
                assert list(got) == [other for other in whole if other < name]
            case _:
                got = await storage.list(reverse=step.reverse, limit=step.limit)
                assert list(got.items()) == list(whole.items())
        assert storage.get_alarm() == self.model.alarm

    @rule(steps=STEPS, ending=st.sampled_from([None, None, "commit", Rollback]))
    def event(self, steps: list[Step], ending: object) -> None:
        self.steps, self.ending = steps, ending
        before = self.model.copy()
        try:
            self.runner.run(self.world.ask("steps"))
        except Rollback:
            self.model = before
        stored = self.runner.run(self.stored())
        assert stored.alarm == self.model.alarm
        assert stored.values == self.model.values

    async def stored(self) -> Modelled:
        objects = self.world.ledger.objects
        values = await objects.list(self.world.made[-1].context.key)
        return Modelled(values, await next_alarm_ms(objects))

    @rule()
    def evict(self) -> None:
        self.world.clock.now += 60_000
        self.runner.run(self.sweep())
        assert self.world.runtime.resident == 0

    async def sweep(self) -> None:
        alarm, self.model.alarm = self.model.alarm, None
        rung: list[int] = []

        async def ring(target: Scripted, retries: int) -> None:
            rung.append(retries)

        self.world.ring = ring
        await self.world.runtime.wake_due()
        await self.world.runtime.alarms_ended()
        assert rung == ([] if alarm is None else [0])
        self.world.clock.now += 60_000
        await self.world.runtime.wake_due()

    @rule()
    def restart(self) -> None:
        self.runner.run(self.stack.aclose())
        self.world = self.runner.run(self.open())


TestObject = ObjectMachine.TestCase
TestObject.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow],
)
