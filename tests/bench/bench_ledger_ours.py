"""Our contenders: the storage layer alone, the whole ledger, and the ledger under 64 producers.

They run in this process on uvloop, as an origin does. Records are packed, checked, indexed
and handed to subscribers within the measured time.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import uvloop

from tailrace.ledger.flow.credit_window import MAX_CREDIT_FRAMES, Window
from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, encode
from tailrace.ledger.interface import Append, Appends, NewStream, Record
from tailrace.ledger.sqlite.commit_log import SEGMENT_COMMITS
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.encoding import PLAIN, column, pack_batch, pack_segment
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.storage import Commit, SegmentRow, StreamRow
from tailrace.ledger.sqlite.tail import SEGMENT_BYTES
from tests.bench.bench_ledger_work import (
    FRAME_BYTES,
    Batch,
    Contender,
    Disk,
    Mode,
    Replayer,
    Sample,
    check_replay,
    folder_bytes,
    frame,
)

TTL_S = 3600.0
TOKEN_ID = 4711
LOAD_FRAMES = 512
"""Frames per append while a long stream is loaded."""
SEGMENT_STEPS = -(-SEGMENT_BYTES // FRAME_BYTES)
"""Steps after which a stream's frames become a segment."""

T = TypeVar("T")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def stream_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Ours(Contender):
    """A contender in this process, with an event loop of its own."""

    def __init__(self, what: str, mode: Mode) -> None:
        self.name = f"Tailrace {what}"
        self.mode = mode
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._is_open = False

    def start(self, folder: Path) -> None:
        self._path = folder / "ledger.sqlite"
        self._run(self._open())
        self._is_open = True

    def append(self, batch: Batch) -> Sample:
        return self._run(self._append(batch))

    def stop(self) -> None:
        if self._is_open:
            self._run(self._close())
        self._runner.close()

    @property
    def _durability(self) -> Durability:
        return Durability.POWER if self.mode is Mode.POWER else Durability.PROCESS

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _append(self, batch: Batch) -> Sample: ...

    @abstractmethod
    async def _close(self) -> None: ...


class OurStorage(Ours):
    """`SqliteFile.commit` alone: a log row per step, and the segments that follow from it.

    Segments are made and the log is pruned as often as the ledger would; nothing is checked,
    indexed or read.
    """

    def __init__(self, mode: Mode) -> None:
        super().__init__("storage", mode)
        self._seq = 0

    async def _open(self) -> None:
        self._file = await SqliteFile.open(self._path)

    async def _close(self) -> None:
        await self._file.close()

    async def _append(self, batch: Batch) -> Sample:
        sids = [number + 1 for number in batch.numbers]
        await self._create(sids)
        power, due, waits = self.mode is Mode.POWER, _Segments(sids), []
        began = last = perf_counter()
        for index in range(batch.steps):
            self._seq += 1
            frames, ids = [frame(index)] * len(sids), [(TOKEN_ID,)] * len(sids)
            log = pack_batch(column(sids), [index] * len(sids), frames, ids)
            commit, behind = Commit(self._seq, log, power), Commit()
            if power:
                due.put_into(behind, self._seq, index)
                await self._file.commit_durably(commit, partial(_given, behind))
            else:
                due.put_into(commit, self._seq, index)
                self._file.commit(commit)
            now = perf_counter()
            waits.append(now - last)
            last = now
        return Sample(batch.streams * batch.steps, last - began, waits)

    async def _create(self, sids: list[int]) -> None:
        now = now_ms()
        kind, epoch, ended, ttl_ms = 0, 1, 0, int(TTL_S * 1000)
        durability = int(self._durability)
        commit = Commit()
        for sid in sids:
            name, times = stream_id(sid), (now, ttl_ms, now + ttl_ms)
            row = StreamRow(sid, name, kind, epoch, ended, durability, "{}", *times, None, b"")
            commit.streams.append(row)
        self._file.commit(commit)


def _given(commit: Commit) -> Commit:
    return commit


