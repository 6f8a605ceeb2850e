"""The SQLite ledger against a model of what a ledger is, in random sequences of calls."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from ledger.errors import Conflict, NotFound, StaleEpoch, WrongIndex
from ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from ledger.interface import Append, NewStream, Record
from ledger.sqlite import SqliteLedger
from ledger.tail import SEGMENT_BYTES

TTL_MS = 1_000


@dataclass
class Modelled:
    """A stream as it should be."""

    epoch: int = 1
    records: list[Record] = field(default_factory=list)
    ended: bool = False
    expires_ms: int = 0


class LedgerMachine(RuleBasedStateMachine):
    streams = Bundle("streams")

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.now = 1_000_000
        self.model: dict[bytes, Modelled] = {}
        self.open()

    def open(self) -> None:
        path = Path(self.folder.name) / "ledger.db"
        self.ledger = self.runner.run(SqliteLedger.open(path, lambda: self.now))

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.runner.run(self.ledger.close())
            self.runner.close()
            self.folder.cleanup()

    @rule(target=streams, durability=st.sampled_from(Durability))
    def create(self, durability: Durability) -> bytes:
        stream = (len(self.model) + 1).to_bytes(16, "big")
        new = NewStream(stream, "{}", durability, TTL_MS / 1000)
        _, created = self.runner.run(self.ledger.create(new))
        assert created
        self.model[stream] = Modelled(expires_ms=self.now + TTL_MS)
        return stream

    @rule(
        stream=streams,
        count=st.integers(1, 5),
        size=st.sampled_from((1, 20, SEGMENT_BYTES // 2, SEGMENT_BYTES)),
        epoch_off=st.sampled_from((0, 0, 0, 0, -1, 1)),
        index_off=st.sampled_from((0, 0, 0, 0, -1, 1)),
        ends=st.sampled_from((False, False, False, True)),
    )
    def append(
        self, stream: bytes, count: int, size: int, epoch_off: int, index_off: int, ends: bool
    ) -> None:
        model = self.model[stream]
        first, epoch = len(model.records) + index_off, model.epoch + epoch_off
        records = [Record(encode(Token("x" * size, max(0, first) + n)), (n,)) for n in range(count)]
        if ends:
            end = StreamEnd(0, FinishReason.STOP, max(0, first) + count, 0)
            records.append(Record(encode(end), ()))
        batch = [Append(stream, epoch, first + n, record) for n, record in enumerate(records)]
        try:
            refused = self.runner.run(self.ledger.append(batch))
        except NotFound:
            assert self.is_gone(stream)
            return
        if model.ended:
            assert {type(r.error) for r in refused} <= {Conflict, StaleEpoch}
            assert len(refused) == len(batch)
        elif epoch_off:
            assert [type(r.error) for r in refused] == [StaleEpoch] * len(batch)
        elif index_off == 1:
            assert [type(r.error) for r in refused] == [WrongIndex] * len(batch)
        elif index_off == -1:  # the first is a double, the rest is what was due
            assert [type(r.error) for r in refused] == [WrongIndex]
            model.records += records[1:]
            model.ended = ends
        else:
            assert refused == []
            model.records += records
            model.ended = ends
        if model.ended:
            model.expires_ms = max(model.expires_ms, self.now + TTL_MS)

    @rule(stream=streams)
    def take_over(self, stream: bytes) -> None:
        try:
            epoch = self.runner.run(self.ledger.take_over(stream))
        except NotFound:
            assert self.is_gone(stream)
            return
        self.model[stream].epoch += 1
        assert epoch == self.model[stream].epoch

    @rule(stream=streams, start=st.integers(0, 12), limit=st.integers(1, 40))
    def read(self, stream: bytes, start: int, limit: int) -> None:
        model = self.model[stream]
        try:
            info = self.runner.run(self.ledger.info(stream))
            records = self.runner.run(self.ledger.read(stream, start, limit))
        except NotFound:
            assert self.is_gone(stream)
            return
        assert records == model.records[start : start + limit]
        assert (info.next_index, info.ended) == (len(model.records), model.ended)
        assert info.epoch == model.epoch
        model.expires_ms = self.now + TTL_MS

    @rule()
    def reopen(self) -> None:
        # A clean stop writes what slid, as a sweep does.
        self.runner.run(self.ledger.expire())
        self.runner.run(self.ledger.close())
        self.open()
        unfinished = self.runner.run(self.ledger.unfinished())
        assert set(unfinished) == {s for s, model in self.model.items() if not model.ended}

    @rule(passed_ms=st.integers(0, TTL_MS))
    def sweep(self, passed_ms: int) -> None:
        self.now += passed_ms
        self.runner.run(self.ledger.expire())

    @rule(stream=consumes(streams))
    def outlive(self, stream: bytes) -> None:
        """Long after its last touch an ended stream is gone, and a running one is not."""
        self.now += 3 * TTL_MS
        self.runner.run(self.ledger.expire())
        if self.model[stream].ended:
            try:
                self.runner.run(self.ledger.info(stream))
            except NotFound:
                return
            raise AssertionError("an ended stream outlived its retention")
        assert not self.runner.run(self.ledger.info(stream)).ended

    def is_gone(self, stream: bytes) -> bool:
        """Whether the model, too, lets this stream have expired."""
        model = self.model[stream]
        return model.ended and self.now >= model.expires_ms


LedgerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLedgerAgainstModel = LedgerMachine.TestCase
