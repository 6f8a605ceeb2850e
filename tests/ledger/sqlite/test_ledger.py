"""Behaviour of the ledger in a file alone; `test_behaviour` tests what every ledger does."""

import asyncio
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path

import apsw
import pytest

from tailrace.ledger.errors import ConfigError, Damaged, LedgerFailed, NotFound
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Append
from tailrace.ledger.sqlite import commit_log as sqlite_log
from tailrace.ledger.sqlite.commit_log import PRUNE_ROWS
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.tail import SEGMENT_BYTES
from tests.ledger.backends import (
    A,
    B,
    Clock,
    end,
    finish,
    indexes,
    new,
    opened_file,
    token,
    tokens,
)
from tests.ledger.ledger_files import SqlitePlace

pytestmark = pytest.mark.anyio


def opened(folder: Path, clock: Clock | None = None) -> AbstractAsyncContextManager[SqliteLedger]:
    return opened_file(folder / "ledger.db", clock)


async def test_replay_crosses_segments_and_tail_without_gap_or_double(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        long = "x" * (SEGMENT_BYTES // 3)
        for index in range(20):
            await ledger.append([Append(A, 1, index, token(index, long))])
        assert ledger.tail(A).take(0, 1) is None  # the first ones lie in segments now
        assert ledger.tail(A).take(19, 1) == [token(19, long).frame]
        for start in range(21):
            assert indexes(await ledger.read(A, start, 100)) == list(range(start, 20))
            frames = [token(index, long).frame for index in range(start, 20)]
            assert await ledger.frames(A, start, 100) == frames


async def test_short_streams_that_come_without_a_pause_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the log, where a slow stream has its last frame in an old row of it."""
    monkeypatch.setattr(sqlite_log, "MAX_TAIL_BATCHES", 20)
    monkeypatch.setattr(sqlite_log, "MAX_DUE_FOR_AGE", 1)
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        for step in range(60):
            streams = [(100 * step + n).to_bytes(16, "big") for n in range(64)]
            await asyncio.gather(*(ledger.create(new(stream)) for stream in streams))
            await ledger.append([tokens(stream, [0])[0] for stream in streams])
            await ledger.append([Append(stream, 1, 1, end(1)) for stream in streams])
        assert len(ledger._residents.unstored) < 20 * 64
        assert len(ledger._log._rows._sizes) < 2 * 20 + PRUNE_ROWS
        assert await ledger._storage.covered(1) == 1


async def test_a_watched_stream_keeps_its_last_segment_in_memory(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        ledger.watch(A, lambda: None)
        half = "x" * (SEGMENT_BYTES // 2)
        for index in range(7):
            await ledger.append([Append(A, 1, index, token(index, half))])
        assert ledger.tail(A).take(3, 1) is None
        assert ledger.tail(A).take(4, 9) == [token(index, half).frame for index in (4, 5, 6)]


def count(folder: Path, table: str) -> int:
    with closing(apsw.Connection(str(folder / "ledger.db"))) as connection:
        [(rows,)] = connection.execute(f"SELECT count(*) FROM {table}")
    return int(rows)


async def test_a_watcher_is_woken_only_when_the_frame_is_in_the_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        seen: list[tuple[int, int]] = []
        outside = apsw.Connection(str(tmp_path / "ledger.db"))

        def wake() -> None:
            [(rows,)] = outside.execute("SELECT count(*) FROM log")
            seen.append((ledger.tail(A).released, rows))

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
        ledger.watch(A, lambda: woken.append(ledger.tail(A).released))
        outside = apsw.Connection(str(tmp_path / "ledger.db"))
        assert await ledger.append(tokens(A, [0])) == []
        assert woken == [1]
        assert outside.execute("SELECT count(*) FROM log").fetchall() == [(0,)]
        outside.close()
    async with opened(tmp_path) as ledger:
        assert await ledger.read(A, 0, 10) == [token(0)]


async def test_streams_share_one_commit_while_another_is_in_flight(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        streams = [bytes([n]) * 16 for n in range(1, 33)]
        for stream in streams:
            await ledger.create(new(stream))
        await asyncio.gather(*(ledger.append(tokens(stream, [0])) for stream in streams))
        rows = count(tmp_path, "log")
        assert rows <= 2


async def test_the_log_is_pruned_once_segments_hold_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for n in range(1, 9):
            await ledger.create(new(bytes([n]) * 16))
            await finish(ledger, bytes([n]) * 16, 3)
    rows = count(tmp_path, "log")
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
    SqlitePlace(tmp_path).edit("CREATE TABLE theirs (x)")
    with pytest.raises(ConfigError, match="another program's file"):
        await SqliteLedger.open(tmp_path / "ledger.db", Clock())
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "ledger.db").write_text("not a database, but long enough to be read")
    with pytest.raises(ConfigError, match="not a database"):
        await SqliteLedger.open(tmp_path / "text" / "ledger.db", Clock())


async def test_a_sqlite_that_may_damage_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.51.2")
    with pytest.raises(ConfigError, match=r"SQLite 3\.51\.2 may damage"):
        await SqliteLedger.open(tmp_path / "ledger.db", Clock())


async def test_a_watcher_that_raises_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        woken: list[bytes] = []

        def fail() -> None:
            raise ValueError("a reader that is broken")

        for stream in (A, B):
            await ledger.create(new(stream))
        ledger.watch(A, fail)
        ledger.watch(A, lambda: woken.append(A))
        ledger.watch(B, lambda: woken.append(B))
        async with asyncio.timeout(60):
            await ledger.append(tokens(A, [0]) + tokens(B, [0]))
        assert woken == [A, B]
        assert (ledger.tail(A).released, ledger.tail(B).released) == (1, 1)


@pytest.mark.parametrize(("version", "hint"), [(99, "use that release"), (4, "move the file away")])
async def test_another_schema_is_refused(tmp_path: Path, version: int, hint: str) -> None:
    async with opened(tmp_path):
        pass
    SqlitePlace(tmp_path).edit(f"PRAGMA user_version = {version}")
    with pytest.raises(ConfigError, match=f"a ledger of version {version}.*{hint}"):
        await SqliteLedger.open(tmp_path / "ledger.db", Clock())


async def test_a_missing_log_row_is_noticed_at_recovery(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        for index in range(3):
            await ledger.append(tokens(A, [index]))
    SqlitePlace(tmp_path).edit("DELETE FROM log WHERE seq = 2")
    with pytest.raises(Damaged, match="jumps from index 1 to 2"):
        await SqliteLedger.open(tmp_path / "ledger.db", Clock())


async def test_after_a_failed_write_nothing_is_released_and_nothing_more_is_taken(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        await ledger.append(tokens(A, [0]))
        with closing(apsw.Connection(str(tmp_path / "ledger.db"))) as vandal:
            vandal.execute("DROP TABLE log")
        with pytest.raises(LedgerFailed):
            await ledger.append(tokens(A, [1]))
        assert ledger.tail(A).released == 1
        with pytest.raises(LedgerFailed):
            await ledger.append(tokens(A, [1]))
        with pytest.raises(LedgerFailed):
            await ledger.create(new(B))


async def test_what_a_cancelled_producer_gave_is_stored_all_the_same(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        leaving = asyncio.ensure_future(ledger.append(tokens(A, [0])))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await ledger.append(tokens(A, [1])) == []
        assert indexes(await ledger.read(A, 0, 10)) == [0, 1]


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
            while ledger._residents.due_tails:
                await ledger.delete(streams.pop())
        assert ledger._residents.tails == {}
        for stream in streams:
            assert await ledger.append(tokens(stream, [3])) == []
            assert indexes(await ledger.read(stream, 0, 10)) == [0, 1, 2, 3]


async def test_a_watched_stream_that_rests_keeps_no_frame_in_memory(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.create(new())
        woken: list[int] = []
        ledger.watch(A, lambda: woken.append(ledger.tail(A).released))
        await ledger.append(tokens(A, range(5)))
        for _ in range(3):
            await ledger.expire()
        assert ledger.tail(A).take(0, 9) is None
        assert len(await ledger.frames(A, 0, 9)) == 5
        await ledger.append(tokens(A, [5]))
        assert woken == [5, 6]
        assert ledger.tail(A).take(5, 9) == [token(5).frame]
