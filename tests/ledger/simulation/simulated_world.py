"""The world outside the simulated process, which checks its promises.

It knows what was acknowledged to whom, what each reader has seen, and which epoch was given
out when; it compares that with what the disk's log holds, at each step and after each crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tailrace.ledger.frame import (
    Durability,
    FinishReason,
    StreamEnd,
    Token,
    decode,
    encode,
    index_of,
    tag_of,
    with_corr,
)
from tailrace.ledger.interface import Append, NewStream, Record, StreamKind
from tailrace.ledger.record_extra import EndUsage, RecordExtra
from tailrace.ledger.usage import UsageCounts
from tests.ledger.simulation.simulated_storage import Crash, SimulatedDisk

TTL_MS = 5_000
BACK_MS = 500
"""Maximum step back of the clock, in ms."""
MAX_TOKENS = 9
"""Maximum number of tokens of one stream; the faults that matter need few."""


class Violation(AssertionError):
    """The ledger has broken its word."""


def require(kept: bool, broken: str) -> None:
    if not kept:
        raise Violation(broken)


@dataclass(slots=True)
class Expected:
    """One stream as the outside knows it. `epoch` is the last one that was given out.

    `fences` are the indexes at which each epoch began to write: nothing of an older epoch
    may come after them. `claims` counts takeovers that were begun; `ended_ms` is when its
    end was first offered to the ledger, or the earliest time since; `deleted` says that
    somebody asked for that.
    """

    key: str
    durability: Durability
    tokens: int
    id: bytes | None = None
    epoch: int = 0
    claims: int = 0
    acknowledged: dict[int, bytes] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    ended_ms: int | None = None
    deleted: bool = False

    def new(self, number: int) -> NewStream:
        stream = f"{self.key}{number:>{16 - len(self.key)}}".encode()
        return NewStream(stream, "{}", self.durability, TTL_MS / 1000, self.key, b"same")

    def record(self, epoch: int, index: int, pad: int) -> Record:
        """Return what a producer with that epoch writes there; the last one is the end."""
        if index == self.tokens:
            extra = RecordExtra(usage=EndUsage(0, "", "", "m", "batch", delivered_tokens=epoch))
            end = StreamEnd(epoch, FinishReason.STOP, index, 1)
            return Record(encode(end), (epoch,), extra.pack())
        return Record(encode(Token(f"{epoch} {'x' * pad}", index)), (epoch, index))

    def survives(self, crash: Crash) -> bool:
        return survives(self.durability, crash)


@dataclass(slots=True)
class Reader:
    """A client that reads one stream from index `start` on, over many connections."""

    expected: Expected
    start: int
    seen: list[bytes] = field(default_factory=list)
    done: bool = False

    @property
    def next(self) -> int:
        return self.start + len(self.seen)


@dataclass(slots=True)
class Counter:
    """An object that counts: its value `n` is the length of its stream, whatever happens.

    `round` is the number of that stream: now and then the object begins anew.
    """

    durability: Durability
    round: int = 0
    acknowledged: int = 0

    def stream(self, of_round: int) -> bytes:
        return b"counter%9d" % of_round

    def new(self, of_round: int) -> NewStream:
        kind = StreamKind.OBJECT
        return NewStream(self.stream(of_round), "", self.durability, 0.0, kind=kind)


class World:
    """Everything that outlives a process: the disk, the clock, the clients, the record."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.disk = SimulatedDisk(self.random)
        self.now_ms = self.latest_ms = 1_000_000
        random = self.random
        self.streams = [
            Expected(f"k{n}", random.choice(list(Durability)), random.randint(0, MAX_TOKENS))
            for n in range(random.randint(1, 4))
        ]
        self.readers = [
            Reader(expected := random.choice(self.streams), random.randint(0, expected.tokens // 2))
            for _ in range(random.randint(1, 4))
        ]
        self.counter = Counter(random.choice(list(Durability)))
        self._by_id: dict[bytes, Expected] = {}
        self._numbers = iter(range(10**6))

    def number(self) -> int:
        return next(self._numbers)

    def clock(self) -> int:
        """Return Unix time in ms as the processes see it; it may jump."""
        return self.now_ms

    def jump(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.latest_ms = max(self.latest_ms, self.now_ms)
        for expected in self.streams:
            if expected.ended_ms is not None:  # the ledger may not have looked before it went back
                expected.ended_ms = min(expected.ended_ms, self.now_ms)

    # ---- what producers are told ----

    def created(self, expected: Expected, stream: bytes) -> None:
        require(expected.id in (None, stream), "one idempotency key, two streams")
        expected.id = stream
        expected.epoch = max(1, expected.epoch)
        expected.fences.setdefault(1, 0)
        self._by_id[stream] = expected

    def claimed(self, expected: Expected, epoch: int, released: int) -> None:
        require(epoch not in expected.fences, "an epoch was given out twice")
        expected.epoch = max(expected.epoch, epoch)
        expected.fences[epoch] = released

    def offer(self, append: Append) -> None:
        """Note that a producer is about to append this."""
        expected = self._by_id[append.stream]
        if expected.ended_ms is None and tag_of(append.record.frame) == StreamEnd.tag:
            expected.ended_ms = self.now_ms

    def acknowledge(self, append: Append) -> None:
        expected = self._by_id[append.stream]
        index, frame = append[2], append.record.frame
        require(index not in expected.acknowledged, "an index was acknowledged twice")
        expected.acknowledged[index] = frame
        if expected.durability is not Durability.RELAXED:
            self._require_logged(expected, index, frame, "acknowledged")

    def gone(self, expected: Expected) -> None:
        """Check that a stream that is gone was deleted, or has ended and expired."""
        ended = expected.ended_ms
        expired = ended is not None and self.latest_ms >= ended + TTL_MS
        require(expired or expected.deleted, "a stream is gone that had not expired")

    # ---- what readers see ----

    def receive(self, reader: Reader, raw: bytes) -> None:
        frame, index = with_corr(raw, 0), reader.next
        require(index_of(frame) == index, f"index {index_of(frame)} came instead of {index}")
        if reader.expected.durability is not Durability.RELAXED:
            self._require_logged(reader.expected, index, frame, "shown")
        reader.seen.append(frame)

    def _require_logged(self, expected: Expected, index: int, frame: bytes, what: str) -> None:
        assert expected.id is not None
        frames = self.disk.frames.get(expected.id, [])
        safe = len(frames)
        if expected.durability is Durability.POWER:
            safe = self.disk.safe.get(expected.id, 0)
        require(index < safe, f"{what} before its commit")
        require(frames[index] == frame, f"{what} was another frame than the log holds")

    # ---- usage ----

    def logged_usage(self) -> UsageCounts:
        """Return the usage of all streams whose end the log has, or had."""
        total = UsageCounts()
        for frames in self.disk.frames.values():
            end = decode(frames[-1])[1] if frames else None
            if isinstance(end, StreamEnd):
                output = end.total_tokens
                total = total.plus(UsageCounts(1, 1, 0, output, 0, output, 0))
        return total

    # ---- crashes ----

    def crash(self, crash: Crash) -> None:
        """Lose what may be lost, and require that nothing else is."""
        self.disk.crash(crash)
        for expected in self.streams:
            if expected.id is None:
                continue
            survives = expected.survives(crash)
            known = expected.id in self.disk.frames
            require(known or (crash is Crash.POWER and not survives), "a created stream is lost")
            left = self.disk.frames.get(expected.id, [])
            self._forget_acknowledged(expected, left, survives)
            for reader in self.readers:
                if reader.expected is expected:
                    _forget_seen(reader, left, survives)
            if not known:
                expected.id, expected.epoch, expected.fences = None, 0, {}
        self._check_counter(crash)

    def _check_counter(self, crash: Crash) -> None:
        counter, n, of_round = self.counter, *self.stored_counter()
        log = self.disk.frames.get(counter.stream(of_round), [])
        require(n == len(log), "an object's values and its stream do not agree")
        if survives(counter.durability, crash):
            is_newer = of_round > counter.round
            require(of_round >= counter.round, "an object is older than acknowledged")
            require(is_newer or n >= counter.acknowledged, "an object's write is lost")
        counter.round, counter.acknowledged = of_round, n

    def stored_counter(self) -> tuple[int, int]:
        """`n` and the round of the counter, as the disk's tables have them."""
        tables = self.disk.tables
        for row in tables.objects.values():
            values = tables.values.get(row.oid, {})
            return int(values.get("n", b"0")), int(values.get("round", b"0"))
        return 0, 0

    def counted(self, n: int, of_round: int) -> None:
        """Note that a write of the counter was acknowledged."""
        if self.counter.durability is not Durability.RELAXED:
            self.counter.round, self.counter.acknowledged = of_round, n

    def _forget_acknowledged(self, expected: Expected, left: list[bytes], survives: bool) -> None:
        for index in list(expected.acknowledged):
            if index < len(left):
                require(left[index] == expected.acknowledged[index], "a frame was changed")
            else:
                require(not survives, f"acknowledged index {index} is lost")
                del expected.acknowledged[index]
        for epoch, index in expected.fences.items():
            expected.fences[epoch] = min(index, len(left))
        ended = bool(left) and tag_of(left[-1]) == StreamEnd.tag
        if not ended:
            expected.ended_ms = None

    # ---- at the end ----

    def require_whole(self) -> None:
        """Each stream is complete, each epoch wrote alone, each reader has seen the log."""
        for expected in self.streams:
            assert expected.id is not None
            if expected.deleted:
                continue
            frames = self.disk.frames[expected.id]
            require([index_of(f) for f in frames] == list(range(expected.tokens + 1)), "indexes")
            require(tag_of(frames[-1]) == StreamEnd.tag, "the stream has no end")
            epochs = [_epoch_of(frame) for frame in frames]
            require(epochs == sorted(epochs), "a fenced producer wrote")
            for epoch, begin in expected.fences.items():
                require(all(e >= epoch for e in epochs[begin:]), "a fenced producer wrote")
            for reader in self.readers:
                if reader.expected is expected:
                    log = frames[reader.start : reader.next]
                    require(reader.seen == log, "a reader saw what the log does not hold")
                    require(reader.done, "a reader has not come to the end")


def survives(durability: Durability, crash: Crash) -> bool:
    """Return True if what was acknowledged must outlive such a crash."""
    if durability is Durability.POWER:
        return True
    return durability is Durability.PROCESS and crash is Crash.PROCESS


def _forget_seen(reader: Reader, left: list[bytes], survives: bool) -> None:
    log = left[reader.start :]
    if len(reader.seen) > len(log):
        require(not survives, "what a reader has seen is lost")
        del reader.seen[len(log) :]
    require(reader.seen == log[: len(reader.seen)], "what a reader has seen was changed")
    if not (reader.seen and tag_of(reader.seen[-1]) == StreamEnd.tag):
        reader.done = False


def _epoch_of(raw: bytes) -> int:
    _, frame = decode(raw)
    if isinstance(frame, StreamEnd):
        return frame.total_tokens
    assert isinstance(frame, Token)
    return int(frame.text.split()[0])
