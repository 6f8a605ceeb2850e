"""Removal of expired streams and objects, and packing of old ones."""

import shutil
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest

from tailrace.ledger.errors import LedgerFailed, LedgerFull, NotFound, StreamFull
from tailrace.ledger.frame import (
    Durability,
    FinishReason,
    StreamEnd,
    Token,
    encode,
    error_frame,
)
from tailrace.ledger.interface import (
    Append,
    NewStream,
    ObjectKey,
    ObjectWrite,
    Record,
    Refusal,
    StreamKind,
)
from tailrace.ledger.sqlite.capacity import MIB
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import (
    EXPIRE_STREAMS,
    KEPT_FREE_BYTES,
    RECLAIM_SEGMENTS,
    VACUUM_PAGES,
    RetentionSettings,
)
from tailrace.ledger.sqlite.storage import Commit
from tests.ledger.sqlite.cold_material import TTL_S, Clock, extend, sentence, store, stream_id

pytestmark = pytest.mark.anyio

QUICK = RetentionSettings(pause_s=0, cold_after_s=10 * TTL_S)
PAGE_BYTES = 4_096


class WatchedFile(SqliteFile):
    """Notes every commit, and what it takes away; refuses all after the first `stops_after`."""

    stops_after = 10**9
    waits = False  # every commit comes by here

    def commit(self, commit: Commit) -> None:
        self.commits = [*getattr(self, "commits", []), commit]
        if len(self.commits) > self.stops_after:
            raise LedgerFailed("killed")
        before = self._shape()
        super().commit(commit)
        after = self._shape()
        if not commit.segments:
            segments, pages = before[0] - after[0], before[1] - after[1]
            assert segments <= RECLAIM_SEGMENTS
            assert pages <= VACUUM_PAGES + 1  # one of SQLite's own among them
        assert len(commit.removed) <= EXPIRE_STREAMS

    def _shape(self) -> tuple[int, int]:
        sql = "SELECT (SELECT count(*) FROM segment), (SELECT page_count FROM pragma_page_count)"
        segments, pages = self._lookups.look(sql, ())[0]
        return segments, pages


@asynccontextmanager
async def opened(
    folder: Path,
    clock: Clock,
    settings: RetentionSettings = QUICK,
    kind: type[SqliteFile] = SqliteFile,
) -> AsyncIterator[SqliteLedger]:
    file = await kind.open(folder / "ledger.db")
    ledger = await SqliteLedger.recover(file, clock, retention=settings)
    try:
        yield ledger
    finally:
        await ledger.close()


def query(folder: Path, sql: str) -> list[tuple[int, ...]]:
    connection = apsw.Connection(str(folder / "ledger.db"))
    try:
        return [tuple(map(int, row)) for row in connection.execute(sql)]
    finally:
        connection.close()


def long_records(count: int, *, ends: bool = True) -> list[Record]:
    """Frames of 1 KiB, four to a segment."""
    records = [Record(encode(Token("x" * 1_000, index)), (index,)) for index in range(count)]
    return [*records, end(count)] if ends else records


def end(index: int) -> Record:
    return Record(encode(StreamEnd(index, FinishReason.STOP, index, 0)), ())


async def is_gone(ledger: SqliteLedger, stream: bytes) -> bool:
    try:
        await ledger.info(stream)
    except NotFound:
        return True
    return False


# ---- removing ----


async def test_no_commit_removes_more_than_its_share(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, kind=WatchedFile) as ledger:
        large = await store(ledger, 1, long_records(3_000))
        small = [await store(ledger, 2 + n, sentence(3, seed=n)) for n in range(100)]
        running = await store(ledger, 1_000, sentence(500, ends=False))
        clock.pass_s(TTL_S)
        assert await ledger.expire() == 101
        for stream in (large, *small):
            assert await is_gone(ledger, stream)
        assert await ledger.read(running, 0, 1_000) == sentence(500, ends=False)
    left = query(tmp_path, "SELECT count(*), count(DISTINCT sid), min(sid) FROM segment")
    assert left[0][1:] == (1, 102)
    assert query(tmp_path, "SELECT count(*) FROM removed") == [(0,)]


