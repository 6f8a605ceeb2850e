"""Operators' changes to a pool take effect; a shadow pool decides beside it and does nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.ledger.errors import CallerError
from tailrace.ledger.links.hints import Hint
from tailrace.origin.core.events import Command, RecordHistory
from tailrace.origin.core.states import ModelState
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.policies import WarmPrices
from tailrace.origin.pool.records import PoolDecision, PoolRecord
from tailrace.origin.pool.replay import PoolReplay
from tailrace.origin.serving.live_pool import LivePool

pytestmark = pytest.mark.anyio

NAMES = ("a", "b", "c")
LOAD_S = 7.0


class Played:
    """A live pool of three with room for two, whose loads are played in simulated time."""

    def __init__(self, policy: str, own: dict[str, str] | None = None) -> None:
        self.told: list[tuple[PoolRecord, bool]] = []
        members = [PoolMember(name, load_s=LOAD_S) for name in NAMES]
        self.live = LivePool(
            members,
            policy,
            {"cpu": 2.0},
            WarmPrices(60.0, LOAD_S),
            own or {},
            lambda record, of_shadow: self.told.append((record, of_shadow)),
            lambda: self.player.now,
        )
        self.player = PoolReplay(self.live.pool, lambda model: LOAD_S, keep=self.live.keep)
        self.live.carry_out = self.carry_out
        self.player.start(0.0)

    def carry_out(self, commands: list[Command]) -> None:
        """Carry out commands except for records, which the live pool has kept already."""
        self.player.carry_out([one for one in commands if not isinstance(one, RecordHistory)])

    def requests(self, count: int, mean_s: float, seed: int = 1) -> None:
        """Make `count` requests, to each model in turn, at random times from now on."""
        rng = np.random.default_rng(seed)
        at_s = self.player.now + np.cumsum(rng.exponential(mean_s, count))
        for nth, one in enumerate(at_s.tolist()):
            self.player.request(NAMES[nth % 3], one, float(rng.exponential(5.0)))

    def state(self, model: str) -> ModelState:
        return self.live.pool.of(model).state


async def test_a_shadow_predicts_what_its_policy_comes_to_when_it_is_applied() -> None:
    """Within 10 %: of the same requests, by a pool that lets two and one that has it decide."""
    served, applied = Played("greedy-dual"), Played("ttl-2")
    await served.live.apply("ttl-2", shadow=True)
    for one in (served, applied):
        one.requests(600, 12.0)
        one.player.advance(one.player.now + 1000.0)
    seen = served.live.shadow()
    assert seen is not None and seen["policy"] == "ttl-2"
    assert seen["requests"] == seen["real_requests"] == 600
    realised = sum(state.cold_starts for state in applied.live.pool.models) / 600
    assert seen["cold_rate"] == pytest.approx(realised, rel=0.1)
    assert seen["real_cold_rate"] != pytest.approx(realised, rel=0.1)  # they do differ
    of_shadow = [record for record, is_shadow in served.told if is_shadow]
    assert of_shadow and all(isinstance(one, PoolDecision) for one in of_shadow)
    assert all(one.policy == "ttl-2" for one in of_shadow if isinstance(one, PoolDecision))


async def test_a_policy_that_is_applied_has_learnt_from_what_was_asked_before() -> None:
    played = Played("greedy-dual")
    played.requests(120, 400.0)
    await played.live.apply("adaptive-ttl", shadow=False)
    played.requests(3, 400.0)
    decisions = [one for one, _ in played.told if isinstance(one, PoolDecision)]
    [*_, last] = [one for one in decisions if one.choice.value == "keep"]
    assert last.policy == "adaptive-ttl"
    assert last.features["gaps"] > 30
    assert last.features["ttl_s"] < 60.0  # break-even, where nothing is known


async def test_a_model_keeps_its_own_policy_whatever_is_applied() -> None:
    played = Played("greedy-dual", {"b": "ttl-0"})
    await played.live.apply("break-even", shadow=False)
    assert [state.policy.name for state in played.live.pool.models] == [
        "break-even",
        "ttl-0",
        "break-even",
    ]


async def test_operators_prewarm_and_pin_and_edges_hint() -> None:
    played = Played("ttl-0")
    played.live.prewarm("a")
    played.player.advance(LOAD_S)
    await played.live.pin("a", pinned=True)
    played.live.hint(Hint.MODELS, "")  # for any model: there is room for one more
    played.player.advance(2 * LOAD_S)
    ready = [name for name in NAMES if played.state(name) is ModelState.READY]
    assert ready == ["a", "b"]
    played.live.hint(Hint.RECONNECT, "gone")  # a stream of a model that is no longer served
    played.player.advance(1000.0)
    assert played.state("a") is ModelState.READY
    assert played.state("b") is ModelState.AWAY
    await played.live.pin("a", pinned=False)
    played.player.advance(1001.0)
    assert played.state("a") is ModelState.AWAY


async def test_what_cannot_be_applied_is_refused_with_what_can() -> None:
    played = Played("ttl-0")
    with pytest.raises(CallerError, match=r"no policy is called 'lucky' \(ttl-SECONDS, adaptive"):
        await played.live.apply("lucky", shadow=False)
    with pytest.raises(CallerError, match=r"origin\.policy: 'ttl-x' has no valid TTL"):
        Played("ttl-x")
    with pytest.raises(CallerError, match=r"models\.b\.policy: no policy is called 'x'"):
        Played("ttl-0", {"b": "x"})
    for name in ("ttl-1e30", "ttl-315360001", "ttl--1", "ttl-inf", "ttl-nan"):
        told = rf"'{name}' is not a TTL from ttl-0 to ttl-315360000 \(10 years\)"
        for shadow in (False, True):
            with pytest.raises(CallerError, match=f"policy: {told}"):
                await played.live.apply(name, shadow=shadow)
        with pytest.raises(CallerError, match=rf"origin\.shadow_policy: {told}"):
            played.live.run_shadow(name)
        with pytest.raises(CallerError, match=rf"origin\.policy: {told}"):
            Played(name)
        with pytest.raises(CallerError, match=rf"models\.b\.policy: {told}"):
            Played("ttl-0", {"b": name})
    commands: list[Command] = []
    played.live.carry_out = commands.extend
    with pytest.raises(CallerError, match="no model is called 'x'"):
        played.live.prewarm("x")
    assert commands == []
