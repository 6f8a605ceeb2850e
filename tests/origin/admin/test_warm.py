"""Operators' view of a pool over time, and their changes to it, over a real history and pool."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.errors import TailraceError
from tailrace.origin.admin.query import Query
from tailrace.origin.admin.simulation import simulate
from tailrace.origin.admin.warm import WarmHandler
from tailrace.origin.core.events import (
    Command,
    StartWorker,
    StopWorker,
    WorkerDied,
    WorkerReady,
)
from tailrace.origin.metrics import Metrics
from tailrace.origin.pool.history.recorder import HistoryRecorder
from tailrace.origin.pool.history.schema import DAY_MS, HOT, Keeping
from tailrace.origin.pool.history.sqlite_file import SqliteHistory
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.policies import WarmPrices
from tailrace.origin.pool.records import PoolRecord
from tailrace.origin.serving.live_pool import LivePool
from tailrace.origin.serving.model_host import ModelHost
from tests.origin.pool.history.test_stores import NOON_MS, Pool
from tests.origin.stage import READY, Slot, host_of

pytestmark = pytest.mark.anyio


class Office:
    """A pool without processes, whose loads are over at once."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        members = [PoolMember(name, load_s=1.0) for name in ("a", "b", "c")]
        self.live = LivePool(
            members, "ttl-60", {"cpu": 2.0}, WarmPrices(), {}, self._tell, lambda: 100.0
        )
        models = ModelHost(self.live, [], Metrics())
        self.live.carry_out = self._carry_out
        self.admin = WarmHandler(pool.recorder, models, self.live)

    def _tell(self, record: PoolRecord, of_shadow: bool) -> None:
        self.pool.recorder.record(record, shadow=of_shadow)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            assert not isinstance(command, StopWorker)
            if isinstance(command, StartWorker):
                self.live.happen(WorkerReady(command.worker))

    async def ask(self, asked: str, body: Any = None) -> dict[str, Any]:
        part, _, query = asked.partition("?")
        await self.pool.recorder.flush()
        method = "GET" if body is None else "POST"
        given = b"" if body is None else json.dumps(body).encode()
        return await self.admin.answer(part, Query(f"http://operator/?{query}"), method, given)


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    store = await SqliteHistory.open(tmp_path / "history.db", 0)
    yield Office(Pool(store))
    await store.close()


async def test_a_model_that_is_prewarmed_pinned_and_let_go_says_why(office: Office) -> None:
    await office.ask("apply", {"policy": "break-even"})
    assert await office.ask("prewarm", {"model": "a"}) == {"model": "a", "prewarm": True}
    assert await office.ask("pin", {"model": "a"}) == {"model": "a", "pinned": True}
    office.pool.request("a", 500)
    told = await office.ask("?days=2")
    models = {one["model"]: one for one in told["models"]}
    a = models["a"]
    assert (a["tier"], a["residence"], a["pinned"]) == ("compiled", "ready", True)
    assert (a["policy"], a["arrivals"], a["arrivals_hour"]) == ("break-even", 1, 1)
    assert (models["b"]["tier"], models["b"]["arrivals"]) == ("cold", 0)
    assert a["keep_until_ms"] == NOON_MS + 31_000  # a load and the window of a hint from now on
    explained = await office.ask("explain?model=a")
    [decision] = explained["decisions"]
    assert (decision["action"], decision["reason"]) == ("prewarm", "hint: operator")
    assert decision["features"]["share"] == 1.0
    assert explained["now"]["pinned"] and explained["lately"]["arrivals"] == 1
    lanes = (await office.ask("residence"))["residence"]
    assert [(lane["model"], lane["tier"], lane["until_ms"]) for lane in lanes] == [
        ("a", "compiled", None)
    ]
    await office.ask("pin", {"model": "a", "pinned": False})
    assert not (await office.ask("explain?model=a"))["now"]["pinned"]


@pytest.mark.parametrize(
    ("asked", "body", "says"),
    [
        ("prewarm", {}, "model: this field is required"),
        ("prewarm", {"model": "x"}, "no model is called 'x'"),
        ("pin", {"model": "a", "pin": 1}, "pin: unknown field"),
        ("apply", {"policy": "lucky"}, "no policy is called 'lucky'"),
        ("apply", None, "method not allowed (POST)"),
        ("evict", {"model": "a"}, "there is no admin route 'warm/evict'"),
        ("explain?model=x", None, "nothing is recorded of a model 'x' (recorded models: none)"),
        ("?days=0", None, "days: '0' is not valid (a number from 1 to 3650)"),
    ],
)
async def test_what_cannot_be_is_refused(office: Office, asked: str, body: Any, says: str) -> None:
    with pytest.raises(TailraceError) as caught:
        await office.ask(asked, body)
    assert says in str(caught.value)


async def test_an_origin_of_one_model_says_that_it_stays_loaded(tmp_path: Path) -> None:
    recorder = HistoryRecorder(None, "here", Keeping(DAY_MS, 1000), lambda: NOON_MS)
    slot, metrics = Slot(0), Metrics()
    models = host_of([slot], metrics)
    handler = WarmHandler(recorder, models, None)
    told = await handler.answer("", Query("http://operator/"), "GET", b"")
    assert (told["pool"], told["problem"]) == (False, "ledger.history_days is 0")
    assert told["models"] == []  # it has not reported its models yet
    models.worker_ready(slot, READY)
    for tier in ("hot", "cold"):
        told = await handler.answer("", Query("http://operator/"), "GET", b"")
        [one] = told["models"]
        assert (one["model"], one["tier"], one["pinned"]) == ("demo", tier, True)
        models.happen(WorkerDied(0, "killed"))
    for part, method, says in (("pin", "POST", "no warm pool"), ("explain", "GET", "no history")):
        with pytest.raises(TailraceError, match=says):
            await handler.answer(part, Query("http://operator/?"), method, b"")


async def test_the_simulator_replays_what_was_asked_of_this_origin(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    pool = Pool(await SqliteHistory.open(path, 0))
    pool.now_ms = round(time.time() * 1e3) - DAY_MS // 2
    for _ in range(20):
        pool.request("a", 1000, HOT)
        pool.now_ms += 100_000
    await pool.recorder.flush()
    await pool.store.close()
    body = json.dumps({"trace": "history", "days": 1, "policies": ["ttl-10"]}).encode()
    told = await simulate(body, asyncio.Lock(), str(path))
    assert (told["requests"], told["gaps"], told["models"]) == (20, 19, ["a"])
    assert told["policies"][0]["cost_gpu_s"] == pytest.approx(19 * 70)
    with pytest.raises(TailraceError, match="this origin has no history"):
        await simulate(body, asyncio.Lock(), None)