async def test_the_file_shrinks_when_streams_expire(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "ledger.db"
    async with opened(tmp_path, clock) as ledger:
        kept = await store(ledger, 1, sentence(500), ttl_s=10 * TTL_S)
        for number in range(2, 10):
            await store(ledger, number, long_records(1_000))
    assert path.stat().st_size > 7 * MIB
    async with opened(tmp_path, clock) as ledger:
        clock.pass_s(TTL_S)
        assert await ledger.expire() == 8
        assert path.stat().st_size < KEPT_FREE_BYTES + MIB / 4
        assert await ledger.read(kept, 0, 1_000) == sentence(500)
    async with opened(tmp_path, clock) as ledger:
        assert await ledger.read(kept, 0, 1_000) == sentence(500)


async def test_a_deleted_stream_of_an_object_leaves_nothing(tmp_path: Path) -> None:
    clock, key, stream = Clock(), ObjectKey("stream", "one"), stream_id(9)
    async with opened(tmp_path, clock, kind=WatchedFile) as ledger:
        epoch = (await ledger.objects.claim(key)).epoch
        new = NewStream(stream, "", Durability.PROCESS, 0.0, kind=StreamKind.OBJECT)
        appends = [Append(stream, 1, n, record) for n, record in enumerate(long_records(400))]
        await ledger.objects.write(ObjectWrite(key, epoch, creates=(new,), appends=appends))
        await ledger.objects.write(ObjectWrite(key, epoch, drops=(stream,)))
        assert await is_gone(ledger, stream)
        await ledger.expire()
    assert query(tmp_path, "SELECT count(*) FROM segment") == [(0,)]


@pytest.mark.parametrize("packs", [False, True], ids=["removing", "packing"])
async def test_a_crash_after_any_commit_of_clean_up_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs: bool
) -> None:
    settings = RetentionSettings(pause_s=0, cold_after_s=TTL_S / 2 if packs else 10 * TTL_S)
    clock, kept = Clock(), {}
    first = tmp_path / "first"
    first.mkdir()
    async with opened(first, clock, settings) as ledger:
        for number in range(6):
            records = sentence(300, seed=number)
            kept[await store(ledger, number, records, ttl_s=10 * TTL_S)] = records
        running = sentence(250, seed=50, ends=False)
        kept[await store(ledger, 50, running)] = running
        for number in range(100, 104):
            await store(ledger, number, long_records(90))
    clock.pass_s(TTL_S)
    for stops_after in range(1_000):
        folder = tmp_path / str(stops_after)
        shutil.copytree(first, folder)
        monkeypatch.setattr(WatchedFile, "stops_after", stops_after)
        died = await _dies(folder, clock, settings)
        async with opened(folder, clock, settings) as ledger:
            await ledger.expire()
            for number in range(100, 104):
                assert await is_gone(ledger, stream_id(number))
            for stream, records in kept.items():
                assert await ledger.read(stream, 0, 1_000) == records
            await extend(ledger, stream_id(50), [end(250)], 250)
        assert query(folder, "SELECT count(*) FROM removed") == [(0,)]
        assert query(folder, "SELECT max(sid) FROM segment") == [(7,)]
        cold = query(folder, "SELECT count(*) FROM segment WHERE coding IN (1, 3)")
        assert cold == [(6 if packs else 0,)]
        shutil.rmtree(folder)
        if not died:
            break
    assert stops_after > 5


async def _dies(folder: Path, clock: Clock, settings: RetentionSettings) -> bool:
    """Clean up until a commit is refused; whether one was."""
    try:
        async with opened(folder, clock, settings, WatchedFile) as ledger:
            await ledger.expire()
    except LedgerFailed:
        return True
    return False


