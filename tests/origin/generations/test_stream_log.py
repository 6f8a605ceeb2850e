"""The log of a stream is read for whoever goes on with it in slices, however many go on at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from tailrace.ledger.frame import Durability, Logged, Notice, Revision, Token, encode
from tailrace.ledger.interface import Append, NewStream, Record
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.generations.stream_log import SLICE_RECORDS, History
from tailrace.origin.workers.worker_frame import StartRun
from tests.origin.stage import RECIPE, Stage

pytestmark = pytest.mark.anyio

STREAMS = 4


class Turns:
    """Counts the turns of the event loop, and the records that are read in each."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self.records: Counter[int] = Counter()
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._ledger_read = ledger.read
        self._handle = self._loop.call_soon(self._count)

    def _count(self) -> None:
        self._turn += 1
        self._handle = self._loop.call_soon(self._count)

    async def read(self, stream: bytes, start: int, limit: int) -> list[Record]:
        records = await self._ledger_read(stream, start, limit)
        self.records[self._turn] += len(records)
        return records

    def stop(self) -> None:
        self._handle.cancel()


@pytest.mark.parametrize("tokens", [8, 3 * SLICE_RECORDS])
async def test_streams_that_are_taken_over_block_the_loop_for_a_slice_of_one_of_them_at_a_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    streams = [bytes([number]) * 16 for number in range(1, STREAMS + 1)]
    for stream in streams:
        await stage.ledger.create(
            NewStream(stream, RECIPE.model_dump_json(), Durability.PROCESS, 60)
        )
        records = [Record(encode(Token("x", at)), (5,)) for at in range(tokens)]
        appends = [Append(stream, 1, at, record) for at, record in enumerate(records)]
        assert await stage.ledger.append(appends) == []
    turns = Turns(stage.ledger)
    monkeypatch.setattr(stage.ledger, "read", turns.read)
    await stage.runs.restore(streams)
    await stage.ready(stage.slots[0])
    turns.stop()
    orders = [order for _, order in stage.slots[0].sent]
    assert len(orders) == STREAMS
    assert all(
        isinstance(order, StartRun) and len(order.generated_ids) == tokens for order in orders
    )
    assert max(turns.records.values()) <= min(tokens, SLICE_RECORDS)


def history_of(frames: Sequence[Logged]) -> History:
    history = History()
    for frame in frames:
        history.add(Record(encode(frame), (frame.index,)))
    return history


def test_a_history_is_what_an_order_needs() -> None:
    notice = Notice("said", "before", 1)
    history = history_of([Token("é", 0), notice, Revision(0, "b", False, 2), Token("c", 3)])
    assert (history.next_index, history.sent_bytes, history.ids) == (4, 3, [0, 1, 2, 3])
    assert (history.text.text, history.notices, history.has_end) == ("bc", [notice], False)
