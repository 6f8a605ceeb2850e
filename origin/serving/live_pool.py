"""The pool of models that serves requests: policies, history, operators' orders, shadow pool.

The shadow pool simulates another policy on the same events. Every event of an origin's models
passes through `happen`, so that the history and the shadow pool see all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import structlog

from tailrace.ledger.errors import CallerError
from tailrace.ledger.links.hints import Hint
from tailrace.origin.core.events import (
    Command,
    Event,
    ModelHinted,
    ModelPinned,
    PoliciesSet,
    RecordHistory,
    Tick,
)
from tailrace.origin.core.pool import ModelPool
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.named_policy import named_policy
from tailrace.origin.pool.policies.policies import KeepAlivePolicy, WarmPrices
from tailrace.origin.pool.records import (
    ArrivalRecord,
    PoolDecision,
    PoolRecord,
    TierChange,
)
from tailrace.origin.pool.replay import LEAVE_S, PoolCounts, PoolReplay, ShadowPool
from tailrace.origin.pool.tiers import Tier
from tailrace.origin.serving.pins import Pins

MAX_REMEMBERED = 20_000
"""Maximum number of recent requests that are remembered, to teach a policy that is set later."""

log = structlog.get_logger("models")

CarryOut = Callable[[list[Command]], None]
Tell = Callable[[PoolRecord, bool], None]


class LivePool:
    """The pool that decides which models are loaded.

    `policy` decides about all models except those with a policy in `own`. The pool's commands are
    passed to `carry_out`. Each record of the pool, and each decision of the shadow pool, is passed
    to `tell`, whose second argument is True for the shadow pool. Times are seconds of `clock_s`.
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
        random: Random | None = None,
    ) -> None:
        """Create a pool; if `pins` is None, pins that operators set are not stored."""
        self._random = random
        self.clock_s = clock_s
        self._pins = pins
        self.carry_out: CarryOut = lambda commands: None
        self._unix_offset_s = 0.0
        self._members, self._caps, self._own = members, caps, own
        self._policy = policy
        self._prices, self.tell = prices, tell
        self._recent: deque[ArrivalRecord] = deque(maxlen=MAX_REMEMBERED)
        self._left_s: dict[str, float] = {}
        self._leave_s = LEAVE_S
        self._shadow: tuple[str, float, ShadowPool, PoolCounts] | None = None
        self.pool = self._pool_of(members, named_policy(policy, prices, "origin.policy"))

    def happen(self, event: Event) -> None:
        """Pass an event to the pool, store its records, and carry out its commands."""
        if isinstance(event, Tick) and event.unix_offset_s is not None:
            self._unix_offset_s = event.unix_offset_s
        commands = self.pool.handle(event, self.clock_s())
        for command in commands:
            if isinstance(command, RecordHistory):
                self.keep(command.record)
        self.carry_out(commands)

    # ---- orders of operators ----

    def prewarm(self, model: str) -> None:
        """Load a model now, as if a request for it were expected soon."""
        self.happen(ModelHinted(self.pool.of(model).name, Hint.OPERATOR))

    async def pin(self, model: str, *, pinned: bool) -> None:
        """Pin a model or unpin it, now and at the next starts of the origin."""
        self.happen(ModelPinned(model, pinned))
        if self._pins is not None:
            await self._pins.keep(model, pinned=pinned)

    def restore_pins(self) -> None:
        """Pin the models that operators pinned before this start, as far as possible."""
        for model in () if self._pins is None else self._pins.models:
            try:
                self.happen(ModelPinned(model, pinned=True))
            except CallerError as error:
                log.warning("model.pin_not_restored", model=model, error=str(error))

    async def apply(self, policy: str, *, shadow: bool) -> None:
        """Switch to another policy or, with `shadow`, run it in the shadow pool.

        The policy first learns from recent requests. Models that have policies of their own keep
        them.
        """
        chosen = await self._taught(named_policy(policy, self._prices))
        if shadow:
            self._start_shadow(policy, chosen)
        else:
            self._policy = policy
            self.happen(PoliciesSet(chosen))

    async def learn(self, past: Sequence[ArrivalRecord]) -> None:
        """Teach all policies with requests of earlier origins, in the order of their arrival."""
        self._recent = deque([*past, *self._recent], MAX_REMEMBERED)
        own = {name: await self._taught(one) for name, one in self._own_policies().items()}
        self.happen(PoliciesSet(None, own))
        name = self._policy
        chosen = await self._taught(named_policy(name, self._prices))
        if name == self._policy:  # no operator has set another policy meanwhile
            self.happen(PoliciesSet(chosen))
        if self._shadow is not None:
            await self.apply(self._shadow[0], shadow=True)

    def run_shadow(self, policy: str) -> None:
        """Start the shadow pool when the origin starts; there are no requests to teach it yet."""
        self._start_shadow(policy, named_policy(policy, self._prices, "origin.shadow_policy"))

    def _start_shadow(self, name: str, policy: KeepAlivePolicy) -> None:
        now = self.clock_s()
        pins = {one.name: one.is_pinned for one in self.pool.models}
        members = [replace(one, is_pinned=pins[one.name]) for one in self._members]
        shadow = self._pool_of(members, policy)
        shadow.handle(Tick(self._unix_offset_s), now)
        pool = self.pool
        replay = PoolReplay(
            shadow,
            lambda one: pool.of(one).load_s,
            lambda one: self._leave_s,
            self._keep_of_shadow,
        )
        running = ShadowPool(replay, now)
        self.pool.shadow = running
        self._shadow = name, now, running, PoolCounts.of(self.pool)

    def shadow(self) -> dict[str, Any] | None:
        """Return the figures of the shadow pool and of the real pool since the shadow pool began.

        Figures of the real pool have the prefix `real_`. The result is None if no shadow pool runs.
        """
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
        """Report to the pool that a model may soon be requested; any model if `model` is empty."""
        if not model or self.pool.find(model) is not None:
            self.happen(ModelHinted(model, hint))

    def _pool_of(self, members: Sequence[PoolMember], policy: KeepAlivePolicy) -> ModelPool:
        own, cost = self._own_policies(), self._prices.cold_cost_gpu_s
        return ModelPool(
            members,
            policy,
            self._caps,
            cold_cost_gpu_s=cost,
            policies=own,
            random=self._random,
        )

    def _own_policies(self) -> dict[str, KeepAlivePolicy]:
        return {
            name: named_policy(one, self._prices, f"models.{name}.policy")
            for name, one in self._own.items()
        }

    # ---- records ----

    def keep(self, record: PoolRecord) -> None:
        """Remember what policies can learn from a record of the pool, and pass it to `tell`."""
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
        """Teach a policy the recent requests, and return the policy.

        A thread does this, because it may take a second. Requests that arrive meanwhile are left
        out.
        """
        await asyncio.to_thread(teach, policy, tuple(self._recent))
        return policy


def teach(policy: KeepAlivePolicy, past: Sequence[ArrivalRecord]) -> None:
    """Teach a policy the gaps between past requests of each model."""
    ended_s: dict[str, float] = {}
    for one in sorted(past, key=lambda one: one.arrived_s):
        last_s = ended_s.get(one.model)
        if last_s is not None and one.arrived_s > last_s:
            policy.decide(one.model, last_s)
            policy.observe(one.model, one.arrived_s - last_s)
        ended_s[one.model] = max(one.ended_s, last_s or 0.0)
