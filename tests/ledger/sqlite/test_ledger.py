import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ledger.errors import (
    ConfigError,
    Conflict,
    Damaged,
    LedgerFailed,
    NotFound,
    StaleEpoch,
    WrongIndex,
)
from ledger.frame import Durability, FinishReason, StreamEnd, Token, encode, index_of
from ledger.interface import Append, NewStream, Record
from ledger.sqlite.file import SqliteFile
from ledger.sqlite.ledger import SqliteLedger
from ledger.sqlite.tail import SEGMENT_BYTES

pytestmark = pytest.mark.anyio

A, B = bytes([1]) * 16, bytes([2]) * 16
TTL_S = 60.0


class Clock:
    """Unix time in ms that moves only when told."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


@asynccontextmanager
async def opened(path: Path, clock: Clock | None = None) -> AsyncIterator[SqliteLedger]:
    ledger = await SqliteLedger.open(path / "ledger.db", clock or Clock())
    try:
        yield ledger
    finally:
        await ledger.close()


def new(stream: bytes = A, durability: Durability = Durability.PROCESS) -> NewStream:
    return NewStream(stream, '{"prompt_ids":[1,2]}', durability, TTL_S)


def token(index: int, text: str = " the") -> Record:
    return Record(encode(Token(text, index)), (index, index + 1))


def end(index: int) -> Record:
    return Record(encode(StreamEnd(index, FinishReason.LENGTH, index, 2)), (99,))


def tokens(stream: bytes, indexes: Sequence[int], epoch: int = 1) -> list[Append]:
    return [Append(stream, epoch, index, token(index)) for index in indexes]


async def finish(ledger: SqliteLedger, stream: bytes, count: int) -> list[Record]:
    """Append `count` tokens and the end; returns the records."""
    records = [*(token(index) for index in range(count)), end(count)]
    batch = [Append(stream, 1, index, record) for index, record in enumerate(records)]
    assert await ledger.append(batch) == []
    return records


def indexes(records: Sequence[Record]) -> list[int]:
    return [index_of(record.frame) for record in records]


async def test_what_was_appended_is_read_from_any_index(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, range(50)))
        for start in range(51):
            assert await ledger.read(A, start, 1000) == [token(i) for i in range(start, 50)]
        assert await ledger.read(A, 10, 3) == [token(10), token(11), token(12)]


async def test_replay_crosses_segments_and_tail_without_gap_or_double(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        long = "x" * (SEGMENT_BYTES // 3)
        for index in range(20):
            await ledger.append([Append(A, 1, index, token(index, long))])
        assert ledger.tip(A, 0, 1) is None  # the first ones lie in segments now
        assert ledger.tip(A, 19, 1) == [token(19, long).frame]
        for start in range(21):
            assert indexes(await ledger.read(A, start, 100)) == list(range(start, 20))
            frames = [token(index, long).frame for index in range(start, 20)]
            assert await ledger.frames(A, start, 100) == frames


async def test_a_watched_stream_keeps_its_last_segment_in_memory(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        ledger.watch(A, lambda: None)
        half = "x" * (SEGMENT_BYTES // 2)
        for index in range(7):
            await ledger.append([Append(A, 1, index, token(index, half))])
        assert ledger.tip(A, 3, 1) is None
        assert ledger.tip(A, 4, 9) == [token(index, half).frame for index in (4, 5, 6)]


async def test_a_watcher_is_woken_only_when_the_frame_is_in_the_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        seen: list[tuple[int, int]] = []
        outside = sqlite3.connect(tmp_path / "ledger.db")

        def wake() -> None:
            [(rows,)] = outside.execute("SELECT count(*) FROM log")
            seen.append((ledger.released(A), rows))

        ledger.watch(A, wake)
        for index in range(3):
            await ledger.append(tokens(A, [index]))
        ledger.unwatch(A, wake)
        await ledger.append(tokens(A, [3]))
        outside.close()
        assert seen == [(1, 1), (2, 2), (3, 3)]


async def test_relaxed_streams_are_released_before_the_commit(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new(durability=Durability.RELAXED))
        woken: list[int] = []
        ledger.watch(A, lambda: woken.append(ledger.released(A)))
        outside = sqlite3.connect(tmp_path / "ledger.db")
        assert await ledger.append(tokens(A, [0])) == []
        assert woken == [1]
        assert outside.execute("SELECT count(*) FROM log").fetchone() == (0,)
        outside.close()
    async with opened(tmp_path) as ledger:
        assert await ledger.read(A, 0, 10) == [token(0)]


async def test_a_power_stream_is_fsynced_and_only_then_released(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new(A))
        await ledger.create(new(B, Durability.POWER))
        levels: list[object] = []

        async def append(batch: list[Append]) -> None:
            assert await ledger.append(batch) == []
            assert isinstance(ledger._storage, SqliteFile)
            levels.append(ledger._storage._writer.execute("PRAGMA synchronous").get)

        await append(tokens(A, [0]))
        await append(tokens(B, [0]))
        await append(tokens(A, [1]))
        await append([*tokens(A, [2]), *tokens(B, [1])])  # one group: the stricter one rules
        normal, full = 1, 2  # SQLite's numbers; FULL syncs the WAL in every commit
        assert levels == [normal, full, normal, full]


async def test_streams_share_one_commit_while_another_is_in_flight(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        streams = [bytes([n]) * 16 for n in range(1, 33)]
        for stream in streams:
            await ledger.create(new(stream))
        await asyncio.gather(*(ledger.append(tokens(stream, [0])) for stream in streams))
        [(rows,)] = sqlite3.connect(tmp_path / "ledger.db").execute("SELECT count(*) FROM log")
        assert rows <= 2


async def test_a_taken_over_stream_refuses_its_old_producer(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        assert await ledger.take_over(A) == 2
        [refusal] = await ledger.append(tokens(A, [1], epoch=1))
        assert isinstance(refusal.error, StaleEpoch)
        assert await ledger.append(tokens(A, [1], epoch=2)) == []
    async with opened(tmp_path) as ledger:  # the epoch outlives the process
        [refusal] = await ledger.append(tokens(A, [2], epoch=1))
        assert isinstance(refusal.error, StaleEpoch)
        assert await ledger.take_over(A) == 3


async def test_one_bad_append_does_not_cost_its_batch(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new(A))
        await ledger.create(new(B))
        batch = [*tokens(A, [0, 0, 2]), *tokens(B, [0])]
        refused = await ledger.append(batch)
        assert [refusal.append for refusal in refused] == [batch[1], batch[2]]
        assert all(isinstance(refusal.error, WrongIndex) for refusal in refused)
        assert indexes(await ledger.read(A, 0, 10)) == [0]
        assert indexes(await ledger.read(B, 0, 10)) == [0]


async def test_ids_and_recipe_come_back_for_a_continuation(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, range(3)))
    async with opened(tmp_path) as ledger:
        assert await ledger.unfinished() == [A]
        assert (await ledger.info(A)).recipe == '{"prompt_ids":[1,2]}'
        ids = [record.ids for record in await ledger.read(A, 0, 10)]
        assert ids == [(0, 1), (1, 2), (2, 3)]


async def test_a_reopened_ledger_goes_on_where_it_was(tmp_path: Path) -> None:
    for start in range(0, 30, 10):
        async with opened(tmp_path) as ledger:
            if start == 0:
                await ledger.create(new())
            for index in range(start, start + 10):
                assert await ledger.append(tokens(A, [index])) == []
    async with opened(tmp_path) as ledger:
        assert indexes(await ledger.read(A, 0, 100)) == list(range(30))


async def test_an_ended_stream_is_whole_after_reopening(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        records = await finish(ledger, A, 5)
        [refusal] = await ledger.append(tokens(A, [6]))
        assert isinstance(refusal.error, Conflict)
    async with opened(tmp_path) as ledger:
        info = await ledger.info(A)
        assert (info.ended, info.next_index) == (True, 6)
        assert await ledger.read(A, 0, 100) == records
        assert await ledger.unfinished() == []


async def test_an_idempotency_key_names_one_stream(tmp_path: Path) -> None:
    first = NewStream(A, "{}", Durability.PROCESS, TTL_S, "key", b"request")
    again = NewStream(B, "{}", Durability.PROCESS, TTL_S, "key", b"request")
    other = NewStream(B, "{}", Durability.PROCESS, TTL_S, "key", b"another request")
    async with opened(tmp_path) as ledger:
        assert (await ledger.create(first))[1] is True
        info, created = await ledger.create(again)
        assert (info.stream, created) == (A, False)
        with pytest.raises(Conflict, match="another request"):
            await ledger.create(other)


async def test_two_opens_with_one_key_at_once_make_one_stream(tmp_path: Path) -> None:
    news = [NewStream(bytes([n]) * 16, "{}", Durability.PROCESS, TTL_S, "key") for n in range(1, 9)]
    async with opened(tmp_path) as ledger:
        made = await asyncio.gather(*(ledger.create(each) for each in news))
        assert len({info.stream for info, _ in made}) == 1
        assert [created for _, created in made].count(True) == 1


async def test_an_unknown_stream_is_not_found(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        with pytest.raises(NotFound) as error:
            await ledger.info(B)
        assert error.value.code == "unknown_stream"


async def test_retention_slides_with_reads_and_spares_what_runs(tmp_path: Path) -> None:
    clock = Clock()
    ttl_ms = int(TTL_S * 1000)
    async with opened(tmp_path, clock) as ledger:
        await ledger.create(new(A))
        await ledger.create(new(B))
        await finish(ledger, A, 3)
        clock.now += ttl_ms - 1
        await ledger.read(A, 0, 10)
        clock.now += ttl_ms - 1
        assert await ledger.expire() == 0
        clock.now += 2
        assert await ledger.expire() == 1
        with pytest.raises(NotFound):
            await ledger.info(A)
        assert (await ledger.info(B)).ended is False
    [(left,)] = sqlite3.connect(tmp_path / "ledger.db").execute("SELECT count(*) FROM segment")
    assert left == 0


async def test_the_log_is_pruned_once_segments_hold_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for n in range(1, 9):
            await ledger.create(new(bytes([n]) * 16))
            await finish(ledger, bytes([n]) * 16, 3)
    [(rows,)] = sqlite3.connect(tmp_path / "ledger.db").execute("SELECT count(*) FROM log")
    assert rows == 0


async def test_pruning_spares_what_no_segment_holds_yet(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new(A))
        await ledger.create(new(B))
        await ledger.append(tokens(A, [0]))  # the oldest row of the log, and only there
        await finish(ledger, B, 3)
        await ledger.append(tokens(A, [1]))
    async with opened(tmp_path) as ledger:
        assert await ledger.read(A, 0, 10) == [token(0), token(1)]


async def test_a_second_process_cannot_open_the_same_ledger(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(ConfigError, match="in use by another process"):
            await SqliteLedger.open(tmp_path / "ledger.db", Clock())


async def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    foreign = sqlite3.connect(tmp_path / "ledger.db")
    foreign.execute("CREATE TABLE theirs (x)")
    foreign.commit()
    foreign.close()
    with pytest.raises(ConfigError, match="another program's file"):
        await SqliteLedger.open(tmp_path / "ledger.db", Clock())
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "ledger.db").write_text("not a database, but long enough to be read")
    with pytest.raises(ConfigError, match="not a database"):
        await SqliteLedger.open(tmp_path / "text" / "ledger.db", Clock())


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    file = sqlite3.connect(tmp_path / "ledger.db")
    file.execute("PRAGMA user_version = 99")
    file.close()
    with pytest.raises(ConfigError, match="a ledger of version 99"):
        await SqliteLedger.open(tmp_path / "ledger.db", Clock())


async def test_a_damaged_log_row_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
    file = sqlite3.connect(tmp_path / "ledger.db")
    file.execute("UPDATE log SET batch = x'00112233445566'")
    file.commit()
    file.close()
    with pytest.raises(Damaged, match="log row 1 does not match its checksum"):
        await SqliteLedger.open(tmp_path / "ledger.db", Clock())


async def test_a_missing_log_row_is_noticed_at_recovery(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        for index in range(3):
            await ledger.append(tokens(A, [index]))
    file = sqlite3.connect(tmp_path / "ledger.db")
    file.execute("DELETE FROM log WHERE seq = 2")
    file.commit()
    file.close()
    with pytest.raises(Damaged, match="jumps from index 1 to 2"):
        await SqliteLedger.open(tmp_path / "ledger.db", Clock())


async def test_after_a_failed_write_nothing_is_released_and_nothing_more_is_taken(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        outside = sqlite3.connect(tmp_path / "ledger.db")
        outside.execute("DROP TABLE log")
        outside.close()
        with pytest.raises(LedgerFailed):
            await ledger.append(tokens(A, [1]))
        assert ledger.released(A) == 1
        with pytest.raises(LedgerFailed):
            await ledger.append(tokens(A, [1]))
        with pytest.raises(LedgerFailed):
            await ledger.create(new(B))


async def test_a_cancelled_producer_does_not_cancel_its_neighbours(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new(A))
        await ledger.create(new(B))
        leaving = asyncio.ensure_future(ledger.append(tokens(A, [0])))
        staying = asyncio.ensure_future(ledger.append(tokens(B, [0])))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await staying == []
        assert indexes(await ledger.read(B, 0, 10)) == [0]
        assert indexes(await ledger.read(A, 0, 10)) == [0]


async def test_an_append_to_an_unknown_stream_does_not_cost_its_batch(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new(A))
        [refusal] = await ledger.append([*tokens(B, [0]), *tokens(A, [0])])
        assert isinstance(refusal.error, NotFound)
        assert indexes(await ledger.read(A, 0, 10)) == [0]


async def test_a_deleted_stream_is_gone_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new(A))
        await ledger.append(tokens(A, range(3)))
        deleting = asyncio.ensure_future(ledger.delete(A))
        await asyncio.gather(ledger.append(tokens(A, [3])), deleting)
        with pytest.raises(NotFound):
            await ledger.info(A)
    async with opened(tmp_path) as ledger:
        await ledger.create(new(B))
        await ledger.append(tokens(B, [0]))
    async with opened(tmp_path) as ledger:
        assert indexes(await ledger.read(B, 0, 10)) == [0]


async def test_idle_streams_leave_memory_and_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        streams = [n.to_bytes(16, "big") for n in range(1, 200)]
        for stream in streams:
            await ledger.create(new(stream))
            await ledger.append(tokens(stream, range(3)))
        for _ in range(3):
            await ledger.expire()
            while ledger._ripe:
                await ledger.delete(streams.pop())
        assert ledger._tails == {}
        for stream in streams:
            assert await ledger.append(tokens(stream, [3])) == []
            assert indexes(await ledger.read(stream, 0, 10)) == [0, 1, 2, 3]


async def test_a_watched_stream_that_rests_keeps_no_frame_in_memory(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        woken: list[int] = []
        ledger.watch(A, lambda: woken.append(ledger.released(A)))
        await ledger.append(tokens(A, range(5)))
        for _ in range(3):
            await ledger.expire()
        assert ledger.tip(A, 0, 9) is None
        assert len(await ledger.frames(A, 0, 9)) == 5
        await ledger.append(tokens(A, [5]))
        assert woken == [5, 6]
        assert ledger.tip(A, 5, 9) == [token(5).frame]
