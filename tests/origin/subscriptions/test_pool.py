"""Limits on deliveries: in all, to one host, and to hosts that do not answer."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.origin.subscriptions.webhook import (
    FAILURES,
    FIRST_PAUSE_S,
    MAX_DELIVERIES_PER_HOST,
    MAX_PAUSE_S,
    Host,
    HostPool,
    Resting,
)
from tests.ledger.objects.object_world import step

pytestmark = pytest.mark.anyio


def test_a_host_that_fails_a_few_times_is_left_alone_and_then_tried_once() -> None:
    host = Host()
    for _ in range(FAILURES - 1):
        host.ended(answered=False, now=100)
    assert host.breaker.allows(100)
    host.ended(answered=False, now=100)
    assert not host.breaker.allows(100 + FIRST_PAUSE_S - 0.001)
    assert host.breaker.allows(100 + 2 * FIRST_PAUSE_S)
    assert (Host().most, host.most) == (MAX_DELIVERIES_PER_HOST, 1)


@given(st.lists(st.booleans()))
def test_an_answer_makes_all_good_and_a_pause_has_an_end(answers: list[bool]) -> None:
    host = Host()
    for answered in answers:
        host.ended(answered=answered, now=0)
    assert host.breaker.allows(MAX_PAUSE_S)
    host.ended(answered=True, now=0)
    assert (host.breaker.state, host.breaker.failures) == (CircuitState.CLOSED, 0)


class Deliveries:
    """Deliveries that last until the test ends them."""

    def __init__(self, size: int = 8) -> None:
        self.now = 0
        self.pool = HostPool(lambda: self.now, size)
        self.running: list[tuple[str, asyncio.Future[bool]]] = []

    async def deliver(self, host: str) -> bool:
        async with self.pool.slot(host) as slot:
            end = asyncio.get_running_loop().create_future()
            self.running.append((host, end))
            try:
                slot.answered = await end
            finally:
                self.running.remove((host, end))
            return slot.answered

    async def begin(self, host: str, count: int = 1) -> list[asyncio.Task[bool]]:
        tasks = [asyncio.create_task(self.deliver(host)) for _ in range(count)]
        await step()
        return tasks

    async def end(self, host: str, *, answered: bool) -> None:
        """All that are under way to the host."""
        for _, end in [run for run in self.running if run[0] == host]:
            end.set_result(answered)
        await step()

    def under_way(self, host: str) -> int:
        return sum(name == host for name, _ in self.running)


async def test_a_host_that_hangs_takes_no_place_of_the_others() -> None:
    deliveries = Deliveries()
    hanging = await deliveries.begin("slow", 300)
    assert deliveries.under_way("slow") == MAX_DELIVERIES_PER_HOST
    [quick] = await deliveries.begin("quick")
    assert deliveries.under_way("quick") == 1
    await deliveries.end("quick", answered=True)
    assert await quick
    # Once it has failed a few times, the rest is not even tried.
    while deliveries.under_way("slow"):
        await deliveries.end("slow", answered=False)
    rest = await asyncio.gather(*hanging, return_exceptions=True)
    tried = sum(not isinstance(outcome, Resting) for outcome in rest)
    assert tried < MAX_DELIVERIES_PER_HOST + FAILURES
    with pytest.raises(Resting):
        await deliveries.deliver("slow")


async def test_hosts_that_failed_have_half_of_the_places_and_come_last() -> None:
    deliveries = Deliveries(size=4)
    names = [f"bad-{n}" for n in range(6)]
    for name in names:
        failed = await deliveries.begin(name)
        await deliveries.end(name, answered=False)
        assert not await failed[0]
    again = [task for name in names for task in await deliveries.begin(name)]
    assert len(deliveries.running) == 2
    good = [task for n in range(3) for task in await deliveries.begin(f"good-{n}")]
    assert [name for name, _ in deliveries.running][2:] == ["good-0", "good-1"]
    await deliveries.end("bad-0", answered=False)
    assert deliveries.under_way("good-2") == 1, "it came later, and its host has not failed"
    for task in again + good:
        task.cancel()
    await asyncio.wait(again + good)


async def test_a_host_on_trial_has_one_delivery_and_an_answer_frees_it() -> None:
    deliveries = Deliveries()
    await deliveries.begin("a", FAILURES)
    await deliveries.end("a", answered=False)
    deliveries.now = round(2000 * FIRST_PAUSE_S)
    await deliveries.begin("a", 3)
    assert deliveries.under_way("a") == 1
    await deliveries.end("a", answered=True)
    assert deliveries.under_way("a") == 2
    await deliveries.end("a", answered=True)


async def test_who_is_cancelled_leaves_its_place_to_the_next() -> None:
    deliveries = Deliveries(size=1)
    first, second, third = [(await deliveries.begin(host))[0] for host in "abc"]
    second.cancel()  # while it waits
    first.cancel()
    await asyncio.wait([first, second])
    await step()
    assert deliveries.under_way("c") == 1
    # In the very step in which its turn comes.
    fourth = (await deliveries.begin("d"))[0]
    third.cancel()
    await asyncio.sleep(0)
    fourth.cancel()
    await asyncio.wait([third, fourth])
    assert (await deliveries.begin("e")) and deliveries.under_way("e") == 1
    await deliveries.end("e", answered=True)
