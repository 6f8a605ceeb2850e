"""The life of a simulated process: its start, its disturbances, and what it must leave."""

from __future__ import annotations

from contextlib import suppress

from tailrace.ledger.errors import LedgerFailed, NotFound
from tailrace.ledger.frame import StreamEnd, tag_of
from tailrace.ledger.interface import Append, StreamKind
from tailrace.ledger.usage import UsageQuery
from tests.ledger.simulation.simulated_engine import Engine
from tests.ledger.simulation.simulated_life import Life
from tests.ledger.simulation.simulated_owner import Owner
from tests.ledger.simulation.simulated_reader import Client
from tests.ledger.simulation.simulated_world import BACK_MS, TTL_MS, Expected, Violation, require


class Process(Life):
    """`live` is its main coroutine: it ends when every stream and every reader is done.

    Before the last one (`calm`) producers are cancelled and usurped, the clock jumps, streams
    expire and are deleted. A `LedgerFailed` from a write ends it too.
    """

    async def live(self) -> None:
        try:
            await self.begin()
            await self._set_going()
            await self.over
        except LedgerFailed:
            if self.storage.failed is None:
                raise
            await self._require_refusal()
            return
        if self.calm:
            await self.ledger.expire()  # and so writes what was relaxed
            self.world.require_whole()
            sums = await self.ledger.usage(UsageQuery())
            require(sums.total == self.world.logged_usage(), "usage is not what the log holds")
            await self._require_clean()

    async def _set_going(self) -> None:
        """Compare what the ledger has found with what the disk holds, then start everybody."""
        frames = self.world.disk.frames
        rows = self.world.disk.tables.streams.values()
        rest = {row.id for row in rows if row.kind == StreamKind.GENERATION}
        for expected in self.world.streams:
            if expected.id is not None and expected.id not in rest:
                self.world.gone(expected)
        unfinished = await self.ledger.unfinished()
        ended = {s for s, some in frames.items() if some and tag_of(some[-1]) == StreamEnd.tag}
        require(set(unfinished) == rest - ended, "unfinished streams were not all found")
        waiting = [e for e in self.world.streams if e.id is None or e.id in unfinished]
        for share in self._in_two_hands(waiting):
            self.spawn(Engine(self).produce(share))
        for reader in self.world.readers:
            if not reader.done:
                self.spawn(Client(self, reader).read())
        for _ in range(self.random.choice((0, 0, 1, 2))):
            self.spawn(Owner(self).count())
        if not self.calm:
            self.spawn(self.sweep())
            self.spawn(self.trouble())
        self.spawn(self.pause())  # so that something is running

    def _in_two_hands(self, streams: list[Expected]) -> list[list[Expected]]:
        hands: list[list[Expected]] = [[], []]
        for expected in streams:
            self.random.choice(hands).append(expected)
        return [share for share in hands if share]

    async def _require_refusal(self) -> None:
        """After a failed write nothing is taken any more."""
        stream = next((e for e in self.world.streams if e.id is not None), None)
        if stream is None or stream.id is None:
            return
        with suppress(LedgerFailed, NotFound):
            await self.ledger.append([Append(stream.id, 1, 0, stream.record(1, 0, 0))])
            raise Violation("a ledger took an append after a write had failed")

    async def _require_clean(self) -> None:
        """Long after the last touch nothing is left of anything."""
        for _ in self.world.streams:  # an end may wait for its segment: one goes with each commit
            self.world.jump(3 * TTL_MS)
            await self.ledger.expire()
        tables = self.world.disk.tables
        counter = self.world.counter.stream(self.world.stored_counter()[1])
        rest = {row.sid for row in tables.streams.values() if row.id != counter}
        require(not rest, "an ended stream did not expire")
        require(
            set(tables.segments) <= set(tables.streams), "segments of a removed stream are left"
        )

    # ---- trouble ----

    async def trouble(self) -> None:
        """Take streams over while their producers append, and cancel or delete some."""
        for _ in range(self.random.randint(0, 4)):
            await self.pause(3)
            expected = self.random.choice(self.world.streams)
            if expected.id is None:
                continue
            if self.random.random() < 0.1:
                await self._delete(expected)
                continue
            usurper = self.spawn(Engine(self).produce([expected]))
            if self.random.random() < 0.3:
                await self.pause(2)
                usurper.cancel()
                self.spawn(Engine(self).produce([expected]))

    async def _delete(self, expected: Expected) -> None:
        assert expected.id is not None
        expected.deleted = True
        with suppress(NotFound):
            await self.ledger.delete(expected.id)
            await self.ledger.info(expected.id)
            raise Violation("a stream outlives its deletion")

    async def sweep(self) -> None:
        for _ in range(self.random.randint(0, 4)):
            await self.pause(4)
            self.world.jump(self.random.choice((-BACK_MS, 0, TTL_MS // 2, TTL_MS, 3 * TTL_MS)))
            await self.ledger.expire()
