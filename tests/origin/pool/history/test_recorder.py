"""A history that cannot be kept, in part or at all: it is said, and what it is about goes on."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tailrace.ledger.errors import CallerError, ConfigError, Unavailable
from tailrace.ledger.record_extra import StreamLife
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.pool.history import queries, recorder
from tailrace.origin.pool.history.recorder import HistoryRecorder
from tailrace.origin.pool.history.schema import (
    COLD,
    DAY_MS,
    HOT,
    HistoryEntry,
    HistoryStore,
    Keeping,
)
from tailrace.origin.pool.history.sqlite_file import SqliteHistory
from tailrace.origin.pool.records import PoolChoice, PoolDecision
from tests.origin.stage import RECIPE, A, B, Stage
from tests.test_house import ROOT

pytestmark = pytest.mark.anyio


def recorder_of(path: Path) -> HistoryRecorder:
    return HistoryRecorder(
        lambda: SqliteHistory.open(path, 7), "here", Keeping(DAY_MS, 1000), lambda: DAY_MS
    )


async def close(history: HistoryRecorder) -> None:
    """Also after a failed assertion, or the thread of its file keeps pytest from ending."""
    if history.store is not None:
        await history.store.close()


def statement(path: Path, text: str) -> list[Any]:
    """By anything that reads SQLite."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(text).fetchall()


async def test_an_origins_requests_and_workers_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 1000)
    stage = Stage(ledger)
    history = stage.runs.recorder = recorder_of(path)
    running = asyncio.create_task(history.run())
    await stage.start(B)
    slot, run = await stage.running(A)
    stage.clock_s += 0.25
    await stage.step(slot, run, 0, "a")
    await stage.step(slot, run, 1, None)
    await stage.lost(slot)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await ledger.close()
    assert statement(path, "SELECT stream, model, found, first_ms, tokens, outcome FROM arrival"
                     " ORDER BY found") == [
        (B.hex(), "demo", COLD, None, None, None),
        (A.hex(), "demo", HOT, 250, 1, "length"),
    ]  # fmt: skip
    assert statement(path, "SELECT worker, model, tier, reason FROM tier WHERE worker >= 0") == [
        (0, "demo", HOT, "it is ready"),
        (0, "demo", COLD, "ended by SIGKILL"),
    ]


async def test_the_query_in_the_docs_reads_a_recorded_history(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    history = recorder_of(path)
    try:
        for stream, found, first_ms in ((A, HOT, 20), (B, COLD, 1500)):
            history.arrived(stream, "demo", found)
            history.served(stream, first_ms, 3, "stop")
        await history.flush()
    finally:
        await close(history)
    page = (ROOT / "docs" / "warm-pools.md").read_text("utf-8")
    [query] = re.findall(r'^sqlite3 \.tailrace/history\.db "(.*)"$', page, re.MULTILINE)
    assert statement(path, query) == [("demo", 1, 1500.0)]


async def test_the_first_frame_of_a_cold_start_is_the_one_behind_its_notices(
    tmp_path: Path,
) -> None:
    path = tmp_path / "history.db"
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 1000)
    stage = Stage(ledger)
    history = stage.runs.recorder = recorder_of(path)
    try:
        notices = (("loading", "is loaded"),)
        cold = RECIPE.model_copy(update={"notices": notices, "fingerprint": ""})
        await stage.start(A, cold)
        stage.clock_s += 2.0
        one, two = stage.slots
        await stage.ready(one)
        run, _ = one.last
        stage.clock_s += 0.5
        await stage.step(one, run, 1, "a")
        await stage.lost(one)
        stage.clock_s += 1.0
        await stage.ready(two)
        run, _ = two.last
        await stage.step(two, run, 2, None)
        life = StreamLife.of((await ledger.read(A, 2, 1))[0])
        assert life is not None and (life.first_ms, life.whole_ms) == (2500, 3500)
        await history.flush()
        assert history.store is not None
        [told] = await queries.models(history.store, 0)
        assert (told["cold"], told["first_ms"]) == (1, 2500)
    finally:
        await close(history)
        await ledger.close()


async def test_of_requests_without_a_first_frame_none_is_told(tmp_path: Path) -> None:
    history = recorder_of(tmp_path / "history.db")
    history.arrived(A, "demo", COLD)
    history.served(A, None, 0, "failed")
    await history.flush()
    try:
        assert history.store is not None
        [told] = await queries.models(history.store, 0)
        assert told["first_ms"] is None
    finally:
        await close(history)


@pytest.mark.parametrize("at", [20, 5000])
async def test_a_damaged_file_is_set_aside_and_a_new_one_begun(tmp_path: Path, at: int) -> None:
    path = tmp_path / "history.db"
    before = recorder_of(path)
    for number in range(400):
        before.arrived(number.to_bytes(16), f"model-{number}", HOT)
    await before.flush()
    assert before.store is not None
    await before.store.close()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 9000)
    after = recorder_of(path)
    after.arrived(A, "demo", HOT)
    await after.flush()
    assert after.store is not None
    assert (await queries.arrivals(after.store)).names == ("demo",)
    await after.store.close()
    assert b"model-399" in (tmp_path / "history.db.damaged-7").read_bytes()


