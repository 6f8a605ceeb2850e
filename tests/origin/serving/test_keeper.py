"""Models that come and go, with slots whose workers are the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tailrace.ledger.errors import Unavailable
from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.origin.config import DEMO_MODEL, OriginConfig
from tailrace.origin.generations.stream import GeneratedStream
from tailrace.origin.metrics import Metrics
from tailrace.origin.pool.history.sqlite_file import SqliteHistory
from tailrace.origin.pool.kept import TURN_S
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.policies import WarmPrices
from tailrace.origin.pool.records import PoolDecision, PoolRecord
from tailrace.origin.pool.tiers import Residence
from tailrace.origin.pool.warm_pool import PoolOrder
from tailrace.origin.serving.keeper import ModelKeeper
from tailrace.origin.serving.live_pool import LivePool
from tailrace.origin.serving.pins import Pins
from tailrace.origin.serving.plan import KnownModel, KnownModels, first_load_s
from tailrace.origin.serving.served_model import ServedModel, ServedModels
from tailrace.origin.workers.load_spans import FORKED, LoadStage, WorkerStart
from tailrace.origin.workers.worker_frame import Ready
from tailrace.origin.workers.worker_process import WorkerSlot
from tests.origin.pool.history.test_stores import Pool
from tests.origin.stage import READY, RECIPE, A, B

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
        self.models = [ServedModel(name) for name in ("one", "two")]
        for number, model in enumerate(self.models):
            slot = WorkerSlot(number, ("", ""), model=model.name)
            slot.circuit = model.circuit
            slot.rest()
            slot.is_resting = True
            model.slots = [slot]
        self.now_s = now_s
        self.told: list[PoolDecision] = []
        self._news = asyncio.Event()
        self.open: set[bytes] = set()
        self.metrics = Metrics()
        configs = {model.name: OriginConfig(producer="a:b") for model in self.models}
        live = LivePool(
            [PoolMember(model.name, load_s=3.0) for model in self.models],
            policy,
            {"cpu": cap},
            WarmPrices(60.0),
            {},
            self._hear,
            lambda: self.now_s,
            Pins(folder),
        )
        self.pool = live.pool
        self.known = known = KnownModels(folder, configs)
        self.keeper = ModelKeeper(
            ServedModels(*self.models),
            live,
            known,
            self.metrics,
            clock=lambda: self.now_s,
            wait_s=wait_s,
            withdraw=lambda slot: None,
            is_open=self.open.__contains__,
        )

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
        """The models that are to have workers."""
        return [model.name for model in self.models if model.slots[0].is_wanted]

    def load(self, model: ServedModel, ready: Ready = READY) -> None:
        """Its worker says that it is ready."""
        [slot] = model.slots
        assert slot.is_wanted
        slot.is_resting = False
        model.ready, model.up = ready, [slot]
        self.keeper.loaded(model, slot)

    def fail(self, model: ServedModel) -> None:
        """Its workers die until no more are started for a long time."""
        model.up = []
        while model.circuit.state is not CircuitState.OPEN:
            model.circuit.died(0, 1e12, was_ready=False)
            model.fate = "out of memory"
            self.keeper.lost(model)

    def leave(self, model: ServedModel) -> None:
        """Its worker has ended."""
        [slot] = model.slots
        assert not slot.is_wanted
        model.up, slot.is_resting = [], True
        self.keeper.rested(model)


async def test_who_asks_for_a_cold_model_waits_until_another_has_left(tmp_path: Path) -> None:
    troupe = Troupe(tmp_path)
    one, two = troupe.models
    troupe.keeper.start()
    troupe.load(one)
    two.ready = READY  # it was loaded before
    troupe.keeper.arrive("one", A)
    async with asyncio.TaskGroup() as tasks:
        troupe.keeper.arrive("two", B)
        waiting = tasks.create_task(troupe.keeper.begin(two))
        await asyncio.sleep(0)
        assert troupe.wanted() == ["one"]  # a stream of it runs
        troupe.keeper.end(A)
        assert troupe.wanted() == []  # its room is not free yet
        troupe.leave(one)
        assert troupe.wanted() == ["two"]
    assert waiting.result() == "'two' is being loaded, which takes about 3.0 s"
    troupe.load(two)
    assert await troupe.keeper.begin(two) == ""
    [_, tier] = troupe.keeper.tiers()
    assert (tier.model, tier.tier, tier.expected_ms, tier.reason) == ("two", "hot", 0, "")
    value = troupe.metrics.registry.get_sample_value
    assert value("tailrace_model_loads_total", {"model": "two"}) == 1
    assert value("tailrace_model_leaves_total", {"model": "one"}) == 1
    assert value("tailrace_model_tier", {"model": "two"}) == 5


async def test_edges_do_not_take_a_model_that_drains_for_warm(tmp_path: Path) -> None:
    troupe = Troupe(tmp_path)
    one, _ = troupe.models
    troupe.keeper.start()
    troupe.load(one)
    troupe.keeper.arrive("one", A)
    troupe.keeper.arrive("two", B, begun=False)
    assert [tier.tier for tier in troupe.keeper.tiers()] == ["hot", "cold"]
    troupe.now_s += TURN_S
    troupe.pool.tick(troupe.now_s)
    assert [tier.tier for tier in troupe.keeper.tiers()] == ["host", "cold"]
    assert troupe.wanted() == ["one"]  # whose stream runs
    troupe.keeper.end(A)
    troupe.leave(one)
    assert troupe.wanted() == ["two"]


async def test_a_first_load_is_waited_for_however_long_its_guess_and_its_reader_told(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path, wait_s=2.0)  # a load is taken to take 3 s
    one, _ = troupe.models
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(held(troupe.keeper, one))
        await asyncio.sleep(0)
        # What does not hang on its worker is opened meanwhile.
        told = await troupe.keeper.begin(one)
        assert told == "'one' is being loaded, for the first time: how long that takes is not known"
        troupe.load(one)  # which was ordered
    assert waiting.result().startswith("'one' was waited for ")


async def held(keeper: ModelKeeper, model: ServedModel) -> str:
    async with keeper.loading(model, A, known=False) as told:
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
        async with troupe.keeper.loading(one, A):
            pass
    assert (refused.value.code, refused.value.min_retry_ms or 0) >= ("loading", 3000)
    assert troupe.pool.of("one").residence is Residence.LOADING  # who asks again finds it
    assert troupe.pool.of("one").visits == 0


async def test_a_model_whose_workers_die_makes_room_and_is_tried_when_it_is_time(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, two = troupe.models
    troupe.keeper.start()
    while one.circuit.state is CircuitState.CLOSED:
        one.circuit.died(0, 1e12, was_ready=False)
        one.fate = "out of memory"
        troupe.keeper.lost(one)
    assert troupe.pool.of("one").residence is Residence.LEAVING
    troupe.keeper.arrive("two", B)
    troupe.leave(one)
    troupe.load(two)
    assert await troupe.keeper.begin(two) == ""
    with pytest.raises(Unavailable, match="no worker of 'one' can start: out of memory"):
        async with troupe.keeper.loading(one, A):
            pass
    assert "out of memory" in troupe.keeper.tiers()[0].reason


async def test_a_pin_is_remembered_over_restarts_until_it_is_taken_back(tmp_path: Path) -> None:
    def pinned(troupe: Troupe) -> list[str]:
        troupe.keeper.start()
        return [one.name for one in troupe.pool.states() if one.is_pinned]

    troupe = Troupe(tmp_path, cap=2.0)
    assert pinned(troupe) == []
    await troupe.keeper.live.pin("two", pinned=True)
    troupe = Troupe(tmp_path, cap=2.0)
    assert pinned(troupe) == ["two"]
    assert pinned(Troupe(tmp_path, cap=1.0)) == []  # there would be no room for the other one
    await troupe.keeper.live.pin("two", pinned=False)
    assert pinned(Troupe(tmp_path, cap=2.0)) == []


async def test_pins_that_cannot_be_read_or_written_are_told(tmp_path: Path) -> None:
    file = tmp_path / "pins.json"
    file.write_text('{"version": 1, "models": ["gone"]}')
    Troupe(tmp_path, cap=2.0).keeper.start()
    for damaged in ("", "7", '{"version": 2, "models": []}', '{"version": 1, "models": [7]}'):
        file.write_text(damaged)
        with capture_logs() as logs:
            troupe = Troupe(tmp_path, cap=2.0)
        assert [one["event"] for one in logs] == ["pins.unreadable"]
    file.unlink()
    file.mkdir()
    with pytest.raises(Unavailable, match=r"holds until the origin ends: .*pins\.json cannot"):
        await troupe.keeper.live.pin("two", pinned=True)
    assert troupe.pool.of("two").is_pinned


async def test_the_imports_that_a_first_start_waits_for_are_not_expected_of_the_next(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path, cap=2.0)
    one, _ = troupe.models
    troupe.keeper.start()
    troupe.now_s += 27.5
    stages = (LoadStage("imports", 0.0, 26.0), LoadStage(FORKED, 26.0, 26.1))
    one.slots[0].start = WorkerStart(FORKED, 0.0, 27.5, (*stages, LoadStage("read", 26.1, 27.5)))
    troupe.load(one)
    assert troupe.pool.of("one").load_s == 1.5
    assert troupe.known.find("one") == KnownModel(READY, 1.5)


async def test_a_pinned_model_whose_workers_cannot_start_is_loaded_when_one_is_tried_again(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path, cap=2.0)
    one, _ = troupe.models
    await troupe.keeper.live.pin("one", pinned=True)
    troupe.fail(one)
    troupe.leave(one)
    decided = len(troupe.told)
    for _ in range(100):
        troupe.now_s += 0.5
        assert troupe.pool.tick(troupe.now_s) == []
        assert troupe.keeper.look([], troupe.now_s) == []
    assert len(troupe.told) == decided
    value = troupe.metrics.registry.get_sample_value
    assert value("tailrace_model_loads_total", {"model": "one"}) == 1
    retry_at_s = troupe.pool.wake_at(troupe.now_s)
    assert retry_at_s == pytest.approx(1000.0 + one.circuit.retry_s(time.monotonic()), abs=60.0)
    assert troupe.pool.tick(retry_at_s) == [PoolOrder("one", True, "pinned")]


async def test_a_model_that_drains_and_cannot_start_a_worker_leaves_its_room_to_who_waits(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, two = troupe.models
    troupe.keeper.start()
    troupe.load(one)
    troupe.keeper.arrive("one", A)
    troupe.keeper.arrive("two", B, begun=False)
    troupe.now_s += TURN_S
    troupe.pool.tick(troupe.now_s)
    assert troupe.pool.of("one").residence is Residence.DRAINING
    troupe.fail(one)
    assert troupe.wanted() == []
    troupe.leave(one)
    assert troupe.wanted() == ["two"]
    troupe.load(two)
    troupe.keeper.end(B)
    assert troupe.wanted() == ["two"]  # the stream of the other one waits for its next trial
    troupe.now_s += 2e12
    assert [(one.model, one.load) for one in troupe.pool.tick(troupe.now_s)] == [("two", False)]
    assert [one.model for one in troupe.pool.gone("two", troupe.now_s)] == ["one"]


async def test_a_model_that_loads_and_cannot_start_a_worker_leaves_its_room_to_who_waits(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, _ = troupe.models
    troupe.keeper.arrive("one", A)
    troupe.fail(one)
    assert troupe.pool.of("one").residence is Residence.LOADING  # nobody else needs the room
    troupe.keeper.arrive("two", B)
    troupe.keeper.look([], troupe.now_s)
    troupe.leave(one)
    assert troupe.wanted() == ["two"]


async def test_who_waits_for_a_model_that_never_starts_is_told_why_and_not_kept(
    tmp_path: Path,
) -> None:
    troupe = Troupe(tmp_path)
    one, _ = troupe.models
    waiting = GeneratedStream(A, RECIPE.model_copy(update={"model": "one"}), False, asked_s=100.0)
    troupe.open.add(A)
    async with troupe.keeper.loading(one, A):
        assert troupe.keeper.look([waiting], 101.0) == []
        while one.circuit.state is CircuitState.CLOSED:
            one.circuit.died(0, 1e12, was_ready=False)
            one.fate = "out of memory"
            troupe.keeper.lost(one)
        assert troupe.keeper.look([waiting], 101.0) == [waiting]
    assert "out of memory" in troupe.keeper.why_late("one")
    one.ready = READY  # one that was there before may come again, and is waited for
    assert troupe.keeper.look([waiting], 159.0) == []
    assert troupe.keeper.look([waiting], 161.0) == [waiting]


async def test_a_restarted_origin_has_learnt_from_the_requests_in_its_history(
    tmp_path: Path,
) -> None:
    """Of 40 gaps of 300 s, so that its policy would keep nothing for as long as break-even."""
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
        troupe.keeper.start()
        troupe.load(one)
        restarted = Pool(store)
        restarted.recorder.learner = troupe.keeper.learn
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
