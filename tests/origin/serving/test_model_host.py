"""Models that come and go, with slots whose workers are the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tailrace.ledger.errors import Unavailable
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.origin.config import DEMO_MODEL, OriginConfig
from tailrace.origin.core.events import (
    RequestArrived,
    RequestEnded,
    Tick,
    WorkerDied,
    WorkerExited,
)
from tailrace.origin.core.model import TURN_S, ServedModel
from tailrace.origin.core.states import ModelState, WorkerState
from tailrace.origin.core.stream_events import AppendEnd, ReadersSeen, StreamsAdmitted
from tailrace.origin.generations.runs import Runs
from tailrace.origin.metrics import Metrics
from tailrace.origin.pool.history.sqlite_file import SqliteHistory
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.policies import WarmPrices
from tailrace.origin.pool.records import PoolDecision, PoolRecord
from tailrace.origin.serving.live_pool import LivePool
from tailrace.origin.serving.model_host import ModelHost
from tailrace.origin.serving.pins import Pins
from tailrace.origin.serving.plan import KnownModel, KnownModels, first_load_s
from tailrace.origin.workers.load_spans import FORKED, LoadStage, WorkerStart
from tailrace.origin.workers.worker_frame import Ready
from tailrace.origin.workers.worker_process import WorkerSlot
from tests.origin.pool.history.test_stores import Pool
from tests.origin.stage import READY, RECIPE, A, B, C

pytestmark = pytest.mark.anyio


class Troupe:
    """Two models of which one fits; nothing of them runs but what the test says."""

    def __init__(
        self,
        folder: Path,
        wait_s: float = 60.0,
        policy: str = "greedy-dual",
        now_s: float = 1000.0,
        cap: float = 1.0,
    ) -> None:
        self.now_s = now_s
        self.told: list[PoolDecision] = []
        self._news = asyncio.Event()
        self.metrics = Metrics()
        names = ("one", "two")
        live = LivePool(
            [PoolMember(name, load_s=3.0) for name in names],
            policy,
            {"cpu": cap},
            WarmPrices(60.0),
            {},
            self._hear,
            lambda: self.now_s,
            Pins(folder),
        )
        self.core = live.pool
        self.known = KnownModels(folder, {name: OriginConfig(producer="a:b") for name in names})
        self.slots = [WorkerSlot(number, ("", ""), model=name) for number, name in enumerate(names)]
        self.host = ModelHost(
            live,
            self.slots,
            self.metrics,
            wait_s=wait_s,
            known=self.known,
            unix_s=lambda: self.now_s,
        )
        self.models = list(self.core.models)
        ledger: Any = None  # nothing is stored here
        self.runs = Runs(ledger, 4, self.host, self.metrics)

    def start(self) -> None:
        self.host.start()

    def arrive(self, model: str, stream: bytes, *, begun: bool = True) -> None:
        self.host.happen(RequestArrived(model, stream, begun))

    def end(self, model: str, stream: bytes) -> None:
        self.host.happen(RequestEnded(model, stream))

    def tick(self) -> None:
        self.host.happen(Tick())

    def _hear(self, record: PoolRecord, of_shadow: bool) -> None:
        if isinstance(record, PoolDecision):
            self.told.append(record)
            self._news.set()

    async def saw(self, is_it: Callable[[PoolDecision], bool]) -> PoolDecision:
        while not (found := [*filter(is_it, self.told)]):
            self._news.clear()
            await self._news.wait()
        return found[0]

    def wanted(self) -> list[str]:
        """Return the models that are to have workers."""
        without = (WorkerState.RESTING, WorkerState.STOPPING)
        return [model.name for model in self.models if model.workers[0].state not in without]

    def load(self, model: ServedModel, ready: Ready = READY) -> None:
        """Its worker says that it is ready."""
        assert model.workers[0].state is WorkerState.STARTING
        assert self.host.worker_ready(self.slots[model.workers[0].number], ready)

    def fail(self, model: ServedModel) -> None:
        """Its workers die until no more are started for a while."""
        while model.circuit.state is not CircuitState.OPEN:
            while model.workers[0].state is WorkerState.WAITING:
                self.now_s = self.core.wake_at()
                self.tick()
            self.host.happen(WorkerDied(model.workers[0].number, "out of memory"))

    def leave(self, model: ServedModel) -> None:
        """Its worker has ended."""
        assert model.workers[0].state is WorkerState.STOPPING
        self.host.happen(WorkerExited(model.workers[0].number))


async def test_who_asks_for_a_cold_model_waits_until_another_has_left(tmp_path: Path) -> None:
    troupe = Troupe(tmp_path)
    one, two = troupe.models
    troupe.start()
    troupe.load(one)
    two.ready = READY  # the worker was loaded before
    troupe.arrive("one", A)
    async with asyncio.TaskGroup() as tasks:
        troupe.arrive("two", B)
        waiting = tasks.create_task(troupe.host.until_open(two, B))
        await asyncio.sleep(0)
        assert troupe.wanted() == ["one"]  # a stream of it runs
        troupe.end("one", A)
        assert troupe.wanted() == []  # its room is not free yet
        troupe.leave(one)
        assert troupe.wanted() == ["two"]
    assert waiting.result() == "'two' is being loaded, which takes about 3.0 s"
    troupe.load(two)
    assert await troupe.host.until_open(two, B) == ""
    [_, tier] = troupe.host.tiers()
    assert (tier.model, tier.tier, tier.expected_ms, tier.reason) == ("two", "hot", 0, "")
    value = troupe.metrics.registry.get_sample_value
    assert value("tailrace_model_loads_total", {"model": "two"}) == 1
    assert value("tailrace_model_leaves_total", {"model": "one"}) == 1
    assert value("tailrace_model_tier", {"model": "two"}) == 5


async def test_a_request_at_the_moment_at_which_its_model_begins_to_drain_is_served(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, _ = troupe.models
    troupe.start()
    troupe.load(one)
    troupe.arrive("one", A)
    troupe.arrive("two", B, begun=False)
    troupe.now_s += TURN_S
    async with troupe.runs.opening(one, C) as told:
        assert (one.state, told) == (ModelState.DRAINING, "")


async def test_edges_do_not_take_a_model_that_drains_for_warm(tmp_path: Path) -> None:
    troupe = Troupe(tmp_path)
    one, _ = troupe.models
    troupe.start()
    troupe.load(one)
    troupe.arrive("one", A)
    troupe.arrive("two", B, begun=False)
    assert [tier.tier for tier in troupe.host.tiers()] == ["hot", "cold"]
    troupe.now_s += TURN_S
    troupe.tick()
    assert [tier.tier for tier in troupe.host.tiers()] == ["host", "cold"]
    assert troupe.wanted() == ["one"]  # its stream is running
    troupe.end("one", A)
    troupe.leave(one)
    assert troupe.wanted() == ["two"]


async def test_a_first_load_is_waited_for_however_long_its_guess_and_its_reader_told(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path, wait_s=2.0)  # a load is taken to take 3 s
    one, _ = troupe.models
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(held(troupe.runs, one))
        await asyncio.sleep(0)
        # Requests that do not need the worker's answer are opened in the meantime.
        told = await troupe.host.until_open(one, A)
        assert told == "'one' is being loaded, for the first time: how long that takes is not known"
        troupe.load(one)  # which was ordered
    assert waiting.result().startswith("waited ")


async def held(runs: Runs, model: ServedModel) -> str:
    async with runs.opening(model, A, known=False) as told:
        return told


def test_a_first_load_is_taken_to_take_what_its_files_would() -> None:
    size = sum(path.stat().st_size for path in DEMO_MODEL.iterdir())
    assert first_load_s(OriginConfig(device="cpu")) == pytest.approx(2.0 + size / 1e9)
    assert first_load_s(OriginConfig(producer="a:b")) == 10.0


async def test_a_load_that_takes_longer_than_one_waits_is_refused_at_once(tmp_path: Path) -> None:
    troupe = Troupe(tmp_path, wait_s=2.0)
    one, _ = troupe.models
    one.ready = READY
    with pytest.raises(Unavailable, match="'one' is being loaded") as refused:
        async with troupe.runs.opening(one, A):
            pass
    assert (refused.value.code, refused.value.min_retry_ms or 0) >= ("loading", 3000)
    assert troupe.core.of("one").state is ModelState.LOADING  # a repeated request finds it loading
    assert troupe.core.of("one").requests == {}


async def test_a_model_whose_workers_die_makes_room_and_is_tried_when_it_is_time(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, two = troupe.models
    troupe.start()
    troupe.fail(one)
    assert troupe.core.of("one").state is ModelState.AWAY
    troupe.arrive("two", B)
    troupe.load(two)
    assert await troupe.host.until_open(two, B) == ""
    with pytest.raises(Unavailable, match="no worker of 'one' can start: out of memory"):
        async with troupe.runs.opening(one, A):
            pass
    assert "out of memory" in troupe.host.tiers()[0].reason


async def test_a_pin_is_remembered_over_restarts_until_it_is_taken_back(tmp_path: Path) -> None:
    def pinned(troupe: Troupe) -> list[str]:
        troupe.start()
        return [one.name for one in troupe.core.models if one.is_pinned]

    troupe = Troupe(tmp_path, cap=2.0)
    assert pinned(troupe) == []
    await troupe.host.live.pin("two", pinned=True)
    troupe = Troupe(tmp_path, cap=2.0)
    assert pinned(troupe) == ["two"]
    assert pinned(Troupe(tmp_path, cap=1.0)) == []  # there would be no room for the other one
    await troupe.host.live.pin("two", pinned=False)
    assert pinned(Troupe(tmp_path, cap=2.0)) == []


async def test_pins_that_cannot_be_read_or_written_are_told(tmp_path: Path) -> None:
    file = tmp_path / "pins.json"
    file.write_text('{"version": 1, "models": ["gone"]}')
    Troupe(tmp_path, cap=2.0).start()
    for damaged in ("", "7", '{"version": 2, "models": []}', '{"version": 1, "models": [7]}'):
        file.write_text(damaged)
        with capture_logs() as logs:
            troupe = Troupe(tmp_path, cap=2.0)
        assert [one["event"] for one in logs] == ["pins.unreadable"]
    file.unlink()
    file.mkdir()
    with pytest.raises(Unavailable, match=r"lost when the origin ends.*pins\.json cannot"):
        await troupe.host.live.pin("two", pinned=True)
    assert troupe.core.of("two").is_pinned


async def test_the_imports_that_a_first_start_waits_for_are_not_expected_of_the_next(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path, cap=2.0)
    one, _ = troupe.models
    troupe.start()
    troupe.now_s += 27.5
    stages = (LoadStage("imports", 0.0, 26.0), LoadStage(FORKED, 26.0, 26.1))
    troupe.slots[0].start = WorkerStart(FORKED, 0.0, 27.5, (*stages, LoadStage("read", 26.1, 27.5)))
    troupe.load(one)
    assert troupe.core.of("one").load_s == 1.5
    assert troupe.known.find("one") == KnownModel(READY, 1.5)


async def test_a_pinned_model_whose_workers_cannot_start_is_loaded_when_one_is_tried_again(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path, cap=2.0)
    one, _ = troupe.models
    await troupe.host.live.pin("one", pinned=True)
    troupe.fail(one)
    decided, retry_at_s = len(troupe.told), troupe.core.wake_at()
    assert retry_at_s == pytest.approx(troupe.now_s + one.circuit.retry_s(troupe.now_s))
    for _ in range(20):
        troupe.now_s += (retry_at_s - troupe.now_s) / 2
        troupe.tick()
    assert len(troupe.told) == decided
    value = troupe.metrics.registry.get_sample_value
    assert value("tailrace_model_loads_total", {"model": "one"}) == 1
    for state, now_s in ((WorkerState.WAITING, troupe.now_s), (WorkerState.STARTING, retry_at_s)):
        troupe.now_s = now_s
        troupe.tick()
        assert one.workers[0].state is state


async def test_a_pinned_model_whose_workers_cannot_start_makes_room_until_one_is_tried_again(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path, cap=2.0)
    one, two = troupe.models
    one.is_pinned, two.member = True, replace(two.member, size=2.0)
    troupe.start()
    troupe.fail(one)
    troupe.arrive("two", B)
    assert troupe.wanted() == ["two"]
    troupe.load(two)
    troupe.end("two", B)
    decided = len(troupe.told)
    for _ in range(20):
        troupe.now_s += (one.retry_at_s - troupe.now_s) / 2
        troupe.tick()
    assert len(troupe.told) == decided
    assert troupe.core.wake_at() == one.retry_at_s
    troupe.now_s = one.retry_at_s
    troupe.tick()
    troupe.leave(two)
    assert troupe.wanted() == ["one"]


async def test_a_model_that_drains_and_cannot_start_a_worker_leaves_its_room_to_who_waits(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, two = troupe.models
    troupe.start()
    troupe.load(one)
    troupe.arrive("one", A)
    troupe.arrive("two", B, begun=False)
    troupe.now_s += TURN_S
    troupe.tick()
    assert troupe.core.of("one").state is ModelState.DRAINING
    troupe.host.happen(WorkerDied(0, "out of memory"))
    troupe.fail(one)
    assert troupe.wanted() == ["two"]
    troupe.load(two)
    troupe.end("two", B)
    assert troupe.wanted() == ["two"]  # the stream of the other one waits for its next trial
    troupe.now_s = one.retry_at_s
    troupe.tick()
    troupe.leave(two)
    assert troupe.wanted() == ["one"]


async def test_a_model_that_loads_and_cannot_start_a_worker_leaves_its_room_to_who_waits(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, _ = troupe.models
    troupe.arrive("one", A)
    troupe.fail(one)
    assert troupe.core.of("one").state is ModelState.LOADING  # no other model needs the memory
    troupe.arrive("two", B)
    assert troupe.wanted() == ["two"]


async def test_who_waits_for_a_model_that_never_starts_is_told_why_and_not_kept(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, _ = troupe.models
    core, recipe = troupe.runs.core, RECIPE.model_copy(update={"model": "one"})

    def ended(now: float) -> list[tuple[bytes, str | None]]:
        commands = core.handle(ReadersSeen({A, B}), now)
        ends = [command for command in commands if isinstance(command, AppendEnd)]
        assert all(command.end.retryable for command in ends)
        return [(command.stream.id, command.end.message) for command in ends]

    async with troupe.runs.opening(one, A):
        core.handle(StreamsAdmitted([(A, recipe)]), 100.0)
        assert ended(101.0) == []
        troupe.fail(one)
        [(stream, why)] = ended(101.0)
    assert stream == A
    assert why is not None and "out of memory" in why
    one.ready = READY  # one that was there before may come again, and is waited for
    core.handle(StreamsAdmitted([(B, recipe)]), 101.0)
    assert ended(160.0) == []
    assert [stream for stream, _ in ended(162.0)] == [B]


async def test_a_restarted_origin_has_learnt_from_the_requests_in_its_history(
    tmp_path: Path,
) -> None:
    """After 40 gaps of 300 s the policy keeps a model for less than break-even (60 s)."""
    store = await SqliteHistory.open(tmp_path / "history.db", 0)
    try:
        before = Pool(store)
        for _ in range(41):
            before.request("one", 1000)
            before.request("gone", 1000)
            before.now_ms += 301_000
        await before.recorder.flush()
        troupe = Troupe(tmp_path, policy="adaptive-ttl", now_s=before.now_ms / 1e3)
        one, _ = troupe.models
        troupe.start()
        troupe.load(one)
        restarted = Pool(store)
        restarted.recorder.learner = troupe.host.learn
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(restarted.recorder.run())
            keep = await troupe.saw(lambda told: told.features.get("gaps", 0.0) > 30.0)
            running.cancel()
        assert (keep.model, keep.policy) == ("one", "adaptive-ttl")
        assert keep.features["ttl_s"] < 60.0
    finally:
        await store.close()


def test_what_a_model_was_is_known_until_its_settings_or_files_change(tmp_path: Path) -> None:
    config = OriginConfig(model=DEMO_MODEL)
    KnownModels(tmp_path, {"m": config}).learn("m", KnownModel(READY, 1.5))
    assert KnownModels(tmp_path, {"m": config}).find("m") == KnownModel(READY, 1.5)
    assert KnownModels(tmp_path, {"n": config}).find("n") is None
    for changed in (OriginConfig(kv_mib=7), OriginConfig(model=tmp_path)):
        assert KnownModels(tmp_path, {"m": changed}).find("m") is None
    (tmp_path / "models.json").write_text('{"version": 1, "models": {"m": 7')
    assert KnownModels(tmp_path, {"m": config}).find("m") is None