async def test_damage_that_is_met_while_it_is_written_is_set_aside_as_well(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    history = recorder_of(path)
    await history.flush()
    with path.open("r+b") as file:
        file.write(b"\xff" * 30_000)
    history.arrived(A, "demo", HOT)
    await history.attempt(history.flush)
    assert "malformed" in str(history.problem) or "not a database" in str(history.problem)
    await history.attempt(history.flush)
    assert (history.described()["problem"], history.written) == (None, 1)
    assert history.store is not None
    await history.store.close()
    assert (tmp_path / "history.db.damaged-7").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("PRAGMA user_version = 9", "is a history of version 9, not 1"),
        ("PRAGMA application_id = 9", "is not a history of Tailrace"),
    ],
)
async def test_what_another_program_wrote_is_left_alone(
    tmp_path: Path, change: str, says: str
) -> None:
    path = tmp_path / "history.db"
    await (await SqliteHistory.open(path, 0)).close()
    statement(path, change)
    kept = path.read_bytes()
    history = recorder_of(path)
    history.arrived(A, "demo", HOT)
    await history.attempt(history.flush)
    assert says in str(history.described()["problem"])
    with pytest.raises(ConfigError, match="history"):
        await SqliteHistory.read(path)
    assert path.read_bytes() == kept


async def test_what_finds_the_queue_full_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Away:
        name = "away"

        async def write(self, entries: Sequence[HistoryEntry]) -> None:
            raise Unavailable("it is away")

        async def close(self) -> None: ...

    async def opening() -> Any:
        return Away()

    monkeypatch.setattr(recorder, "MAX_QUEUED", 2)
    history = HistoryRecorder(opening, "here", Keeping(1, 1), lambda: 0)
    for stream in (A, B):
        history.arrived(stream, "demo", HOT)
    await history.attempt(history.flush)
    history.arrived(A, "demo", HOT)
    assert history.described() == {
        "history": "away",
        "problem": "it is away",
        "written": 0,
        "waiting": 2,
        "dropped": 1,
    }


async def test_no_history_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no history at"):
        await SqliteHistory.read(tmp_path / "history.db")
    store = await SqliteHistory.open(tmp_path / "history.db", 0)
    with pytest.raises(CallerError, match="no request is recorded"):
        await queries.arrivals(store)
    await store.close()


async def test_a_time_beyond_what_a_column_holds_is_stored_as_the_latest_that_it_does(
    tmp_path: Path,
) -> None:
    path = tmp_path / "history.db"
    history = recorder_of(path)
    choice, reason = PoolChoice.KEEP, "kept"
    history.record(PoolDecision("demo", 0.0, "ttl-1e30", choice, reason, {}, 1e30, 1e30))
    await history.attempt(history.flush)
    assert history.store is not None
    await history.store.close()
    assert statement(path, "SELECT until_ms, prewarm_ms FROM decision") == [(2**63 - 1,) * 2]
    assert (history.written, history.dropped) == (1, 0)


async def test_entries_that_no_history_can_hold_are_dropped_and_end_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "history.db"
    history = recorder_of(path)
    history.served(A, 2**70, 1, "length")
    await history.attempt(history.flush)
    assert (history.written, history.dropped, history.described()["waiting"]) == (0, 1, 0)
    running = asyncio.create_task(history.run())
    history.arrived(B, "demo", HOT)
    while not history.written:  # noqa: ASYNC110
        await asyncio.sleep(0)
    history.served(B, 2**70, 1, "length")  # is written as it ends
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert history.dropped == 3
    assert "aiosqlite" not in str(threading.enumerate())
    assert statement(path, "SELECT stream FROM arrival") == [(B.hex(),)]


async def test_a_history_that_fails_is_logged_once_and_told_until_it_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full:
        name = "full"
        writes = 0
        free = asyncio.Event()

        async def write(self, entries: Sequence[HistoryEntry], *, alone: bool = False) -> None:
            self.writes += 1
            if not self.free.is_set():
                raise OSError("no space left on device")

        async def close(self) -> None: ...

    full = Full()

    async def opening() -> Any:
        return full

    async def learner(store: HistoryStore, origin: str) -> None:
        """Learns nothing."""

    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)
    history = HistoryRecorder(opening, "here", Keeping(1, 1), lambda: 0)
    history.learner = learner
    with capture_logs() as logs:
        running = asyncio.create_task(history.run())
        while full.writes < 8:
            await asyncio.sleep(0)
            assert full.writes < 3 or history.problem == "no space left on device"
        full.free.set()
        while not history.written:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert history.problem is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [one["event"] for one in logs if one["log_level"] == "error"] == ["history.failed"]


async def test_what_a_history_raises_of_itself_ends_nothing() -> None:
    tries: asyncio.Queue[None] = asyncio.Queue()

    async def opening() -> Any:
        tries.put_nowait(None)
        raise ArithmeticError("of a library")

    history = HistoryRecorder(opening, "here", Keeping(1, 1), lambda: 0)
    running = asyncio.create_task(history.run())
    await tries.get()
    await tries.get()
    assert history.problem == "ArithmeticError('of a library')"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
