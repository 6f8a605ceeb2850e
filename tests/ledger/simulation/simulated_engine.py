"""Engines of the simulation: they create streams, take them over and append to them."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.ledger.errors import LedgerFailed, NotFound, StaleEpoch
from tailrace.ledger.frame import StreamEnd, tag_of
from tailrace.ledger.interface import Append, Refusal
from tests.ledger.simulation.simulated_life import Life
from tests.ledger.simulation.simulated_world import Expected, require

READ_RECORDS = 3
"""Records that a new producer reads at a time."""


@dataclass(slots=True)
class Run:
    """A stream in the hands of a producer."""

    expected: Expected
    epoch: int
    next: int


class Engine:
    """A producer of several streams."""

    def __init__(self, life: Life) -> None:
        self._life = life

    async def produce(self, share: list[Expected]) -> None:
        """Run an engine: claim its streams, then append to all of them at each step."""
        runs: dict[bytes, Run] = {}
        for expected in share:
            run = await self._claim(expected)
            if run is not None:
                assert expected.id is not None
                runs[expected.id] = run
        while runs:
            await self._life.pause()
            batch = [append for run in runs.values() for append in self._step(run)]
            for append in batch:
                self._life.world.offer(append)
            refused = await self._life.ledger.append(batch)
            for append in batch:
                if all(append != refusal.append for refusal in refused):
                    self._life.world.acknowledge(append)
            for refusal in refused:
                self._judge(refusal, runs.pop(refusal.append.stream, None))
            for stream in [s for s, run in runs.items() if run.next > run.expected.tokens]:
                del runs[stream]

    def _judge(self, refusal: Refusal, run: Run | None) -> None:
        """Check that a refused producer was fenced, or that its stream has gone."""
        error = refusal.error
        if run is None:
            return  # the run was refused before, in the same batch
        if isinstance(error, NotFound):
            self._life.world.gone(run.expected)
            return
        require(isinstance(error, StaleEpoch), f"an append was refused: {error!r}")
        require(run.expected.claims > 0, "a producer was fenced by nobody")

    def _step(self, run: Run) -> list[Append]:
        stream, appends = run.expected.id, []
        assert stream is not None
        for _ in range(self._life.random.choice((0, 1, 1, 1, 3))):
            if run.next <= run.expected.tokens:
                pad = self._life.random.choice((0, 5, 40))
                record = run.expected.record(run.epoch, run.next, pad)
                appends.append(Append(stream, run.epoch, run.next, record))
                run.next += 1
        return appends

    async def _claim(self, expected: Expected) -> Run | None:
        """Create a stream, or take it over and read what there is; None if it has ended."""
        if expected.id is None and await self._create(expected):
            return Run(expected, 1, 0)
        assert expected.id is not None
        expected.claims += 1
        try:
            epoch = await self._life.ledger.take_over(expected.id)
            released = (await self._life.ledger.info(expected.id)).next_index
            self._life.world.claimed(expected, epoch, released)
            await self._life.pause()
            return await self._continue(expected, epoch)
        except NotFound:
            self._life.world.gone(expected)
            return None

    async def _continue(self, expected: Expected, epoch: int) -> Run | None:
        assert expected.id is not None
        index, last = 0, b""
        while records := await self._records(expected.id, index):
            index, last = index + len(records), records[-1]
        if last and tag_of(last) == StreamEnd.tag:
            return None
        return Run(expected, epoch, index)

    async def _records(self, stream: bytes, index: int) -> list[bytes]:
        while True:
            try:
                return [r.frame for r in await self._life.ledger.read(stream, index, READ_RECORDS)]
            except LedgerFailed:
                if self._life.calm or self._life.storage.failed is not None:
                    raise
                await self._life.pause()  # a read may fail and succeed again

    async def _create(self, expected: Expected) -> bool:
        """Open it, perhaps twice at once with one key, perhaps once in vain."""
        if self._life.random.random() < 0.3:
            other = self._life.spawn(self._create_again(expected))
            if self._life.random.random() < 0.5:
                self._life.loop.call_later(self._life.random.random(), other.cancel)
        info, created = await self._life.ledger.create(expected.new(self._life.world.number()))
        self._life.world.created(expected, info.stream)
        return created

    async def _create_again(self, expected: Expected) -> None:
        try:
            info, _ = await self._life.ledger.create(expected.new(self._life.world.number()))
            self._life.world.created(expected, info.stream)
        except NotFound:
            self._life.world.gone(expected)  # while it waited for the commit of the first one
