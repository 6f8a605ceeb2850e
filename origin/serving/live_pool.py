"""What operators see of the pool that serves, and change of it; and the shadow beside it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from tailrace.ledger.errors import CallerError, ConfigError
from tailrace.ledger.links.hints import Hint
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.named_policy import named_policy
from tailrace.origin.pool.policies.policies import KeepAlivePolicy, WarmPrices
from tailrace.origin.pool.records import (
    ArrivalRecord,
    KeepRecord,
    PoolDecision,
    PoolRecord,
    TierChange,
)
from tailrace.origin.pool.replay import LEAVE_S, PoolCounts, PoolReplay, ShadowPool
from tailrace.origin.pool.tiers import Tier
from tailrace.origin.pool.warm_pool import PoolOrder, WarmPool
from tailrace.origin.serving.pins import Pins

MAX_REMEMBERED = 20_000
"""Requests that a policy which is applied later learns from."""

log = structlog.get_logger("models")

Carry = Callable[[list[PoolOrder]], None]
Tell = Callable[[PoolRecord, bool], None]


class LivePool:
    """`pool` is what serves, by `policy`, but for models that have their `own` one.

    `carry_out` does what it orders; `tell` gets its records, and what the shadow beside it
    decides (True). Times are the pool's.
    """

    def __init__(
        self,
        members: Sequence[PoolMember],
        policy: str,
        caps: Mapping[str, float],
        prices: WarmPrices,
        own: Mapping[str, str],
        tell: Tell,
        clock_s: Callable[[], float],
        pins: Pins | None = None,
    ) -> None:
        """`pins` are those of operators, which are forgotten with this object if not given."""
        self.clock_s = clock_s
        self._pins = pins
        self.carry_out: Carry = lambda orders: None
        self._members, self._caps, self._own = members, caps, own
        self._policy = policy
        self._prices, self.tell = prices, tell
        self._recent: deque[ArrivalRecord] = deque(maxlen=MAX_REMEMBERED)
        self._left_s: dict[str, float] = {}
        self._leave_s = LEAVE_S
        self._shadow: tuple[str, float, ShadowPool, PoolCounts] | None = None
        self.pool = self._pool_of(
            members, named_policy(policy, prices, "origin.policy"), self._keep
        )

    # ---- what operators ask for ----

    def prewarm(self, model: str) -> None:
        self.carry_out(self.pool.hint(model, Hint.OPERATOR, self.clock_s()))

    async def pin(self, model: str, *, pinned: bool) -> None:
        """Pin a model or unpin it, now and at the next starts of the origin."""
        self.carry_out(self.pool.pin(model, self.clock_s(), pinned=pinned))
        if self._pins is not None:
            await self._pins.keep(model, pinned=pinned)

    def restore_pins(self) -> None:
        """Pin what operators have pinned before the origin started, as far as it is possible."""
        for model in () if self._pins is None else self._pins.models:
            try:
                self.carry_out(self.pool.pin(model, self.clock_s(), pinned=True))
            except (CallerError, ConfigError) as error:
                log.warning("pin.ignored", model=model, error=str(error))

    async def apply(self, policy: str, *, shadow: bool) -> None:
        """It knows what has been asked of late. Models with a policy of their own keep it."""
        chosen = await self._taught(named_policy(policy, self._prices))
        if shadow:
            self._run_beside(policy, chosen)
        else:
            self._policy = policy
            self.carry_out(self.pool.use(chosen, self.clock_s()))

    async def learn(self, past: Sequence[ArrivalRecord]) -> None:
        """From requests before this one's time, in the order in which they came: all policies."""
        self._recent = deque([*past, *self._recent], MAX_REMEMBERED)
        own = {name: await self._taught(one) for name, one in self._own_policies().items()}
        self.carry_out(self.pool.use_own(own, self.clock_s()))
        name = self._policy
        chosen = await self._taught(named_policy(name, self._prices))
        if name == self._policy:  # an operator has not applied another one meanwhile
            self.carry_out(self.pool.use(chosen, self.clock_s()))
        if self._shadow is not None:
            await self.apply(self._shadow[0], shadow=True)

    def run_shadow(self, policy: str) -> None:
        """Begin a shadow at the start of the origin, when there is nothing to learn from yet."""
        self._run_beside(policy, named_policy(policy, self._prices, "origin.shadow_policy"))

    def _run_beside(self, name: str, policy: KeepAlivePolicy) -> None:
        now = self.clock_s()
        pins = {one.name: one.is_pinned for one in self.pool.states()}
        members = [replace(one, is_pinned=pins[one.name]) for one in self._members]
        beside = self._pool_of(members, policy, self._keep_of_shadow)
        pool = self.pool
        replay = PoolReplay(beside, lambda one: pool.of(one).load_s, lambda one: self._leave_s)
        running = ShadowPool(replay, now)
        self.pool.beside = running
        self._shadow = name, now, running, PoolCounts.of(self.pool)

    def shadow(self) -> dict[str, Any] | None:
        """Both since the shadow began: `cold_rate` is what it would have come to."""
        if self._shadow is None:
            return None
        policy, since_s, running, before = self._shadow
        real, seen = PoolCounts.of(self.pool), running.counts
        requests = real.requests - before.requests
        cold_starts = real.cold_starts - before.cold_starts
        return {
            "policy": policy,
            "for_s": round(self.clock_s() - since_s, 3),
            "requests": seen.requests,
            "cold_starts": seen.cold_starts,
            "cold_rate": seen.cold_rate,
            "wasted_gpu_s": seen.wasted_gpu_s,
            "real_requests": requests,
            "real_cold_starts": cold_starts,
            "real_cold_rate": cold_starts / requests if requests else 0.0,
            "real_wasted_gpu_s": real.wasted_gpu_s - before.wasted_gpu_s,
        }

    def hint(self, hint: Hint, model: str) -> None:
        """Of one model, or of any where that is empty."""
        names = [one.name for one in self._members if model in ("", one.name)]
        for name in names:
            self.carry_out(self.pool.hint(name, hint, self.clock_s()))

    def _pool_of(
        self, members: Sequence[PoolMember], policy: KeepAlivePolicy, keep: KeepRecord
    ) -> WarmPool:
        own, cost = self._own_policies(), self._prices.cold_cost_gpu_s
        return WarmPool(members, policy, self._caps, cold_cost_gpu_s=cost, policies=own, keep=keep)

    def _own_policies(self) -> dict[str, KeepAlivePolicy]:
        return {
            name: named_policy(one, self._prices, f"models.{name}.policy")
            for name, one in self._own.items()
        }

    # ---- what it learns ----

    def _keep(self, record: PoolRecord) -> None:
        if isinstance(record, ArrivalRecord):
            self._recent.append(record)
        elif isinstance(record, PoolDecision) and record.choice.value == "evict":
            self._left_s[record.model] = record.at_s
        elif isinstance(record, TierChange) and record.tier <= Tier.HOST:
            left_s = self._left_s.pop(record.model, None)
            self._leave_s = self._leave_s if left_s is None else record.at_s - left_s
        self.tell(record, False)

    def _keep_of_shadow(self, record: PoolRecord) -> None:
        if isinstance(record, PoolDecision):
            self.tell(record, True)

    async def _taught(self, policy: KeepAlivePolicy) -> KeepAlivePolicy:
        """In another thread, as it takes a second; what is asked in that one it does not learn."""
        await asyncio.to_thread(teach, policy, tuple(self._recent))
        return policy


def teach(policy: KeepAlivePolicy, past: Sequence[ArrivalRecord]) -> None:
    """The gaps between requests, as if it had decided about each."""
    ended_s: dict[str, float] = {}
    for one in sorted(past, key=lambda one: one.arrived_s):
        last_s = ended_s.get(one.model)
        if last_s is not None and one.arrived_s > last_s:
            policy.decide(one.model, last_s)
            policy.observe(one.model, one.arrived_s - last_s)
        ended_s[one.model] = max(one.ended_s, last_s or 0.0)
