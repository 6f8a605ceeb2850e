"""The pool keeps its cap, never evicts what is busy or loading, and says why it does what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from random import Random
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tailrace.ledger.errors import CallerError, Conflict
from tailrace.ledger.links.hints import Hint
from tailrace.origin.core.events import (
    Command,
    Event,
    ModelHinted,
    ModelPinned,
    RecordHistory,
    RequestArrived,
    RequestEnded,
    StartWorker,
    StopWorker,
    Tick,
    WorkerDied,
    WorkerExited,
    WorkerLoading,
    WorkerReady,
)
from tailrace.origin.core.model import TURN_S, ServedModel
from tailrace.origin.core.pool import ModelPool
from tailrace.origin.core.states import (
    ABOUT_TO_GO,
    HOLDING_MEMORY,
    MODEL_TRANSITIONS,
    ModelEvent,
    ModelState,
    WorkerState,
    next_state,
)
from tailrace.origin.pool.members import PoolMember, Schedule
from tailrace.origin.pool.policies.named_policy import named_policy
from tailrace.origin.pool.policies.policies import (
    BreakEven,
    FixedTtl,
    GreedyDual,
    KeepAlivePolicy,
    WarmPrices,
)
from tailrace.origin.pool.policies.simulate import replay, replay_capped
from tailrace.origin.pool.policies.trace import ArrivalTrace, generated, idle_gaps
from tailrace.origin.pool.records import (
    ArrivalRecord,
    PoolChoice,
    PoolDecision,
    PoolRecord,
    StateChange,
    TierChange,
)
from tailrace.origin.pool.replay import PoolCounts, PoolReplay, ShadowPool
from tailrace.origin.pool.tiers import Tier
from tailrace.origin.workers.worker_frame import LoadProgress
from tests.origin.pool.policies.costs import play_trace

PRICES = WarmPrices(60.0, 10.0)
NAMES = ("a", "b", "c")


class Order(NamedTuple):
    """A model is to be loaded, or to leave."""

    model: str
    load: bool
    reason: str


class Driven:
    """A pool of models of one worker each: events are calls, and their commands are orders."""

    def __init__(
        self,
        members: Sequence[PoolMember],
        policy: KeepAlivePolicy,
        caps: Mapping[str, float] | None = None,
    ) -> None:
        self.core = ModelPool(members, policy, caps, random=Random(1))
        self.kept: list[PoolRecord] = []
        self._numbers = {one.name: number for number, one in enumerate(members)}

    def happen(self, event: Event, now: float) -> list[Order]:
        return self.orders(self.core.handle(event, now))

    def orders(self, commands: list[Command]) -> list[Order]:
        given: list[Order] = []
        for command in commands:
            match command:
                case RecordHistory(StateChange() as change):
                    if change.state is ModelState.LOADING and change.before is ModelState.QUEUED:
                        given.append(Order(change.model, True, change.reason))
                    elif change.state is ModelState.LEAVING:
                        given.append(Order(change.model, False, change.reason))
                case RecordHistory(record):
                    self.kept.append(record)
                case StartWorker(worker):
                    state = self.core.model_of(worker).state
                    assert state in HOLDING_MEMORY and state not in ABOUT_TO_GO
                case StopWorker(worker):
                    assert self.core.model_of(worker).state in ABOUT_TO_GO
        return given

    def arrive(self, model: str, request: int, now: float, *, begun: bool = False) -> list[Order]:
        return self.happen(RequestArrived(model, request, begun), now)

    def end(self, model: str, request: int, now: float) -> list[Order]:
        return self.happen(RequestEnded(model, request), now)

    def stage(self, model: str, stage: str, now: float) -> list[Order]:
        return self.happen(WorkerLoading(self._numbers[model], LoadProgress(stage, 0, 0)), now)

    def loaded(self, model: str, now: float) -> list[Order]:
        return self.happen(WorkerReady(self._numbers[model]), now)

    def gone(self, model: str, now: float) -> list[Order]:
        return self.happen(WorkerExited(self._numbers[model]), now)

    def hint(self, model: str, hint: Hint, now: float) -> list[Order]:
        return self.happen(ModelHinted(model, hint), now)

    def pin(self, model: str, now: float, *, pinned: bool) -> list[Order]:
        return self.happen(ModelPinned(model, pinned), now)

    def die(self, model: str, now: float) -> list[Order]:
        """Return its worker dies; another one may be started, which is no order of a load."""
        return self.happen(WorkerDied(self._numbers[model], "killed"), now)

    def tick(self, now: float) -> list[Order]:
        return self.happen(Tick(), now)

    def of(self, model: str) -> ServedModel:
        return self.core.of(model)

    def state(self, model: str) -> ModelState:
        return self.core.of(model).state


def pool_of(
    policy: KeepAlivePolicy | None = None, cap: float = inf, **changes: bool | tuple[Schedule, ...]
) -> Driven:
    """Three models of size one; `changes` are of `a`."""
    members = [PoolMember("a", **changes), PoolMember("b"), PoolMember("c")]  # type: ignore[arg-type]
    return Driven(members, policy or FixedTtl(60), {"cpu": cap})


class PoolOfThree(RuleBasedStateMachine):
    """Requests come and end, loads and leavings finish and fail, in any order, under a cap of 2."""

    caps: ClassVar[Mapping[str, float]] = {"cpu": 2.0}

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = self.driven()
        self.open: dict[int, str] = {}
        self.taken: set[int] = set()
        self.coming: set[str] = set()
        self.going: set[str] = set()
        self.count = 0

    def driven(self) -> Driven:
        return pool_of(GreedyDual(60.0), 2.0)

    def carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            assert order.reason
            if order.load:
                assert order.model not in self.coming | self.going
                self.coming.add(order.model)
            else:
                assert order.model not in self.going
                if order.model in self.coming:  # given up: its worker has no process, or stops
                    self.coming.remove(order.model)
                else:
                    assert order.model not in {self.open[request] for request in self.taken}
                if self.pool.of(order.model).workers[0].state is WorkerState.STOPPING:
                    self.going.add(order.model)

    @rule(model=st.sampled_from(NAMES), after=st.floats(0, 100))
    def ask(self, model: str, after: float) -> None:
        self.now += after
        self.count += 1
        self.open[self.count] = model
        if self.pool.of(model).is_ready:
            self.taken.add(self.count)
        self.carry_out(self.pool.arrive(model, self.count, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), after=st.floats(0, 100))
    def end(self, data: st.DataObject, after: float) -> None:
        self.now += after
        request = data.draw(st.sampled_from(sorted(self.open)))
        self._end(request)

    def _end(self, request: int) -> None:
        model = self.open.pop(request)
        self.taken.discard(request)
        self.carry_out(self.pool.end(model, request, self.now))

    def loading(self) -> list[str]:
        """Return the models whose worker has a process that loads."""
        return [
            name
            for name in sorted(self.coming)
            if self.pool.of(name).workers[0].state is WorkerState.STARTING
        ]

    @precondition(lambda self: self.loading())
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self._load(data.draw(st.sampled_from(self.loading())))

    def _load(self, model: str) -> None:
        self.coming.remove(model)
        self.taken |= {request for request, name in self.open.items() if name == model}
        self.carry_out(self.pool.loaded(model, self.now))

    @precondition(lambda self: self.loading())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.loading()))
        self.taken -= {request for request, name in self.open.items() if name == model}
        self.carry_out(self.pool.die(model, self.now))

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.going)))
        self.going.remove(model)
        self.carry_out(self.pool.gone(model, self.now))

    @rule(model=st.sampled_from(NAMES))
    def die(self, model: str) -> None:
        if self.pool.state(model) is ModelState.READY:
            self.coming.add(model)
            self.taken -= {request for request, name in self.open.items() if name == model}
            self.carry_out(self.pool.die(model, self.now))

    @rule(model=st.sampled_from(NAMES), hint=st.sampled_from(Hint))
    def foresee(self, model: str, hint: Hint) -> None:
        self.carry_out(self.pool.hint(model, hint, self.now))

    @rule(after=st.floats(0, 100))
    def wait(self, after: float) -> None:
        self.now += after
        self.carry_out(self.pool.tick(self.now))

    @invariant()
    def the_cap_holds(self) -> None:
        for device, cap in self.caps.items():
            assert self.pool.core.used(device) <= cap
        held = {one.name for one in self.pool.core.models if one.state in HOLDING_MEMORY}
        up = (ModelState.READY, ModelState.DRAINING)
        ready = {one.name for one in self.pool.core.models if one.state in up}
        assert held == self.coming | self.going | ready

    def teardown(self) -> None:
        """When all that is under way is over, whoever still waits is served, one after another."""
        for _ in range(8 * (len(self.open) + 3)):
            self.now = max(self.now, min(self.pool.core.wake_at(), self.now + 100.0))
            self.carry_out(self.pool.tick(self.now))
            for model in sorted(self.going):
                self.going.remove(model)
                self.carry_out(self.pool.gone(model, self.now))
            for model in self.loading():
                self._load(model)
            for request in sorted(self.taken):
                self._end(request)
        assert not self.open


TestPoolOfThree = PoolOfThree.TestCase
TestPoolOfThree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class PoolOnTwoGpus(PoolOfThree):
    """The same with a model that has a worker on each of two GPUs, and one model on either."""

    caps: ClassVar[Mapping[str, float]] = {"cuda:0": 2.0, "cuda:1": 1.5}

    def driven(self) -> Driven:
        members = [
            PoolMember("a", 2.0, shares={"cuda:0": 1.0, "cuda:1": 1.0}),
            PoolMember("b", 2.0, shares={"cuda:0": 2.0}),
            PoolMember("c", 1.0, shares={"cuda:1": 1.0}),
        ]
        return Driven(members, GreedyDual(60.0), self.caps)


TestPoolOnTwoGpus = PoolOnTwoGpus.TestCase
TestPoolOnTwoGpus.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def on_two_gpus(caps: Mapping[str, float]) -> Driven:
    """Return a pool with `a` on both GPUs, `b` on the first and `c` on the second."""
    members = [
        PoolMember("a", 2.0, shares={"cuda:0": 1.0, "cuda:1": 1.0}),
        PoolMember("b", 1.0, shares={"cuda:0": 1.0}),
        PoolMember("c", 1.0, shares={"cuda:1": 1.0}),
    ]
    return Driven(members, FixedTtl(600), caps)


def test_models_on_different_gpus_do_not_evict_each_other() -> None:
    pool = on_two_gpus({"cuda:0": 1.0, "cuda:1": 1.0})
    for request, model in enumerate("bc"):
        assert [(one.model, one.load) for one in pool.arrive(model, request, 1.0)] == [
            (model, True)
        ]
        pool.loaded(model, 2.0)
    assert (pool.core.used("cuda:0"), pool.core.used("cuda:1")) == (1.0, 1.0)


def test_a_model_on_both_gpus_is_loaded_when_both_have_room() -> None:
    pool = on_two_gpus({"cuda:0": 2.0, "cuda:1": 1.0})
    for request, model in enumerate("bc"):
        pool.arrive(model, request, 1.0)
        pool.loaded(model, 2.0)
    assert pool.arrive("a", 7, 3.0) == [], "c is busy, and only the first GPU has room"
    left = pool.end("c", 1, 4.0)
    assert [(one.model, one.load) for one in left] == [("c", False)], "b is not in its way"
    assert [(one.model, one.load) for one in pool.gone("c", 5.0)] == [("a", True)]


def test_idle_models_leave_only_if_that_is_enough_on_every_gpu() -> None:
    pool = on_two_gpus({"cuda:0": 1.0, "cuda:1": 1.0})
    for request, model in enumerate("bc"):
        pool.arrive(model, request, 1.0)
        pool.loaded(model, 2.0)
    assert pool.end("b", 0, 3.0) == []
    assert pool.arrive("a", 7, 4.0) == [], "without c leaving, nothing is won by evicting b"
    assert {one.model for one in pool.end("c", 1, 5.0)} == {"b", "c"}


def test_a_pin_has_to_leave_memory_on_every_gpu() -> None:
    pool = on_two_gpus({"cuda:0": 2.0, "cuda:1": 1.0})
    with pytest.raises(Conflict, match="pinned models take 1 of cuda:1, whose cap is 1, and 'c'"):
        pool.pin("a", 1.0, pinned=True)
    pool.pin("b", 1.0, pinned=True)


def test_a_model_that_loads_cannot_be_evicted_whatever_is_tried() -> None:
    assert (ModelState.LOADING, ModelEvent.EVICTED) not in MODEL_TRANSITIONS
    with pytest.raises(Conflict, match="a model that is loading cannot be evicted"):
        next_state(ModelState.LOADING, ModelEvent.EVICTED)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3000), st.integers(1, 60)),
        min_size=2,
        max_size=40,
    )
)
def test_with_room_for_all_and_loads_in_no_time_the_pool_is_what_the_simulator_says(
    rows: list[tuple[int, int, int]],
) -> None:
    model, arrival, duration = (np.array(column) for column in zip(*rows, strict=True))
    # Gaps of whole quarters and TTLs between them: no two things happen at one instant.
    trace = ArrivalTrace.of(NAMES, model, arrival / 4.0, duration / 4.0 + 0.05)
    for ttl_s in (0.1, 30.1, 200.1):
        said = replay(idle_gaps(trace), NAMES, FixedTtl(ttl_s), PRICES)
        pool = pool_of(FixedTtl(ttl_s))
        player = PoolReplay(pool.core, lambda name: 0.0, lambda name: 0.0)
        player.start(0.0)
        play_trace(player, trace)
        seen = PoolCounts.of(pool.core)
        assert (seen.cold_starts, seen.requests) == (said.cold_starts, said.requests)


@pytest.mark.parametrize("name", ["adaptive-ttl", "break-even", "greedy-dual"])
def test_under_a_cap_the_pool_starts_models_as_often_as_the_simulator_says(name: str) -> None:
    trace = generated("mixed", 1, 0.5)
    sizes = {one: 0.5 + 0.25 * (at % 3) for at, one in enumerate(trace.names)}
    said = replay_capped(trace, named_policy(name, PRICES), sizes, 8.0, PRICES)
    assert not said.overcommitted
    members = [PoolMember(one, size) for one, size in sizes.items()]
    pool = Driven(members, named_policy(name, PRICES), {"cpu": 8.0})
    player = PoolReplay(pool.core, lambda name: 0.0, lambda name: 0.0)
    player.start(0.0)
    play_trace(player, trace)
    assert PoolCounts.of(pool.core).cold_starts - len(sizes) == said.cold_starts


def test_every_step_of_a_model_is_told_with_its_reason_and_what_it_took() -> None:
    pool = pool_of(FixedTtl(60))
    assert pool.tick(0.0) == []
    assert pool.arrive("a", 1, 10.0) == [Order("a", True, "a request waits for it")]
    assert pool.core.expected_s("a", 12.0) == 8.0
    pool.stage("a", "unpack", 11.0)
    assert not pool.of("a").is_ready
    assert pool.loaded("a", 14.0) == [] and pool.of("a").is_ready
    assert pool.end("a", 1, 20.0) == [] and pool.core.wake_at() == 80.0
    (order,) = pool.tick(80.0)
    assert not order.load and "its keep-alive time is over" in order.reason
    assert pool.gone("a", 80.5) == []
    assert pool.core.expected_s("a", 81.0) == 4.0  # the measured time
    changes = [(one.before, one.tier) for one in pool.kept if isinstance(one, TierChange)]
    assert changes == [
        (Tier.COLD, Tier.HOST),
        (Tier.HOST, Tier.COMPILED),
        (Tier.COMPILED, Tier.HOT),
        (Tier.HOT, Tier.HOST),
    ]
    assert [one for one in pool.kept if isinstance(one, ArrivalRecord)] == [
        ArrivalRecord("a", 10.0, 4.0, 20.0, Tier.COLD)
    ]
    decisions = [one for one in pool.kept if isinstance(one, PoolDecision)]
    assert [one.choice for one in decisions] == [PoolChoice.LOAD, PoolChoice.KEEP, PoolChoice.EVICT]
    assert decisions[1].keep_until_s == 80.0 and decisions[2].features == {"idle_s": 60.0}
    (state, *_) = pool.core.models
    assert (state.wasted_gpu_s, state.prices_s) == (60.0, {Tier.COLD: 4.0})


def test_who_is_asked_for_while_it_leaves_comes_back_and_one_that_no_longer_waits_does_not() -> (
    None
):
    pool = pool_of(FixedTtl(0), cap=1.0)
    pool.arrive("a", 1, 0.0)
    pool.loaded("a", 1.0)
    assert [one.load for one in pool.end("a", 1, 2.0)] == [False]
    assert pool.arrive("a", 2, 2.0) == [] and pool.state("a") is ModelState.RETURNING
    assert pool.arrive("b", 3, 2.1) == []
    pool.end("b", 3, 2.2)  # b had no room, and its reader is gone
    assert pool.state("b") is ModelState.AWAY
    assert [(one.model, one.load) for one in pool.gone("a", 3.0)] == [("a", True)]
    assert pool.state("a") is ModelState.LOADING


def test_one_that_waits_while_two_stay_busy_has_its_turn_when_the_older_of_them_has_drained() -> (
    None
):
    pool = pool_of(cap=2.0)
    for model, request in (("a", 1), ("b", 2)):
        pool.arrive(model, request, 0.0)
    for model, at in (("a", 1.0), ("b", 2.0)):
        pool.loaded(model, at)
    pool.arrive("c", 3, 3.0)
    assert pool.core.wake_at() == 3.0 + TURN_S
    assert pool.tick(17.9) == [] and pool.of("a").is_ready
    assert pool.tick(18.0) == [] and pool.state("a") is ModelState.DRAINING
    assert pool.state("b") is ModelState.READY and pool.core.wake_at() == inf
    drain = pool.kept[-1]
    assert isinstance(drain, PoolDecision) and drain.choice is PoolChoice.DRAIN
    assert (drain.reason, drain.features["waited_s"]) == ("c has waited for its memory", 15.0)
    pool.arrive("a", 4, 19.0, begun=True)  # one of the requests that it has already
    pool.arrive("a", 5, 19.0)
    assert pool.end("a", 1, 20.0) == []
    assert [(one.model, one.load) for one in pool.end("a", 4, 21.0)] == [("a", False)]
    assert [(one.model, one.load) for one in pool.gone("a", 22.0)] == [("c", True)]
    assert pool.state("a") is ModelState.QUEUED
    pool.loaded("c", 23.0)
    # The request for `a` makes `b` drain, which has been ready for longer than `c`.
    pool.tick(37.0)
    assert pool.state("b") is ModelState.DRAINING and pool.of("c").is_ready


def test_three_models_that_are_always_asked_take_turns_in_room_for_two() -> None:
    """Each has a request under way at any time; without turns the third would wait forever."""
    pool = pool_of(cap=2.0)
    player = PoolReplay(pool.core, lambda name: 2.0, keep=pool.kept.append)
    player.start(0.0)
    for nth in range(300):
        player.request(NAMES[nth % 3], 2.0 * nth, 10.0)
    player.advance(2000.0)
    ended = [one for one in pool.kept if isinstance(one, ArrivalRecord)]
    assert len(ended) == 300
    # The drain of ten seconds, the load and a turn of the others, each for both of them.
    assert max(one.waited_s for one in ended) < 2 * (TURN_S + 10.0 + 2.0 + 1.0)


def test_a_request_that_has_waited_for_a_turn_takes_the_memory_of_a_scheduled_model() -> None:
    """Pins leave memory for every other model; nothing checks schedules for that."""
    pool = pool_of(cap=1.0, schedules=(Schedule.parse("daily 00:00-24:00"),))
    assert [one.model for one in pool.tick(0.0)] == ["a"]
    pool.loaded("a", 1.0)
    assert pool.arrive("b", 1, 2.0) == [] and pool.core.wake_at() == 2.0 + TURN_S
    assert [(one.model, one.load) for one in pool.tick(17.0)] == [("a", False)]
    assert [(one.model, one.load) for one in pool.gone("a", 18.0)] == [("b", True)]
    assert pool.state("a") is ModelState.QUEUED  # it waits behind the requested models
    pool.loaded("b", 19.0)
    assert [(one.model, one.load) for one in pool.end("b", 1, 20.0)] == [("b", False)]
    assert [(one.model, one.load) for one in pool.gone("b", 21.0)] == [("a", True)]


def test_small_models_do_not_take_what_becomes_free_from_a_large_one_for_ever() -> None:
    pool = Driven(
        [PoolMember("a", 2.0), PoolMember("b"), PoolMember("c")], FixedTtl(60), {"cpu": 2}
    )
    for request, model in enumerate("bc"):
        pool.arrive(model, request, 0.0)
        pool.loaded(model, 1.0)
    pool.arrive("a", 2, 2.0)
    pool.tick(30.0)  # both have had their turn
    assert [one.model for one in pool.end("b", 0, 31.0)] == ["b"]
    pool.arrive("b", 3, 32.0)  # the memory that b leaves would do
    assert pool.gone("b", 33.0) == []
    assert [one.model for one in pool.end("c", 1, 34.0)] == ["c"]
    assert [(one.model, one.load) for one in pool.gone("c", 35.0)] == [("a", True)]


def test_a_pin_and_a_schedule_come_before_the_policy() -> None:
    pool = pool_of(FixedTtl(0), is_pinned=True)
    assert [one.reason for one in pool.tick(0.0)] == ["pinned"]
    pool.loaded("a", 1.0)
    assert pool.core.wake_at() == inf
    assert [one.load for one in pool.pin("a", 2.0, pinned=False)] == [False]
    hours = Schedule.parse("thu 08:00-18:00")  # the epoch was a Thursday
    pool = pool_of(FixedTtl(0), schedules=(hours,))
    assert pool.tick(0.0) == [] and pool.core.wake_at() == 8 * 3600 - 10  # a load takes 10 s
    assert [one.reason for one in pool.tick(8 * 3600 - 10.0)] == ["scheduled"]
    pool.loaded("a", 8 * 3600.0)
    assert pool.core.wake_at() == 18 * 3600
    assert [one.load for one in pool.tick(18 * 3600.0)] == [False]


def test_a_hint_is_followed_until_it_was_wrong_too_often() -> None:
    """A load of 10 s, and 30 s of keeping where it was wrong, against a cold start of 60."""
    pool = pool_of(FixedTtl(0))
    followed = []
    for at in (0.0, 1000.0):
        orders = pool.hint("a", Hint.PAGE, at)
        followed.append([one.reason for one in orders])
        if not orders:
            break
        pool.loaded("a", at + 10)
        assert pool.core.wake_at() == at + 40
        assert [one.load for one in pool.tick(at + 40)] == [False]
        pool.gone("a", at + 41)
    assert followed == [["hint: page"], []]
    declined = pool.kept[-1]
    assert isinstance(declined, PoolDecision) and declined.choice is PoolChoice.DECLINE
    assert declined.features == pytest.approx(
        {"share": 1 / 3, "saved_gpu_s": 20.0, "spent_gpu_s": 30.0}
    )
    # A request after a hint restores its credit; an operator's order needs none.
    pool.arrive("a", 1, 1020.0)
    pool.loaded("a", 1030.0)
    for order in pool.end("a", 1, 1031.0):
        pool.gone(order.model, 1031.0)
    assert pool.hint("a", Hint.PAGE, 2000.0)
    assert pool.hint("b", Hint.OPERATOR, 2000.0)[0].load


def test_a_shadow_of_the_same_policy_does_what_the_pool_did() -> None:
    rng = np.random.default_rng(3)
    arrivals = np.sort(rng.uniform(0, 20_000, 400))
    live = pool_of(BreakEven(PRICES), 2.0)
    other = pool_of(BreakEven(PRICES), 2.0)
    shadow = ShadowPool(PoolReplay(other.core, lambda name: 7.0), 0.0)
    player = PoolReplay(live.core, lambda name: 7.0)
    player.start(0.0)
    over: list[tuple[float, int, float]] = []
    for at, arrival in enumerate(arrivals.tolist()):
        for end_s, request, service_s in [one for one in over if one[0] <= arrival]:
            shadow.ended(request, end_s, service_s)
            over.remove((end_s, request, service_s))
        name, service_s = NAMES[at % 3], float(rng.exponential(5.0))
        player.request(name, arrival, service_s)
        shadow.arrived(name, at, arrival)
        over.append((arrival + service_s + 7.0, at, service_s))
    for end_s, request, service_s in sorted(over):
        shadow.ended(request, end_s, service_s)
    assert shadow.counts.requests == 400
    assert shadow.counts.cold_starts == sum(one.cold_starts for one in live.core.models) > 100


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "",
            "schedule: '' is not DAYS HH:MM-HH:MM [ZONE] (write for instance 'mon-fri 08:00-18:00'",
        ),
        ("mon-fri", "'mon-fri' is not DAYS HH:MM-HH:MM [ZONE]"),
        ("monday 08:00-18:00", "'monday' is not a day (use daily, or mon, tue"),
        ("mon 8-18", "'8-18' is not HH:MM-HH:MM"),
        ("mon 08:00-25:00", "25:00 in '08:00-25:00' is not a time of day (00:00 to 24:00)"),
        (
            "mon 08:00-08:00",
            "begins and ends at the same time (write 00:00-24:00 for the whole day)",
        ),
        ("mon 24:00-08:00", "begins at 24:00 (write 00:00)"),
        ("mon 08:00-18:00 Mars/Base", "unknown time zone 'Mars/Base'"),
    ],
)
def test_a_malformed_schedule_is_refused_with_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(CallerError) as caught:
        Schedule.parse(text)
    assert says in str(caught.value)


def test_schedules_go_past_midnight_round_the_week_and_by_their_zones_clock() -> None:
    thursday = 0.0
    night = Schedule.parse("fri-mon 22:00-02:00").next_hours(thursday)
    assert (night.begin_s, night.end_s) == (46 * 3600, 50 * 3600)
    # In the middle of Saturday's first hour that of Friday is still open.
    assert Schedule.parse("fri 22:00-02:00").next_hours(48.5 * 3600).begin_s == 46 * 3600
    summer = 1_751_846_400.0  # Monday, 2025-07-07 00:00 UTC
    hours = Schedule.parse("mon 08:00-24:00 Europe/Berlin").next_hours(summer)
    assert (hours.begin_s - summer, hours.end_s - summer) == (6 * 3600, 22 * 3600)


def test_a_pin_that_would_leave_another_model_no_room_is_refused() -> None:
    pool = Driven([PoolMember("a", 2.0), PoolMember("b")], FixedTtl(60), {"cpu": 2.0})
    with pytest.raises(Conflict, match=r"and 'b' takes 1 \(pin fewer models"):
        pool.pin("a", 0.0, pinned=True)


def test_a_model_that_is_not_there_is_named_with_those_that_are() -> None:
    pool = pool_of()
    with pytest.raises(CallerError, match=r"no model is called 'x' \(this pool has a, b, c\)"):
        pool.arrive("x", 1, 0.0)