class _Segments:
    """Which streams become segments with which step."""

    def __init__(self, sids: list[int]) -> None:
        self._sids = sids
        self._first = 0
        self._left: list[int] = []

    def put_into(self, commit: Commit, seq: int, index: int) -> None:
        stored = index + 1
        if stored - self._first >= SEGMENT_STEPS and not self._left:
            self._left = list(self._sids)
        if not self._left:
            return
        due = -(-len(self._left) // SEGMENT_COMMITS)
        some = self._left[:due]
        del self._left[: len(some)]
        until = self._first + SEGMENT_STEPS
        frames = [frame(i) for i in range(self._first, until)]
        for sid in some:
            packed = pack_segment(frames, [(TOKEN_ID,)] * len(frames))
            commit.segments.append(SegmentRow(sid, self._first, len(frames), PLAIN, packed))
        if not self._left:
            self._first = until
            commit.keep_from = seq - (index - until)


class OurLedger(Ours, Replayer):
    """`SqliteLedger.append`, one call per step, with a subscriber on every stream."""

    def __init__(self, mode: Mode, what: str = "ledger, a subscriber each") -> None:
        super().__init__(what, mode)

    async def _open(self) -> None:
        self._ledger = await SqliteLedger.open(self._path, now_ms)

    async def _close(self) -> None:
        await self._ledger.close()

    async def _append(self, batch: Batch) -> Sample:
        streams = [stream_id(number) for number in batch.numbers]
        await self._create(streams)
        readers = [Reader(self._ledger, stream) for stream in streams]
        sample = await self._steps(streams, batch.steps)
        for reader in readers:
            reader.finish(batch.steps)
        await self._end(streams, batch.steps)
        return sample

    async def _steps(self, streams: list[bytes], steps: int) -> Sample:
        ledger, waits, many = self._ledger, [], len(streams)
        began = perf_counter()
        for index in range(steps):
            ids = [(TOKEN_ID,)] * many
            batch = Appends(
                streams, [1] * many, [index] * many, [frame(index)] * many, ids, [b""] * many
            )
            submitted = perf_counter()
            refused = await ledger.append(batch)
            waits.append(perf_counter() - submitted)
            if refused:
                raise refused[0].error
        return Sample(len(streams) * steps, perf_counter() - began, waits)

    async def _create(self, streams: list[bytes]) -> None:
        new = [NewStream(stream, "{}", self._durability, TTL_S) for stream in streams]
        await asyncio.gather(*[self._ledger.create(one) for one in new])

    async def _end(self, streams: list[bytes], index: int) -> None:
        """End the streams as generations end: each tail becomes a segment and leaves memory."""
        end = Record(encode(StreamEnd(index, FinishReason.STOP, index, 0)), ())
        await self._ledger.append([Append(stream, 1, index, end) for stream in streams])

    def load(self, number: int, count: int) -> None:
        self._run(self._load(stream_id(number), count))

    async def _load(self, stream: bytes, count: int) -> None:
        await self._create([stream])
        for start in range(0, count, LOAD_FRAMES):
            indexes = range(start, min(start + LOAD_FRAMES, count))
            records = [Record(frame(index), (TOKEN_ID,)) for index in indexes]
            pairs = zip(indexes, records, strict=True)
            await self._ledger.append([Append(stream, 1, i, record) for i, record in pairs])
        await self._end([stream], count)

    def settle(self) -> Disk:
        """Return the file with its WAL, and alone after a close, which is all that is compacted."""
        appended = folder_bytes(self._path.parent)
        self._run(self._close())
        closed = folder_bytes(self._path.parent)
        self._run(self._open())
        return Disk(appended, closed)

    def replay(self, number: int, count: int) -> float:
        """From a ledger that was opened a moment ago and holds the stream in no memory."""
        self.settle()
        return self._run(self._replay(stream_id(number), count))

    async def _replay(self, stream: bytes, count: int) -> float:
        began = perf_counter()
        frames = await self._ledger.frames(stream, 0, count)
        took = perf_counter() - began
        check_replay(frames, count)
        return took


class OurLedgerOfTasks(OurLedger):
    """The ledger with a task per stream, none of which waits for the others."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(mode, "ledger, a task per stream")

    async def _steps(self, streams: list[bytes], steps: int) -> Sample:
        began = perf_counter()
        waits = await asyncio.gather(*[self._produce(stream, steps) for stream in streams])
        took = perf_counter() - began
        return Sample(len(streams) * steps, took, list(_flat(waits)))

    async def _produce(self, stream: bytes, steps: int) -> list[float]:
        ledger, waits = self._ledger, []
        for index in range(steps):
            record = Record(frame(index), (TOKEN_ID,))
            submitted = perf_counter()
            refused = await ledger.append([Append(stream, 1, index, record)])
            waits.append(perf_counter() - submitted)
            if refused:
                raise refused[0].error
        return waits


class Reader:
    """A subscriber that takes the released records whenever it is woken, like a feed."""

    def __init__(self, ledger: SqliteLedger, stream: bytes) -> None:
        self._ledger = ledger
        self._stream = stream
        self._window = Window.starting(0, MAX_CREDIT_FRAMES)
        ledger.watch(stream, self._pump)
        self._tail = ledger.tail(stream)

    def _pump(self) -> None:
        wanted = self._window.wanted(self._tail.released)
        if wanted:
            frames = self._tail.take(self._window.next, wanted)
            assert frames, "a reader at the tip finds its frames in memory"
            self._window.next += len(frames)

    def finish(self, count: int) -> None:
        """Stop, having seen every frame."""
        assert self._window.next == count
        self._ledger.unwatch(self._stream, self._pump)


def _flat(lists: list[list[float]]) -> Iterator[float]:
    for some in lists:
        yield from some