async def test_a_damaged_page_ends_clean_up_and_nothing_else(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "ledger.db"
    async with opened(tmp_path, clock) as ledger:
        await store(ledger, 1, long_records(400))
    [(root,)] = query(tmp_path, "SELECT rootpage FROM sqlite_schema WHERE name = 'segment'")
    pages = bytearray(path.read_bytes())
    interior = bytes(pages[(root - 1) * PAGE_BYTES :][:PAGE_BYTES])
    (cell,) = struct.unpack_from(">H", interior, 12)
    (leftmost,) = struct.unpack_from(">I", interior, cell)
    begin = (leftmost - 1) * PAGE_BYTES
    pages[begin : begin + PAGE_BYTES] = b"\xff" * PAGE_BYTES
    path.write_bytes(pages)
    clock.pass_s(TTL_S)
    async with opened(tmp_path, clock) as ledger:
        assert await ledger.expire() == 1
        assert await is_gone(ledger, stream_id(1))
        await ledger.create(NewStream(stream_id(2), "{}", Durability.PROCESS, TTL_S))
        assert await ledger.expire() == 0


# ---- limits ----


async def test_a_full_stream_takes_nothing_but_its_end(tmp_path: Path) -> None:
    clock = Clock()
    settings = RetentionSettings(max_stream_bytes=100_000)
    async with opened(tmp_path, clock, settings) as ledger:
        records = long_records(150, ends=False)
        stream = stream_id(1)
        await ledger.create(NewStream(stream, "{}", Durability.PROCESS, TTL_S))
        refused = await ledger.append([Append(stream, 1, n, r) for n, r in enumerate(records)])
        taken = len(records) - len(refused)
        assert 95 <= taken <= 100
        assert isinstance(refused[0].error, StreamFull)
        assert (refused[0].error.code, refused[0].error.status) == ("stream_full", 413)
    async with opened(tmp_path, clock, settings) as ledger:
        refused = await ledger.append([Append(stream, 1, taken, records[taken])])
        assert [type(refusal.error) for refusal in refused] == [StreamFull]
        assert await ledger.append([Append(stream, 1, taken, end(taken))]) == []
        assert await ledger.read(stream, 0, 1_000) == [*records[:taken], end(taken)]


async def test_a_full_ledger_removes_what_would_expire_first(tmp_path: Path) -> None:
    clock = Clock()
    settings = RetentionSettings(pause_s=0, cold_after_s=10**6, max_ledger_bytes=4 * MIB)
    async with opened(tmp_path, clock, settings) as ledger:
        streams = [
            await store(ledger, number, long_records(150), ttl_s=TTL_S + number)
            for number in range(40)
        ]
        gone = [await is_gone(ledger, stream) for stream in streams]
        assert gone == sorted(gone, reverse=True)
        assert 10 < sum(gone) < 35
        assert ledger._retention._maintenance.sizes().used_bytes < 5 * MIB


async def overfill(ledger: SqliteLedger, stream: bytes) -> int:
    """Append until generations hold more than their share of a ledger of 2 MiB; says how many."""
    count = 0
    while (await ledger.size()).used_bytes <= 1.5 * MIB:
        await extend(ledger, stream, long_records(20, ends=False), count)
        count += 20
    return count


async def test_a_full_ledger_without_ended_streams_refuses_new_ones(tmp_path: Path) -> None:
    clock = Clock()
    settings = RetentionSettings(pause_s=0, max_ledger_bytes=2 * MIB)
    async with opened(tmp_path, clock, settings) as ledger:
        old = await store(ledger, 1, [])
        count = await overfill(ledger, old)
        new = NewStream(stream_id(2), "{}", Durability.PROCESS, TTL_S)
        with pytest.raises(LedgerFull) as error:
            await ledger.create(new)
        assert (error.value.code, error.value.retryable) == ("ledger_full", True)
        waits = {error_frame(error.value).retry_after_ms}
        for _ in range(20):
            with pytest.raises(LedgerFull) as error:
                await ledger.create(new)
            waits.add(error_frame(error.value).retry_after_ms)
        assert len(waits) > 1
        assert None not in waits
        await extend(ledger, old, [end(count)], count)
        await ledger.create(new)
        assert await is_gone(ledger, old)


async def test_an_open_that_is_repeated_is_answered_by_a_full_ledger(tmp_path: Path) -> None:
    settings = RetentionSettings(pause_s=0, max_ledger_bytes=2 * MIB)
    async with opened(tmp_path, Clock(), settings) as ledger:
        first = NewStream(stream_id(1), "{}", Durability.PROCESS, TTL_S, "key", b"hash")
        await ledger.create(first)
        await overfill(ledger, first.stream)
        again = NewStream(stream_id(2), "{}", Durability.PROCESS, TTL_S, "key", b"hash")
        info, created = await ledger.create(again)
        assert (info.stream, created) == (first.stream, False)


async def test_beyond_the_hard_limit_streams_can_only_end(tmp_path: Path) -> None:
    settings = RetentionSettings(pause_s=0, max_ledger_bytes=2 * MIB, object_share=0)
    async with opened(tmp_path, Clock(), settings) as ledger:
        stream = await store(ledger, 1, [])
        refused: list[Refusal] = []
        index = 0
        while not refused:
            record = Record(encode(Token("x" * 1_000, index)), ())
            refused = await ledger.append([Append(stream, 1, index, record)])
            index += not refused
        assert isinstance(refused[0].error, LedgerFull)
        assert 2 * MIB < index * 1_000 < 5 * MIB
        assert await ledger.append([Append(stream, 1, index, end(index))]) == []
        await ledger.expire()
        assert await is_gone(ledger, stream)
        await store(ledger, 2, sentence(10))


async def test_the_wal_can_be_moved_beside_the_writer(tmp_path: Path) -> None:
    file = await SqliteFile.open(tmp_path / "ledger.db")
    ledger = await SqliteLedger.recover(file, Clock())
    await store(ledger, 1, long_records(50))
    file._checkpointer._move_and_sync()
    assert file._checkpointer.moved > 0  # a connection that knows no WAL would say -1
    await ledger.close()


async def test_an_object_whose_new_stream_would_be_too_large_gets_neither(tmp_path: Path) -> None:
    small = RetentionSettings(max_stream_bytes=100)
    path, key = tmp_path / "ledger.db", ObjectKey("stream", "a")
    ledger = await SqliteLedger.open(path, lambda: 1000, retention=small)
    try:
        epoch = (await ledger.objects.claim(key)).epoch
        stream = NewStream(bytes(16), "", Durability.PROCESS, 60, kind=StreamKind.OBJECT)
        record = Record(encode(Token("x" * 200, 0)), ())
        write = ObjectWrite(
            key,
            epoch,
            puts={"a": b"1"},
            creates=[stream],
            appends=[Append(stream.stream, 1, 0, record)],
        )
        with pytest.raises(StreamFull):
            await ledger.objects.write(write)
        await ledger.objects.write(ObjectWrite(key, epoch, puts={"b": b"2"}))
        assert await ledger.objects.list(key) == {"b": b"2"}
        with pytest.raises(NotFound):
            await ledger.info(stream.stream)
    finally:
        await ledger.close()
