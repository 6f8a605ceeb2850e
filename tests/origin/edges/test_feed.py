"""Feeds over a real ledger; the link is a list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tailrace.ledger.errors import LedgerFailed
from tailrace.ledger.flow.credit_window import READ_FRAMES, Window
from tailrace.ledger.frame import (
    Durability,
    FinishReason,
    Frame,
    Splitter,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    decode,
    encode,
    with_corr,
)
from tailrace.ledger.interface import Append, NewStream, Record
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.tail import SEGMENT_BYTES
from tailrace.origin.edges.feed import Feed
from tailrace.origin.generations.presence import Readers

pytestmark = pytest.mark.anyio

STREAM = bytes([1]) * 16
CORR = 9
LONG = "x" * (SEGMENT_BYTES // 4)


class Outlet:
    """A link that keeps what it is sent, and can be congested."""

    def __init__(self) -> None:
        self.congested = False
        self.frames: list[Frame] = []
        self.closed_corrs: list[int] = []
        self.done = asyncio.Event()
        self.news = asyncio.Event()
        self._splitter = Splitter()

    def send(self, data: bytes) -> None:
        for corr, frame in map(decode, self._splitter.feed(data)):
            assert corr == CORR
            self.frames.append(frame)
        self.news.set()

    def relay(self, frames: Sequence[bytes], corr: int) -> None:
        self.send(b"".join(with_corr(frame, corr) for frame in frames))

    def closed(self, corr: int) -> None:
        self.closed_corrs.append(corr)
        self.done.set()

    async def has(self, count: int) -> None:
        """Wait until a number of frames have been sent."""
        while len(self.frames) < count:
            self.news.clear()
            await self.news.wait()

    @property
    def indexes(self) -> list[int]:
        return [f.index for f in self.frames if isinstance(f, Token | StreamEnd)]


class Stage:
    """One stream with a producer and any number of feeds."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self.ledger = ledger
        self.replayed: list[tuple[int, bool]] = []
        self.readers = Readers(
            replayed=lambda frames, demoted: self.replayed.append((frames, demoted))
        )
        self.count = 0

    async def produce(self, count: int, text: str = "a") -> None:
        for _ in range(count):
            record = Record(encode(Token(text, self.count)), (1,))
            assert await self.ledger.append([Append(STREAM, 1, self.count, record)]) == []
            self.count += 1

    async def end(self) -> None:
        end = StreamEnd(self.count, FinishReason.STOP, self.count, 1)
        await self.ledger.append([Append(STREAM, 1, self.count, Record(encode(end), ()))])

    async def feed(
        self,
        start: int = 0,
        credit: int = 10_000,
        *,
        follow: bool = True,
        credit_bytes: int | None = None,
    ) -> tuple[Feed, Outlet]:
        outlet = Outlet()
        feed = Feed(
            outlet,
            CORR,
            Window.starting(start, credit, credit_bytes=credit_bytes),
            self.ledger,
            self.readers,
            follow=follow,
        )
        feed.attach(STREAM, (await self.ledger.info(STREAM)).next_index)
        return feed, outlet


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 1000)
    await ledger.create(NewStream(STREAM, "{}", Durability.PROCESS, 60))
    yield Stage(ledger)
    await ledger.close()


async def test_replay_is_followed_by_the_live_tail_without_gap_or_double(stage: Stage) -> None:
    await stage.produce(2 * READ_FRAMES, LONG)  # most of it in segments by now
    feeds = [await stage.feed(start) for start in (0, 7, stage.count - 1)]
    await stage.produce(20)
    await stage.end()
    for start, (_, outlet) in zip((0, 7, 2 * READ_FRAMES - 1), feeds, strict=True):
        await asyncio.wait_for(outlet.done.wait(), 30)
        assert outlet.indexes == list(range(start, stage.count + 1))
        assert outlet.closed_corrs == [CORR]


async def test_a_reader_without_credit_is_connected_but_does_not_read(stage: Stage) -> None:
    readers = stage.readers
    assert not readers.is_connected(STREAM)
    feed, _ = await stage.feed(credit=0)
    assert (readers.is_connected(STREAM), readers.count(STREAM)) == (True, 0)
    feed.grant(5, None)
    assert (readers.is_connected(STREAM), readers.count(STREAM)) == (True, 1)
    feed.detach()
    assert (readers.is_connected(STREAM), readers.count(STREAM)) == (False, 0)


async def test_a_stalled_reader_of_a_body_is_connected_but_does_not_read(stage: Stage) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    readers = stage.readers
    body = readers.counted(STREAM, parts())
    assert await anext(body) == b"one"  # it has not taken the next part
    assert (readers.is_connected(STREAM), readers.count(STREAM)) == (True, 0)
    await body.aclose()
    assert (readers.is_connected(STREAM), readers.count(STREAM)) == (False, 0)


async def test_a_reader_without_credit_is_sent_nothing_and_loses_nothing(stage: Stage) -> None:
    feed, outlet = await stage.feed(credit=3)
    await stage.produce(10, LONG)
    assert outlet.indexes == [0, 1, 2]
    await stage.end()
    feed.grant(5, None)
    feed.grant(100, None)
    await asyncio.wait_for(outlet.done.wait(), 30)
    assert outlet.indexes == list(range(11))


