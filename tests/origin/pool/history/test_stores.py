"""One history in a file and in PostgreSQL: what is written is read, rolled up and forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.origin.pool.history import queries, schema
from tailrace.origin.pool.history.recorder import HistoryRecorder
from tailrace.origin.pool.history.schema import (
    COLD,
    DAY_MS,
    HOT,
    HOUR_MS,
    HistoryEntry,
    HistoryStore,
    Keeping,
)
from tailrace.origin.pool.history.sqlite_file import SqliteHistory
from tailrace.origin.pool.records import PoolChoice, PoolDecision
from tailrace.origin.workers.load_spans import LoadStage, WorkerStart
from tests.ledger.postgres_server import PostgresServer

pytestmark = pytest.mark.anyio

NOON_MS = 500 * DAY_MS + 12 * HOUR_MS
KEPT = PoolDecision("a", 0.0, "break-even", PoolChoice.KEEP, "it pays")


@pytest.fixture(params=["file", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HistoryStore]:
    if request.param == "file":
        opened: HistoryStore = await SqliteHistory.open(tmp_path / "history.db", 0)
    else:
        from tailrace.origin.pool.history.postgres_tables import PostgresHistory

        opened = await PostgresHistory.open(request.getfixturevalue("database"))
    yield opened
    await opened.close()


async def hours(store: HistoryStore) -> list[dict[str, int | str]]:
    """Return what has been rolled up."""
    keys = ("hour_ms", "model", "arrivals", "cold", "took_ms", "tokens")
    query = f"SELECT {', '.join(keys)} FROM arrival_hour ORDER BY hour_ms, model"
    return [dict(zip(keys, row, strict=True)) for row in await store.rows(query)]


class Pool:
    """A pool that reports to a recorder, at times that the test sets."""

    def __init__(self, store: HistoryStore, keeping: Keeping | None = None) -> None:
        self.now_ms = NOON_MS
        self.store = store
        self.recorder = HistoryRecorder(
            self._opened,
            "here",
            keeping or Keeping(30 * DAY_MS, 1000),
            lambda: self.now_ms,
            clock_s=lambda: self.now_ms / 1e3,
        )
        self._streams = iter(range(1, 1 << 16))

    async def _opened(self) -> HistoryStore:
        return self.store

    def request(self, model: str, took_ms: int, found: str = HOT) -> None:
        stream = next(self._streams).to_bytes(16)
        self.recorder.arrived(stream, model, found)
        before, self.now_ms = self.now_ms, self.now_ms + took_ms
        self.recorder.served(stream, 5, 3, "stop")
        self.now_ms = before


async def test_requests_are_read_as_a_trace_and_counted_by_model(store: HistoryStore) -> None:
    pool = Pool(store)
    pool.request("a", 2000, COLD)
    pool.now_ms += 10_000
    pool.request("b\0", 1000)
    pool.request("a", 500)
    await pool.recorder.flush()
    trace = await queries.arrivals(store)
    assert trace.names == ("a", "b\N{REPLACEMENT CHARACTER}")
    assert trace.arrival_s.tolist() == [0, 10, 10]
    assert sorted(trace.duration_s.tolist()) == [0.5, 1, 2]
    first = (await queries.models(store, 0))[0]
    assert first == {
        "model": "a",
        "arrivals": 2,
        "cold": 1,
        "last_ms": pool.now_ms,
        "first_ms": 5,
        "took_ms": 2500,
    }
    assert await queries.models(store, pool.now_ms + 1) == []


async def test_a_batch_that_a_table_cannot_hold_is_dropped_and_the_next_is_stored(
    store: HistoryStore,
) -> None:
    pool = Pool(store)
    pool.recorder.arrived(bytes(16), "a", HOT)
    pool.recorder.served(bytes(16), 2**70, 1, "length")
    await pool.recorder.flush()
    assert (pool.recorder.dropped, pool.recorder.written) == (2, 0)
    pool.recorder.arrived(bytes(16), "a", HOT)
    await pool.recorder.flush()
    [told] = await queries.models(store, 0)
    assert (told["model"], told["arrivals"]) == ("a", 1)


async def test_text_that_postgres_refuses_is_a_value_error(database: str) -> None:
    from tailrace.origin.pool.history.postgres_tables import PostgresHistory

    store = await PostgresHistory.open(database)
    entry = HistoryEntry(schema.ARRIVED, ("00", "here", 1, "a\0b", HOT))
    with pytest.raises(ValueError, match="NUL"):
        await store.write([entry])
    await store.write([entry._replace(values=("00", "here", 1, "ab", HOT))])
    await store.close()


async def test_starts_decisions_and_tiers_are_told_again(store: HistoryStore) -> None:
    pool = Pool(store)
    now_s = NOON_MS / 1e3
    stages = (LoadStage("fork", now_s - 3, now_s - 2), LoadStage("read", now_s - 2, now_s, 1 << 33))
    pool.recorder.loaded(0, "a", WorkerStart("fork", now_s - 3, now_s, stages))
    pool.recorder.record(replace(KEPT, features={"cold": 60.0}, keep_until_s=KEPT.at_s))
    pool.now_ms += 5000
    pool.recorder.changed_tier(0, "a", COLD, "it died")
    await pool.recorder.flush()
    (load,) = await queries.loads(store, "a", 5)
    assert (load["ms"], load["attributed"], load["asked_ms"]) == (3000, 1.0, NOON_MS - 3000)
    assert [(one["stage"], one["ms"], one["bytes"]) for one in load["stages"]] == [
        ("fork", 1000, 0),
        ("read", 2000, 1 << 33),
    ]
    assert await queries.typical_load_s(store) == await queries.typical_load_s(store, "a") == 3
    assert await queries.typical_load_s(store, "b") is None
    (told,) = await queries.decisions(store, "a", 5)
    assert (told["features"], told["shadow"], told["until_ms"]) == ({"cold": 60.0}, False, NOON_MS)
    pool.recorder.changed_tier(0, "a", HOT, "it is ready")
    pool.recorder.changed_tier(1, "b", HOT, "it is ready")
    pool.now_ms += 1000
    pool.recorder.changed_tier(-1, "", COLD, "the origin has started")
    pool.now_ms += 1000
    pool.recorder.changed_tier(0, "a", HOT, "it is ready")
    await pool.recorder.flush()
    assert [
        (lane.worker, lane.from_ms - NOON_MS, lane.until_ms and lane.until_ms - NOON_MS)
        for lane in await queries.residence(store, 0)
    ] == [(0, 0, 5000), (0, 5000, 6000), (1, 5000, 6000), (0, 7000, None)]
    pool.recorder.changed_tier(-1, "a", "host", "its time is over")
    await pool.recorder.flush()
    lanes = [(lane.worker, lane.model) for lane in await queries.residence(store, 0)]
    assert lanes == [(1, "b"), (-1, "a")]  # the pool knows better than a's workers
    assert pool.recorder.written == 10


async def test_what_is_too_old_becomes_counts_by_the_hour_and_then_nothing(
    store: HistoryStore,
) -> None:
    pool = Pool(store)
    for found in (COLD, HOT, HOT):
        pool.request("a", 1000, found)
    pool.recorder.record(KEPT)
    pool.now_ms += 30 * DAY_MS + 1
    pool.request("a", 1000)
    await pool.recorder.flush()
    await pool.recorder.keep()
    await pool.recorder.keep()  # and once more: nothing is counted twice
    (hour,) = await hours(store)
    assert hour == {
        "hour_ms": NOON_MS,
        "model": "a",
        "arrivals": 3,
        "cold": 1,
        "took_ms": 3000,
        "tokens": 9,
    }
    assert len(await queries.arrivals(store)) == 1
    assert await queries.decisions(store, "a", 5) == []
    pool.now_ms += schema.HOURS_KEPT_MS - HOUR_MS
    await pool.recorder.keep()
    assert [one["arrivals"] for one in await hours(store)] == [1]


async def test_of_too_many_requests_the_oldest_are_rolled_up(store: HistoryStore) -> None:
    pool = Pool(store, Keeping(30 * DAY_MS, 3))
    for _ in range(5):
        pool.request("a", 100)
        pool.now_ms += 1000
    await pool.recorder.flush()
    await pool.recorder.keep()
    assert len(await queries.arrivals(store)) == 3
    assert [one["arrivals"] for one in await hours(store)] == [2]


async def test_tables_of_a_newer_version_are_refused(
    database: str, postgres: PostgresServer
) -> None:
    from tailrace.origin.pool.history.postgres_tables import PostgresHistory

    await (await PostgresHistory.open(database)).close()
    postgres.execute("UPDATE tailrace_history.version SET version = 9", database)
    with pytest.raises(ConfigError, match="of version 9, not 1"):
        await PostgresHistory.open(database)
