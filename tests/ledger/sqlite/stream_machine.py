"""A ledger on a file and its model: random calls to both, which must do the same.

Between any two calls the process may end, in order or killed, and another one goes on.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tailrace.ledger.branch import BranchPoint
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import (
    STREAM_ID_BYTES,
    Durability,
    FinishReason,
    StreamEnd,
    Token,
    encode,
)
from tailrace.ledger.interface import Append, NewStream, Record
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.tail import SEGMENT_BYTES
from tests.ledger.sqlite.model import Model, ModelStream

T = TypeVar("T")

TTL_MS = 1_000
MOST_RECORDS = 1_000
"""More than a machine ever appends to a stream."""
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Folder in memory, where a sync costs nothing: other tests are about the disk."""
SETTINGS = settings(
    max_examples=60,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)

MOST_STREAMS = 4
"""So few that most calls meet one with a past, and that an id is often used again."""
NUMBERS = st.integers(0, 9)
PASSED_MS = st.sampled_from((0, TTL_MS // 2, TTL_MS))
DURABILITY = st.sampled_from(Durability)
MOSTLY_0 = st.sampled_from((*[0] * 8, -1, 1))


class Part(NamedTuple):
    """Frames for a stream, made to fit what the model knows of it, or to be a little off."""

    number: int
    length: int
    end_at: int
    size: int
    epoch_off: int
    index_off: int

    def appends(self, stream: bytes, known: ModelStream | None) -> list[Append]:
        epoch, at = (known.epoch, len(known.records)) if known else (1, 0)
        first = max(0, at + self.index_off)
        return [
            Append(stream, epoch + self.epoch_off, index, self.record(index, index - first))
            for index in range(first, first + self.length)
        ]

    @property
    def goes_on_after_its_end(self) -> bool:
        return self.end_at < self.length - 1

    def record(self, index: int, at: int) -> Record:
        if at == self.end_at:
            return Record(encode(StreamEnd(0, FinishReason.STOP, index, 0)), ())
        return Record(encode(Token("x" * self.size, index)), (index,))


PARTS = st.builds(
    Part,
    number=NUMBERS,
    length=st.integers(0, 5),
    end_at=st.integers(0, 8),
    size=st.sampled_from((1, 20, SEGMENT_BYTES // 2, SEGMENT_BYTES)),
    epoch_off=MOSTLY_0,
    index_off=MOSTLY_0,
)
NEWS = st.builds(
    NewStream,
    stream=st.just(b""),
    recipe=st.sampled_from(("", '{"prompt_ids":[1,2]}')),
    durability=DURABILITY,
    ttl_s=st.just(TTL_MS / 1000),
    idempotency_key=st.sampled_from((None, None, "one", "two")),
    request_hash=st.sampled_from((b"", b"", b"another request")),
)


def outcome(call: Callable[[], T]) -> T | type[TailraceError]:
    """Return the result of a call, or the class of its error."""
    try:
        return call()
    except TailraceError as error:
        return type(error)


class StreamMachine(RuleBasedStateMachine):
    """Random operations on streams, compared with a model of them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path = Path(self.folder.name) / "ledger.db"
        self.runner = asyncio.Runner()
        self.model = Model()
        self.slid: set[bytes] = set()  # read since the last sweep
        self.open()

    def open(self) -> None:
        self.ledger = self.run(SqliteLedger.open(self.path, lambda: self.model.now_ms))

    def teardown(self) -> None:
        self.run(self.ledger.close())
        self.runner.close()
        self.folder.cleanup()

    def run(self, work: Awaitable[T]) -> T:
        async def settled() -> T:
            result = await work
            await asyncio.sleep(0)  # a relaxed write is committed at the end of the turn
            return result

        return self.runner.run(settled())

    def agree(self, real: Awaitable[T], modelled: Callable[[], T]) -> None:
        found, right = outcome(lambda: self.run(real)), outcome(modelled)
        assert found == right

    def missing(self) -> bytes:
        """Return the first id that no stream has."""
        ids = (bytes([n]) * STREAM_ID_BYTES for n in range(1, 256))
        return next(stream for stream in ids if stream not in self.model)

    def pick(self, number: int) -> bytes:
        """Return a stream that there is, most of the time."""
        there = list(self.model)
        return there[number % len(there)] if there and number else self.missing()

    # ---- calls ----

    @precondition(lambda self: len(self.model) < MOST_STREAMS)
    @rule(new=NEWS, taken=st.sampled_from((False, False, False, True)))
    def create(self, new: NewStream, taken: bool) -> None:
        made = replace(new, stream=self.pick(1) if taken else self.missing())
        self.agree(self.ledger.create(made), lambda: self.model.create(made))

    @precondition(lambda self: len(self.model) < MOST_STREAMS)
    @rule(new=NEWS, number=NUMBERS, end=st.sampled_from((0, 1, 2, 3, 5, 12)))
    def branch(self, new: NewStream, number: int, end: int) -> None:
        """Branch a stream, which may be running, ended, or a branch itself."""
        base = BranchPoint(self.pick(number), end)
        made = replace(new, stream=self.missing(), base=base)
        self.agree(self.ledger.create(made), lambda: self.model.create(made))

    @rule(parts=st.lists(PARTS, min_size=1, max_size=3))
    def append(self, parts: Sequence[Part]) -> None:
        streams = [self.pick(part.number) for part in parts]
        made = (part.appends(s, self.model.get(s)) for s, part in zip(streams, parts, strict=True))
        batch = [append for appends in made for append in appends]
        refused = [(r.append, type(r.error)) for r in self.run(self.ledger.append(batch))]
        modelled = [(append, outcome(partial(self.model.append, append))) for append in batch]
        assert Counter(refused) == Counter(pair for pair in modelled if pair[1] is not None)

    @rule(number=NUMBERS)
    def take_over(self, number: int) -> None:
        stream = self.pick(number)
        self.agree(self.ledger.take_over(stream), lambda: self.model.take_over(stream))

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        stream = self.pick(number)
        self.agree(self.ledger.delete(stream), lambda: self.model.delete(stream))

    @rule(
        passed_ms=PASSED_MS,
        numbers=st.lists(NUMBERS, min_size=1, max_size=3),
        start=st.sampled_from((0, 0, 1, 3, 12)),
        limit=st.sampled_from((1, 4, 40)),
    )
    def read(self, passed_ms: int, numbers: list[int], start: int, limit: int) -> None:
        self.model.now_ms += passed_ms
        for number in numbers:
            self.look(self.pick(number), start, limit)

    def look(self, stream: bytes, start: int, limit: int) -> None:
        ledger, model = self.ledger, self.model
        self.slid.add(stream)
        self.agree(ledger.info(stream), lambda: model[stream].info)
        self.agree(ledger.read(stream, start, limit), lambda: model.read(stream, start, limit))
        if stream in model:
            frames = [record.frame for record in model.read(stream, start, limit)]
            assert self.run(ledger.frames(stream, start, limit)) == frames
            assert ledger.tail(stream).take(start, limit) in (frames, None)

    @rule(passed_ms=PASSED_MS)
    def sweep(self, passed_ms: int) -> None:
        self.model.now_ms += passed_ms
        self.agree(self.ledger.expire(), self.model.expire)
        self.slid.clear()

    @invariant()
    def the_same_is_unfinished(self) -> None:
        unfinished = [known.new.stream for known in self.model.generations(ended=False)]
        assert self.run(self.ledger.unfinished()) == unfinished

    # ---- the end of the process ----

    @rule(killed=st.booleans(), looks=st.booleans())
    def restart(self, killed: bool, looks: bool) -> None:
        """Restart on the files, or after SIGKILL on a copy of the files as they are."""
        left = Path(tempfile.mkdtemp(dir=self.folder.name)) / "ledger.db" if killed else self.path
        for suffix in ("", "-wal") if killed else ():
            shutil.copy(f"{self.path}{suffix}", f"{left}{suffix}")
        self.run(self.ledger.close())
        self.path = left
        self.reopen()
        # Expiries that reads have moved since the last sweep are not in the file, so read again.
        for stream in self.model if looks else sorted(self.slid & self.model.keys()):
            self.look(stream, 0, MOST_RECORDS)

    def reopen(self) -> None:
        self.open()