async def test_who_falls_behind_what_memory_holds_is_counted_once(stage: Stage) -> None:
    feed, outlet = await stage.feed(credit=3)
    await stage.produce(3)
    await outlet.has(3)
    assert stage.replayed == []
    await stage.produce(2 * READ_FRAMES, LONG)
    feed.grant(stage.count, None)
    await asyncio.wait_for(outlet.has(stage.count), 30)
    assert outlet.indexes == list(range(stage.count))
    assert [demoted for _, demoted in stage.replayed].count(True) == 1 and stage.replayed[0][1]
    assert READ_FRAMES <= sum(frames for frames, _ in stage.replayed) <= 2 * READ_FRAMES


async def test_a_reader_with_credit_for_few_bytes_is_sent_few_frames(stage: Stage) -> None:
    await stage.produce(2 * READ_FRAMES, LONG)
    feed, outlet = await stage.feed(credit_bytes=1)
    size = len(encode(Token(LONG, 0), CORR))
    await asyncio.wait_for(outlet.has(1), 30)
    feed.grant(100, 2 * size + 1)
    await asyncio.wait_for(outlet.has(3), 30)
    await stage.produce(1, LONG)
    assert outlet.indexes == [0, 1, 2]
    await stage.end()
    feed.grant(10_000, 1 << 30)
    await asyncio.wait_for(outlet.done.wait(), 30)
    assert outlet.indexes == list(range(2 * READ_FRAMES + 2))


async def test_a_congested_link_waits_and_then_goes_on(stage: Stage) -> None:
    feed, outlet = await stage.feed()
    await stage.produce(1)
    outlet.congested = True
    await stage.produce(3)
    assert outlet.indexes == [0]
    outlet.congested = False
    feed.pump()
    assert outlet.indexes == [0, 1, 2, 3]


async def test_a_detached_reader_is_sent_nothing_more(stage: Stage) -> None:
    feed, outlet = await stage.feed()
    await stage.produce(2)
    feed.detach()
    await stage.produce(2)
    assert outlet.indexes == [0, 1]
    assert outlet.closed_corrs == []


async def test_a_snapshot_of_a_running_stream_ends_with_its_status(stage: Stage) -> None:
    await stage.produce(4)
    _, outlet = await stage.feed(start=1, follow=False)
    await asyncio.wait_for(outlet.done.wait(), 30)
    assert outlet.indexes == [1, 2, 3]
    assert outlet.frames[-1] == Status(STREAM, StreamState.RUNNING, 4)


async def test_a_snapshot_is_of_one_moment_however_slowly_it_is_read(stage: Stage) -> None:
    await stage.produce(4)
    feed, outlet = await stage.feed(credit=2, follow=False)
    await stage.produce(3)
    await stage.end()
    feed.grant(100, None)
    await asyncio.wait_for(outlet.done.wait(), 30)
    assert outlet.indexes == [0, 1, 2, 3]
    assert outlet.frames[-1] == Status(STREAM, StreamState.RUNNING, 4)


async def test_a_snapshot_of_an_ended_stream_ends_with_its_end(stage: Stage) -> None:
    await stage.produce(2)
    await stage.end()
    _, outlet = await stage.feed(follow=False)
    await asyncio.wait_for(outlet.done.wait(), 30)
    assert isinstance(outlet.frames[-1], StreamEnd)


async def test_a_reader_that_has_all_of_an_ended_stream_is_told_so(stage: Stage) -> None:
    await stage.produce(2)
    await stage.end()
    _, outlet = await stage.feed(start=3)
    await asyncio.wait_for(outlet.done.wait(), 30)
    assert outlet.frames == [Status(STREAM, StreamState.ENDED, 3)]


async def test_a_storage_error_ends_the_feed_with_a_stream_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.produce(20, LONG)

    async def broken(*_: object) -> list[bytes]:
        raise LedgerFailed("the disk is gone")

    monkeypatch.setattr(stage.ledger, "frames", broken)
    _, outlet = await stage.feed()
    await asyncio.wait_for(outlet.done.wait(), 30)
    [error] = outlet.frames
    assert isinstance(error, StreamError)
    assert (error.code, error.retryable) == ("ledger_failed", True)


@pytest.mark.parametrize(
    ("found", "code"),
    [(OverflowError("a fault of ours"), "internal"), ([], "unknown_stream")],
    ids=["any error", "nothing, because another origin has deleted the stream"],
)
async def test_a_read_that_fails_in_any_way_is_told_to_its_reader(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, found: Exception | list[bytes], code: str
) -> None:
    await stage.produce(20, LONG)

    async def frames(*_: object) -> list[bytes]:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(stage.ledger, "frames", frames)
    _, outlet = await stage.feed()
    await asyncio.wait_for(outlet.done.wait(), 30)
    [error] = outlet.frames
    assert isinstance(error, StreamError)
    assert error.code == code
    assert outlet.closed_corrs == [CORR]


async def test_who_is_connected_without_credit_does_not_read(stage: Stage) -> None:
    await stage.produce(3)
    feed, _ = await stage.feed(credit=2)
    feed.pump()
    assert stage.readers.lately() == {STREAM}
    assert stage.readers.lately() == set(), "it has had what it may have"
    feed.grant(10, None)
    assert stage.readers.lately() == {STREAM}
    feed.detach()
    assert stage.readers.lately() == {STREAM}, "it did read a moment ago"
    assert stage.readers.lately() == set()
