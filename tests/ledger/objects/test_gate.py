"""The two gates alone: which event may enter, and which answer waits for storage."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.ledger.errors import LedgerFailed, StaleEpoch, TailraceError, Unavailable
from tailrace.ledger.objects.gate import Changes, InputGate, OutputGate

pytestmark = pytest.mark.anyio


async def step() -> None:
    """Let every task that can run go on until it waits: gates need at most a few turns."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_input_gate_is_handed_on_in_the_order_of_coming() -> None:
    gate, order = InputGate(), list[int]()

    async def visit(number: int) -> None:
        await gate.enter()
        order.append(number)
        await step()
        gate.leave()

    await asyncio.gather(*(visit(number) for number in range(20)))
    assert order == list(range(20))
    assert gate.waiting == 0


async def test_one_who_leaves_and_comes_back_queues_behind_those_who_wait() -> None:
    gate, order = InputGate(), list[str]()
    await gate.enter()

    async def other() -> None:
        await gate.enter()
        order.append("other")
        gate.leave()

    task = asyncio.create_task(other())
    await step()
    assert gate.waiting == 1
    gate.leave()
    await gate.enter_again()
    order.append("first")
    await task
    assert order == ["other", "first"]


async def test_a_cancelled_turn_goes_to_the_next() -> None:
    gate = InputGate()
    await gate.enter()
    turns = [asyncio.create_task(gate.enter()) for _ in range(3)]
    await step()
    turns[0].cancel()  # while it waits
    gate.leave()
    turns[1].cancel()  # in the same step in which its turn comes
    await asyncio.wait(turns)
    assert [turn.cancelled() for turn in turns] == [True, True, False]
    gate.leave()
    await gate.enter()


async def test_one_who_comes_back_is_cancelled_only_when_inside() -> None:
    gate = InputGate()
    await gate.enter()
    back = asyncio.create_task(gate.enter_again())
    await step()
    back.cancel()
    await step()
    assert not back.done()
    gate.leave()
    with pytest.raises(asyncio.CancelledError):
        await back
    last = asyncio.create_task(gate.enter())
    await step()
    assert not last.done()  # the cancelled one holds the gate until it leaves
    gate.leave()
    await last


class HandStore:
    """A store that stores one write at a time, when the test lets it."""

    def __init__(self) -> None:
        self.writes: list[dict[str, bytes | None]] = []
        self.results: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.stored: list[Changes] = []
        self.failures: list[TailraceError] = []
        self.gate = OutputGate(self._store, self.stored.append, self.failures.append)

    async def _store(self, changes: Changes) -> None:
        self.writes.append(dict(changes.values))
        error = await self.results.get()
        if error is not None:
            raise error

    def put(self, name: str, value: bytes) -> None:
        self.gate.schedule()
        self.gate.forming.put(name, value)


async def test_changes_made_without_waiting_are_one_write_and_those_meanwhile_the_next() -> None:
    store = HandStore()
    store.put("a", b"1")
    store.put("b", b"2")
    first = asyncio.create_task(store.gate.wait())
    await step()
    store.put("a", b"3")
    await step()
    store.put("c", b"4")
    second = asyncio.create_task(store.gate.wait())
    await step()
    assert store.writes == [{"a": b"1", "b": b"2"}]
    store.results.put_nowait(None)
    await first
    assert not second.done()
    store.results.put_nowait(None)
    await second
    assert store.writes[1:] == [{"a": b"3", "c": b"4"}]
    assert [changes.values for changes in store.stored] == store.writes


async def test_nobody_waits_where_nothing_is_pending() -> None:
    store = HandStore()
    await store.gate.wait()
    store.put("a", b"1")
    store.results.put_nowait(None)
    await store.gate.wait()
    await store.gate.wait()
    assert len(store.writes) == 1


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (LedgerFailed("disk full"), LedgerFailed, "ledger_failed"),
        (StaleEpoch("replaced"), Unavailable, "object_reset"),
        (OSError("broken"), Unavailable, "object_reset"),
    ],
)
async def test_a_failed_write_shuts_the_gate_for_all_who_wait_and_come(
    error: Exception, kind: type[TailraceError], code: str
) -> None:
    store = HandStore()
    store.put("a", b"1")
    first = asyncio.create_task(store.gate.wait())
    await step()
    store.put("b", b"2")
    second = asyncio.create_task(store.gate.wait())
    await step()
    store.results.put_nowait(error)
    outcomes = await asyncio.gather(first, second, store.gate.wait(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [kind] * 3
    assert all(isinstance(o, Unavailable) and o.retryable and o.code == code for o in outcomes)
    assert len(store.failures) == 1
    assert store.writes == [{"a": b"1"}]


async def test_a_waiter_that_is_cancelled_takes_nobody_with_it() -> None:
    store = HandStore()
    store.put("a", b"1")
    waits = [asyncio.create_task(store.gate.wait()) for _ in range(2)]
    await step()
    waits[0].cancel()
    store.results.put_nowait(None)
    await waits[1]
    assert waits[0].cancelled()
    assert store.gate.failure is None
