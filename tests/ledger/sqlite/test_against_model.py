"""The SQLite ledger against a model of what a ledger is, in random sequences of calls."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from ledger.errors import TailraceError
from ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from ledger.interface import Alarm, Append, NewStream, ObjectKey, ObjectWrite, Record, StreamKind
from ledger.sqlite.ledger import SqliteLedger
from ledger.sqlite.tail import SEGMENT_BYTES
from tests.ledger.sqlite.model import Model

T = TypeVar("T")

TTL_MS = 1_000
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where a sync costs nothing: what the disk does is the subject of other tests."""
DURABILITY = st.sampled_from(Durability)
SIZES = st.sampled_from((1, 20, SEGMENT_BYTES // 2, SEGMENT_BYTES))
MOSTLY_NONE = st.sampled_from((0, 0, 0, 0, -1, 1))
KEYS = st.builds(ObjectKey, st.sampled_from("ab"), st.sampled_from(("x", "y", "ÿ", "𐀀")))
NAMES = st.text("aé￿𐀀", max_size=2)
VALUES = st.dictionaries(NAMES, st.binary(max_size=3), max_size=3)


def records(first: int, count: int, size: int, *, ends: bool) -> list[Record]:
    made = [Record(encode(Token("x" * size, first + n)), (n,)) for n in range(count)]
    if ends:
        end = StreamEnd(0, FinishReason.STOP, first + count, 0)
        made.append(Record(encode(end), ()))
    return made


class LedgerMachine(RuleBasedStateMachine):
    streams = Bundle("streams")
    object_streams = Bundle("object_streams")

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.runner = asyncio.Runner()
        self.model = Model()
        self.number = 0
        self.path = Path(self.folder.name) / "ledger.db"
        self.open()

    def open(self) -> None:
        self.ledger = self.runner.run(SqliteLedger.open(self.path, lambda: self.model.now))

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.runner.run(self.ledger.close())
            self.runner.close()
            self.folder.cleanup()

    def real(self, work: Awaitable[T]) -> T | type[TailraceError]:
        """What it gives or raises, when all that it has written is committed."""

        async def run() -> T:
            result = await work
            await asyncio.sleep(0)  # a relaxed write is committed at the end of the turn
            return result

        try:
            return self.runner.run(run())
        except TailraceError as error:
            return type(error)

    def modelled(self, call: Callable[[], T]) -> T | type[TailraceError]:
        try:
            return call()
        except TailraceError as error:
            return type(error)

    # ---- streams ----

    @rule(target=streams, durability=DURABILITY, key=st.sampled_from((None, "one", "two")))
    def create(self, durability: Durability, key: str | None) -> bytes:
        self.number += 1
        stream = self.number.to_bytes(16, "big")
        new = NewStream(stream, "{}", durability, TTL_MS / 1000, key)
        assert self.real(self.ledger.create(new)) == self.modelled(lambda: self.model.create(new))
        return stream

    @rule(
        stream=streams,
        count=st.integers(1, 5),
        size=SIZES,
        epoch_off=MOSTLY_NONE,
        index_off=MOSTLY_NONE,
        ends=st.sampled_from((False, False, False, True)),
    )
    def append(
        self, stream: bytes, count: int, size: int, epoch_off: int, index_off: int, ends: bool
    ) -> None:
        batch = self.batch(stream, count, size, epoch_off, index_off, ends)
        refused = self.runner.run(self.ledger.append(batch))
        self.runner.run(asyncio.sleep(0))
        assert [(r.append, type(r.error)) for r in refused] == self.model.append(batch)

    def batch(
        self, stream: bytes, count: int, size: int, epoch_off: int, index_off: int, ends: bool
    ) -> list[Append]:
        known = self.model.streams.get(stream)
        first = max(0, (len(known.records) if known else 0) + index_off)
        epoch = (known.epoch if known else 1) + epoch_off
        made = records(first, count, size, ends=ends)
        return [Append(stream, epoch, first + n, record) for n, record in enumerate(made)]

    @rule(stream=streams)
    def take_over(self, stream: bytes) -> None:
        found = self.real(self.ledger.take_over(stream))
        assert found == self.modelled(lambda: self.model.take_over(stream))

    @rule(stream=streams | object_streams, start=st.integers(0, 12), limit=st.integers(1, 40))
    def read(self, stream: bytes, start: int, limit: int) -> None:
        held = self.real(self.ledger.read(stream, start, limit))
        assert held == self.modelled(lambda: self.model.read(stream, start, limit))
        if isinstance(held, list):
            frames = self.runner.run(self.ledger.frames(stream, start, limit))
            assert frames == [record.frame for record in held]

    @rule(stream=streams | object_streams)
    def info(self, stream: bytes) -> None:
        found = self.real(self.ledger.info(stream))
        assert found == self.modelled(lambda: self.model.info(stream))

    @rule(stream=streams)
    def delete(self, stream: bytes) -> None:
        found = self.real(self.ledger.delete(stream))
        assert found == self.modelled(lambda: self.model.delete(stream))

    @rule(passed_ms=st.integers(0, 2 * TTL_MS))
    def sweep(self, passed_ms: int) -> None:
        self.model.now += passed_ms
        assert self.runner.run(self.ledger.expire()) == self.model.expire()

    # ---- ends of the process ----

    @rule()
    def stop_and_start(self) -> None:
        self.runner.run(self.ledger.close())
        self.reopen()

    @rule()
    def kill_and_start(self) -> None:
        """What SIGKILL leaves is a copy of the files as they are."""
        copy = Path(tempfile.mkdtemp(dir=self.folder.name)) / "ledger.db"
        for suffix in ("", "-wal"):
            shutil.copy(f"{self.path}{suffix}", f"{copy}{suffix}")
        self.runner.run(self.ledger.close())
        self.path = copy
        self.reopen()

    def reopen(self) -> None:
        self.model.reopen()
        self.open()

    # ---- objects ----

    @rule(key=KEYS)
    def claim(self, key: ObjectKey) -> None:
        state = self.runner.run(self.ledger.objects.claim(key))
        assert state.epoch > self.model.objects.epochs.get(key, 0)
        assert state.alarm == self.model.objects.alarms.get(key)
        self.model.objects.epochs[key] = state.epoch

    @rule(
        key=KEYS,
        puts=VALUES,
        deletes=st.lists(NAMES, max_size=2),
        clear=st.booleans(),
        alarm=st.none() | st.builds(Alarm, st.integers(0, 10), st.integers(0, 6)),
        sets_alarm=st.booleans(),
        durability=DURABILITY,
        epoch_off=MOSTLY_NONE,
    )
    def write(
        self,
        key: ObjectKey,
        puts: dict[str, bytes],
        deletes: list[str],
        clear: bool,
        alarm: Alarm | None,
        sets_alarm: bool,
        durability: Durability,
        epoch_off: int,
    ) -> None:
        epoch = self.model.objects.epochs.get(key, 0) + epoch_off
        self.write_to_both(
            ObjectWrite(key, epoch, puts, deletes, clear, alarm, sets_alarm, durability=durability)
        )

    @rule(
        target=object_streams, key=KEYS, puts=VALUES, durability=DURABILITY, count=st.integers(0, 3)
    )
    def write_a_new_stream(
        self, key: ObjectKey, puts: dict[str, bytes], durability: Durability, count: int
    ) -> bytes:
        self.number += 1
        stream = self.number.to_bytes(16, "big")
        epoch = self.model.objects.epochs.get(key, 0)
        new = NewStream(stream, "", durability, 0.0, kind=StreamKind.OBJECT)
        made = records(0, count, 20, ends=False)
        appends = [Append(stream, 1, index, record) for index, record in enumerate(made)]
        self.write_to_both(ObjectWrite(key, epoch, puts, creates=[new], appends=appends))
        return stream

    @rule(
        key=KEYS,
        puts=VALUES,
        stream=object_streams,
        count=st.integers(0, 3),
        size=SIZES,
        index_off=MOSTLY_NONE,
        ends=st.sampled_from((False, False, False, True)),
        drops=st.sampled_from((False, False, True)),
    )
    def write_to_a_stream(
        self,
        key: ObjectKey,
        puts: dict[str, bytes],
        stream: bytes,
        count: int,
        size: int,
        index_off: int,
        ends: bool,
        drops: bool,
    ) -> None:
        epoch = self.model.objects.epochs.get(key, 0)
        appends = self.batch(stream, count, size, 0, index_off, ends)
        dropped = [stream] if drops else []
        self.write_to_both(ObjectWrite(key, epoch, puts, appends=appends, drops=dropped))

    def write_to_both(self, write: ObjectWrite) -> None:
        found = self.real(self.ledger.objects.write(write))
        assert found == self.modelled(lambda: self.model.objects.write(write))

    @rule(
        key=KEYS,
        prefix=NAMES,
        start=st.none() | NAMES,
        end=st.none() | NAMES,
        limit=st.none() | st.integers(0, 3),
        reverse=st.booleans(),
    )
    def values(
        self,
        key: ObjectKey,
        prefix: str,
        start: str | None,
        end: str | None,
        limit: int | None,
        reverse: bool,
    ) -> None:
        listed = self.runner.run(
            self.ledger.objects.list(
                key, prefix=prefix, start=start, end=end, limit=limit, reverse=reverse
            )
        )
        right = self.model.objects.list(
            key, prefix=prefix, start=start, end=end, limit=limit, reverse=reverse
        )
        assert list(listed.items()) == right
        names = [name for name, _ in right]
        got = self.runner.run(self.ledger.objects.get(key, names))
        assert got == self.model.objects.get(key, names)

    # ---- always ----

    @invariant()
    def the_same_is_unfinished_due_and_named(self) -> None:
        if not hasattr(self, "ledger"):
            return
        objects, model = self.ledger.objects, self.model.objects
        assert self.runner.run(self.ledger.unfinished()) == self.model.unfinished()
        assert set(self.runner.run(objects.due(5, 100))) == model.due(5)
        first = min((alarm.at_ms for alarm in model.alarms.values()), default=None)
        assert self.runner.run(objects.next_alarm_ms()) == first
        assert list(self.runner.run(objects.names("a"))) == model.names("a")


LedgerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLedgerAgainstModel = LedgerMachine.TestCase
