"""Alarms: when they ring, how they are tried again, and what they survive."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.interface import Alarm, ObjectKey, ObjectWrite
from tailrace.ledger.objects.object import ObjectLimits, ObjectRequest, RetryPolicy
from tailrace.ledger.objects.runtime import MAX_ALARMS_AT_ONCE, POLL_MS, LoopTimer, ObjectRuntime
from tailrace.ledger.objects.storage import ObjectStorage
from tests.ledger.next_alarm import next_alarm_ms
from tests.ledger.objects.object_world import (
    KEY,
    START_MS,
    Scripted,
    World,
    crashed,
    step,
    world_at,
)

pytestmark = pytest.mark.anyio


class Rings:
    """An object that notes its alarms, and fails as often as the test wants."""

    def __init__(self, world: World, failures: int = 0) -> None:
        self.world = world
        self.failures = failures
        self.noted: list[tuple[int, int, str]] = []  # ms since START_MS, retries, name
        world.ring = self.ring

    async def ring(self, target: Scripted, retries: int) -> None:
        assert target.context.storage.get_alarm() is None  # a running alarm counts as deleted
        at_ms = self.world.clock.now - START_MS
        self.noted.append((at_ms, retries, target.context.key.name))
        if self.failures > 0:
            self.failures -= 1
            raise ValueError("no luck")


async def set_alarm(target: Scripted, request: ObjectRequest) -> bytes:
    target.context.storage.set_alarm(int(request.body))
    return b""


async def get_alarm(target: Scripted, request: ObjectRequest) -> bytes:
    return str(target.context.storage.get_alarm()).encode()


async def delete_alarm(target: Scripted, request: ObjectRequest) -> bytes:
    target.context.storage.delete_alarm()
    return b""


SCRIPTS = {"set": set_alarm, "get": get_alarm, "delete": delete_alarm}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path / "data", dict(SCRIPTS)) as world:
        yield world


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


async def ring_until_quiet(world: World) -> None:
    """Ring what is due and move the clock to what is next, until nothing is."""
    while True:
        await world.runtime.wake_due()
        await world.runtime.alarms_ended()
        next_ms = await next_alarm_ms(world.ledger.objects)
        if next_ms is None:
            return
        world.clock.now = max(world.clock.now, next_ms)


def at(after_ms: int) -> bytes:
    return str(START_MS + after_ms).encode()


async def test_alarms_ring_at_their_times_in_their_order(world: World) -> None:
    rings = Rings(world)
    for name, after_ms in (("c", 300), ("a", 100), ("b", 200), ("late", -5)):
        await world.ask("set", at(after_ms), of=ObjectKey("thing", name))
    await ring_until_quiet(world)
    assert rings.noted == [(0, 0, "late"), (100, 0, "a"), (200, 0, "b"), (300, 0, "c")]


async def test_an_alarm_that_was_replaced_or_deleted_does_not_ring(world: World) -> None:
    rings = Rings(world)
    await world.ask("set", at(100))
    await world.ask("set", at(500))
    assert await world.ask("get") == at(500)
    await world.ask("set", at(100), of=ObjectKey("thing", "other"))
    await world.ask("delete", of=ObjectKey("thing", "other"))
    await ring_until_quiet(world)
    assert rings.noted == [(500, 0, "one")]
    assert await world.ask("get") == b"None"


async def test_a_failed_alarm_is_tried_again_after_2_4_8_16_32_64_s_and_then_dropped(
    world: World,
) -> None:
    rings = Rings(world, failures=100)
    await world.ask("set", at(0))
    await ring_until_quiet(world)
    moments, now = [0], 0
    for delay in (2_000, 4_000, 8_000, 16_000, 32_000, 64_000):
        now += delay
        moments.append(now)
    assert rings.noted == [(moment, retries, "one") for retries, moment in enumerate(moments)]
    assert await world.ask("get") == b"None"


async def test_an_alarm_that_succeeds_at_last_starts_counting_anew(world: World) -> None:
    rings = Rings(world, failures=2)
    await world.ask("set", at(0))
    await ring_until_quiet(world)
    assert [retries for _, retries, _ in rings.noted] == [0, 1, 2]
    rings.failures = 1
    await world.ask("set", at(10_000))
    await ring_until_quiet(world)
    assert rings.noted[3:] == [(10_000, 0, "one"), (12_000, 1, "one")]


@given(retries=st.integers(0, 20), now_ms=st.integers(0, 2**50), most=st.integers(0, 12))
def test_the_policy_doubles_each_time_and_ends(retries: int, now_ms: int, most: int) -> None:
    again = RetryPolicy(most=most).after(Alarm(0, retries), now_ms)
    expected = Alarm(now_ms + 2_000 * 2**retries, retries + 1)
    assert again == (None if retries >= most else expected)


async def test_an_alarm_set_by_the_handler_takes_the_place_of_the_running_one(
    world: World,
) -> None:
    moments: list[int] = []

    async def ring(target: Scripted, retries: int) -> None:
        moments.append(world.clock.now - START_MS)
        if len(moments) < 4:
            target.context.storage.set_alarm(world.clock.now + 100)
        if len(moments) == 2:
            raise ValueError("not retried: another alarm is set")

    world.ring = ring
    await world.ask("set", at(0))
    await ring_until_quiet(world)
    assert moments == [0, 100, 200, 300]


async def test_an_alarm_set_in_a_transaction_that_is_rolled_back_replaces_nothing(
    world: World,
) -> None:
    moments: list[int] = []

    async def fail(storage: ObjectStorage) -> None:
        async with storage.transaction():
            storage.set_alarm(world.clock.now + 100)
            raise ValueError("back")

    async def ring(target: Scripted, retries: int) -> None:
        moments.append(world.clock.now - START_MS)
        with pytest.raises(ValueError, match="back"):
            await fail(target.context.storage)
        assert target.context.storage.get_alarm() is None

    world.ring = ring
    await world.ask("set", at(0))
    await ring_until_quiet(world)
    assert moments == [0]


async def test_a_running_alarm_cannot_be_deleted_but_one_set_since_can(world: World) -> None:
    moments: list[int] = []

    async def ring(target: Scripted, retries: int) -> None:
        moments.append(world.clock.now - START_MS)
        target.context.storage.delete_alarm()
        if retries == 0:
            raise ValueError("tried again all the same")
        target.context.storage.set_alarm(world.clock.now + 100)
        target.context.storage.delete_alarm()

    world.ring = ring
    await world.ask("set", at(0))
    await ring_until_quiet(world)
    assert moments == [0, 2_000]


async def test_an_alarm_waits_for_the_input_gate_and_lets_nobody_in(world: World) -> None:
    trace: list[str] = []

    async def ring(target: Scripted, retries: int) -> None:
        trace.append("ring")
        await target.context.storage.get("not in the cache")
        trace.append("rung")

    async def visit(target: Scripted, request: ObjectRequest) -> bytes:
        trace.append("visit")
        await target.context.storage.get(request.body.decode())
        trace.append("visited")
        return b""

    world.ring, world.scripts["visit"] = ring, visit
    await world.ask("set", at(0))
    before = world.asking("visit", b"before")
    await asyncio.sleep(0)
    await world.runtime.wake_due()
    after = world.asking("visit", b"after")
    await asyncio.gather(before, after)
    assert trace == ["visit", "visited", "ring", "rung", "visit", "visited"]


async def test_a_request_may_set_an_alarm_while_the_handler_is_outside(world: World) -> None:
    begun, signal = asyncio.Event(), asyncio.Event()
    moments: list[int] = []

    async def ring(target: Scripted, retries: int) -> None:
        moments.append(world.clock.now - START_MS)
        begun.set()
        await target.context.outside(signal.wait())

    world.ring = ring
    await world.ask("set", at(0))
    await world.runtime.wake_due()
    await begun.wait()
    assert await world.ask("get") == b"None"
    await world.ask("set", at(1_000))
    signal.set()
    await world.runtime.alarms_ended()
    assert await world.ask("get") == at(1_000)
    await ring_until_quiet(world)
    assert moments == [0, 1_000]


async def test_alarms_survive_a_restart_with_their_retries(folder: Path, tmp_path: Path) -> None:
    async with world_at(folder, dict(SCRIPTS)) as world:
        rings = Rings(world, failures=1)
        await world.ask("set", at(0))
        await world.ask("set", at(900), of=ObjectKey("thing", "other"))
        await world.runtime.wake_due()
        await world.runtime.alarms_ended()
        assert rings.noted == [(0, 0, "one")]
        left = crashed(folder, tmp_path / "left")
    async with world_at(left, dict(SCRIPTS)) as world:
        rings = Rings(world)
        await ring_until_quiet(world)
        assert rings.noted == [(900, 0, "other"), (2_000, 1, "one")]


async def test_an_alarm_whose_process_dies_before_it_ends_rings_again(
    folder: Path, tmp_path: Path
) -> None:
    async def ring(target: Scripted, retries: int) -> None:
        target.context.storage.put("half", b"done")
        await target.context.storage.sync()
        crashed(folder, tmp_path / "left")

    async with world_at(folder, dict(SCRIPTS)) as world:
        world.ring = ring
        await world.ask("set", at(0))
        await ring_until_quiet(world)
    async with world_at(tmp_path / "left", dict(SCRIPTS)) as world:
        rings = Rings(world)
        assert await world.ledger.objects.get(KEY, ["half"]) == {"half": b"done"}
        await ring_until_quiet(world)
        assert rings.noted == [(0, 0, "one")]


async def test_an_alarm_that_ends_with_the_runtime_rings_again(
    folder: Path, tmp_path: Path
) -> None:
    async def ring(target: Scripted, retries: int) -> None:
        await target.context.outside(asyncio.Event().wait())

    async with world_at(folder, dict(SCRIPTS)) as world:
        world.ring = ring
        await world.ask("set", at(0))
        await world.runtime.wake_due()
        await asyncio.sleep(0)
    async with world_at(folder, dict(SCRIPTS)) as world:
        rings = Rings(world)
        await ring_until_quiet(world)
        assert rings.noted == [(0, 0, "one")]


async def test_an_alarm_of_an_object_that_cannot_write_is_held_back_more_and_more(
    world: World,
) -> None:
    rings = Rings(world)
    await world.ask("set", at(0))
    world.store.failure = LedgerFailed("disk full")
    again = []
    for _ in range(4):
        await world.runtime.wake_due()
        await world.runtime.alarms_ended()
        again.append(await world.runtime.wake_due() - world.clock.now)
        world.clock.now += 2_000 << len(again) - 1
    assert again == [2_000, 4_000, POLL_MS, POLL_MS]  # 8 s and 16 s: it is looked at before
    world.store.failure = None
    await ring_until_quiet(world)
    assert [moment for moment, _, _ in rings.noted] == [0, 2_000, 6_000, 14_000, 30_000]


async def test_no_more_handlers_run_at_once_than_the_limit(world: World) -> None:
    signal, running = asyncio.Event(), list[str]()

    async def ring(target: Scripted, retries: int) -> None:
        running.append(target.context.key.name)
        await target.context.outside(signal.wait())

    world.ring = ring
    names = [f"{number:03}" for number in range(MAX_ALARMS_AT_ONCE + 10)]
    for name in names:
        await world.ask("set", at(-1000 + int(name)), of=ObjectKey("thing", name))
    for _ in range(3):
        await world.runtime.wake_due()
    await step()
    assert running == names[:MAX_ALARMS_AT_ONCE]
    signal.set()
    await ring_until_quiet(world)
    assert running == names


async def test_handlers_of_a_class_that_waits_for_others_take_no_places_from_the_rest(
    world: World,
) -> None:
    signal, running = asyncio.Event(), Counter[str]()

    async def ring(target: Scripted, retries: int) -> None:
        running[target.context.key.kind] += 1
        await target.context.outside(signal.wait())

    world.ring = ring
    world.runtime = ObjectRuntime(
        world.ledger,
        {"thing": world.make, "slow": world.make},
        world.clock.now_ms,
        bytes,
        limits=ObjectLimits(alarms_at_once={"slow": 100}),
        timer=world.clock,
    )
    for number in range(110):
        await world.ask("set", at(-1000 + number), of=ObjectKey("slow", str(number)))
    for number in range(MAX_ALARMS_AT_ONCE + 10):
        await world.ask("set", at(0), of=ObjectKey("thing", str(number)))
    for _ in range(3):
        await world.runtime.wake_due()
    await step()
    assert running == {"slow": 100, "thing": MAX_ALARMS_AT_ONCE}
    signal.set()
    await ring_until_quiet(world)
    assert running == {"slow": 110, "thing": MAX_ALARMS_AT_ONCE + 10}


async def test_a_handler_that_is_outside_is_not_started_twice(world: World) -> None:
    signal, moments = asyncio.Event(), list[int]()

    async def ring(target: Scripted, retries: int) -> None:
        moments.append(world.clock.now - START_MS)
        await target.context.outside(signal.wait())

    world.ring = ring
    await world.ask("set", at(0))
    for _ in range(3):
        await world.runtime.wake_due()
        await step()
        world.clock.now += 1_000
    assert moments == [0]
    signal.set()
    await ring_until_quiet(world)
    assert moments == [0]


async def test_alarms_that_are_held_back_do_not_hold_others_back(world: World) -> None:
    rings = Rings(world)
    for number in range(MAX_ALARMS_AT_ONCE):
        await world.ask("set", at(0), of=ObjectKey("thing", str(number)))
    await world.ask("set", at(10))
    world.store.failure = LedgerFailed("disk full")
    await world.runtime.wake_due()
    await world.runtime.alarms_ended()
    world.store.failure = None
    world.clock.now += 10
    await world.runtime.wake_due()
    await world.runtime.alarms_ended()
    assert rings.noted[MAX_ALARMS_AT_ONCE:] == [(10, 0, "one")]


async def test_an_alarm_of_a_class_that_is_no_more_stops_nobody(folder: Path, world: World) -> None:
    rings = Rings(world)
    await world.ask("set", at(0), of=ObjectKey("thing", "old"))
    state = await world.ledger.objects.claim(ObjectKey("gone", "x"))
    await world.ledger.objects.write(
        ObjectWrite(ObjectKey("gone", "x"), state.epoch, alarm=Alarm(0), sets_alarm=True)
    )
    await world.runtime.wake_due()
    await world.runtime.alarms_ended()
    assert rings.noted == [(0, 0, "old")]
    assert await world.runtime.wake_due() == START_MS + 2_000


# ---- the loop ----


async def test_the_loop_sleeps_until_the_next_alarm_and_an_earlier_one_wakes_it(
    world: World,
) -> None:
    rung = asyncio.Event()

    async def ring(target: Scripted, retries: int) -> None:
        rung.set()

    world.ring = ring
    loop = asyncio.create_task(world.runtime.run())
    assert await world.clock.parks.get() == START_MS + POLL_MS
    await world.ask("set", at(4_000))
    assert await world.clock.parks.get() == START_MS + 4_000
    await world.ask("set", at(1_000))
    assert await world.clock.parks.get() == START_MS + 1_000
    assert not rung.is_set()
    world.clock.move_to(START_MS + 1_000)
    await rung.wait()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


async def test_the_timer_of_the_event_loop_ends_at_its_time_or_when_woken() -> None:
    timer, wake = LoopTimer(lambda: 1_000), asyncio.Event()
    await timer.wait(wake, 500)
    waiting = asyncio.create_task(timer.wait(wake, 10_000_000))
    await asyncio.sleep(0)
    wake.set()
    await waiting
