"""The pool: models, what happens to them, and the orders that follow.

A caller says what happens (`arrive`, `end`, `loaded`, `lost`, `gone`, `hint`) and when, carries
out the orders that come back, and calls `tick` at the time that `wake_at` names. Several callers
cannot race: each call ends in a state of the table in `tiers` beside this.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from tailrace.ledger.errors import CallerError, ConfigError
from tailrace.ledger.links.hints import Hint
from tailrace.origin.pool.kept import HINT_WINDOW_S, TURN_S, HintRecord, KeptModel, Visit
from tailrace.origin.pool.members import LEAST_SIZE, PoolMember
from tailrace.origin.pool.policies.policies import COLD_COST_GPU_S, GreedyDual, KeepAlivePolicy
from tailrace.origin.pool.records import (
    ArrivalRecord,
    KeepRecord,
    PoolChoice,
    PoolDecision,
    TierChange,
)
from tailrace.origin.pool.tiers import ABOUT_TO_GO, HOLDING_ROOM, PoolEvent, Residence, Tier, follow

PRICE_WEIGHT = 0.3
"""Of the newest load in what a load is expected to take."""


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """To be carried out at once: load the model, or (`load` false) end its workers."""

    model: str
    load: bool
    reason: str


class Beside(Protocol):
    """Told of the pool's requests: another pool, whose policy decides and is not followed."""

    def arrived(self, model: str, request: Hashable, now: float) -> None: ...

    def ended(self, request: Hashable, now: float, service_s: float) -> None: ...


class WarmPool:
    """`caps` bounds what the models of a device take; a device without one is not bounded."""

    def __init__(
        self,
        members: Sequence[PoolMember],
        policy: KeepAlivePolicy,
        caps: Mapping[str, float] | None = None,
        *,
        cold_cost_gpu_s: float = COLD_COST_GPU_S,
        policies: Mapping[str, KeepAlivePolicy] | None = None,
        keep: KeepRecord = lambda record: None,
    ) -> None:
        """`policies` are those of models that have one of their own; `keep` gets every record.

        That the caps hold the members, and what is pinned, is for who makes it to see to.
        """
        self._caps = dict(caps or {})
        self._cold_cost = cold_cost_gpu_s
        self._policy = policy
        self._policies = dict(policies or {})
        self._keep = keep
        self._ranking = policy if isinstance(policy, GreedyDual) else GreedyDual(cold_cost_gpu_s)
        self._models = {
            one.name: KeptModel(
                one, self._policies.get(one.name, policy), one.load_s, one.is_pinned
            )
            for one in members
        }
        self._visits: dict[Hashable, Visit] = {}
        self._queue: list[str] = []
        """Models that wait for room, longest first."""
        self.beside: Beside | None = None

    # ---- what happens ----

    def fill(self, now: float) -> list[PoolOrder]:
        """As an origin begins: of those that are away, in their order, as many as fit."""
        orders: list[PoolOrder] = []
        for name, kept in self._models.items():
            if kept.residence is Residence.AWAY and self._fits(kept):
                orders += self.hint(name, Hint.OPERATOR, now)
        return orders

    def arrive(
        self, model: str, request: Hashable, now: float, *, begun: bool = False
    ) -> list[PoolOrder]:
        """A request wants the model; it is taken at once if that `is_ready`, or else `loaded`.

        One that has `begun` is a stream already: a model that drains takes it, too.
        """
        kept = self.of(model)
        idle = not kept.visits
        self._visits[request] = visit = Visit(model, now, kept.tier)
        if self.beside is not None:
            self.beside.arrived(model, request, now)
        kept.visits += 1
        kept.requests += 1
        kept.idles(now, idle=False)
        for hint in kept.hints.values():
            hint.asked(now)
        if idle:
            if kept.ended_s is not None:
                kept.policy.observe(model, now - kept.ended_s)
            kept.ended_s, kept.prewarm_at_s = None, inf
            self._ranking.arrived(model, max(kept.member.size, LEAST_SIZE))
            if not kept.is_ready:
                kept.cold_starts += 1
                visit.tier = min(kept.tier, Tier.DEVICE)  # what is leaving cannot be asked
        if kept.is_ready or (begun and kept.residence is Residence.DRAINING):
            visit.taken_s = now
            self._reach(kept, Tier.HOT, now, "asked")
            return []
        kept.waiting.append(request)
        return self._want(kept, now, PoolChoice.LOAD, "a request waits for it", {})

    def end(self, request: Hashable, now: float) -> list[PoolOrder]:
        """A request is over, whether it was taken or not; unknown ones are over already."""
        visit = self._visits.pop(request, None)
        if visit is None:
            return []
        kept = self._models[visit.model]
        taken_s = now if visit.taken_s is None else visit.taken_s
        waited_s = taken_s - visit.arrived_s
        self._keep(ArrivalRecord(visit.model, visit.arrived_s, waited_s, now, visit.tier))
        if self.beside is not None:
            self.beside.ended(request, now, now - taken_s)
        if request in kept.waiting:
            kept.waiting.remove(request)
        kept.visits -= 1
        if kept.residence is Residence.DRAINING and kept.visits == len(kept.waiting):
            return self._leave_to_others(kept, now)
        if kept.visits:
            return []
        kept.ended_s = now
        kept.idles(now, idle=kept.is_ready)
        if kept.residence is Residence.QUEUED:  # who wanted it does not wait any more
            self._queue.remove(visit.model)
            kept.residence = follow(kept.residence, PoolEvent.GIVEN_UP)
        self._decide(kept, now)
        return self.tick(now)

    def stage(self, model: str, stage_tier: Tier, now: float) -> None:
        """A model that is loading has come so far."""
        kept = self.of(model)
        if kept.residence is Residence.LOADING and stage_tier > kept.tier:
            self._reach(kept, stage_tier, now, "loading")

    def loaded(self, model: str, now: float, load_s: float | None = None) -> list[PoolOrder]:
        """Take the requests that waited for a model that is ready now.

        `load_s` is how long the next load of this kind is expected to take by this one; without
        it, that is the time since the load was ordered.
        """
        kept = self.of(model)
        was_loading = kept.residence is Residence.LOADING
        kept.residence = follow(kept.residence, PoolEvent.LOADED)
        if not was_loading:
            return []
        kept.retry_at_s = 0.0
        took_s = now - kept.loading_s
        newest, known = took_s if load_s is None else load_s, kept.prices_s.get(kept.loading_from)
        price = newest if known is None else known + PRICE_WEIGHT * (newest - known)
        kept.prices_s[kept.loading_from] = kept.load_s = price
        kept.ready_s = now
        self._reach(kept, Tier.COMPILED, now, kept.reason, took_s)
        for request in kept.waiting:
            self._visits[request].taken_s = now
        if kept.waiting:
            self._reach(kept, Tier.HOT, now, "asked")
        kept.waiting.clear()
        if not kept.visits:
            kept.wasted_gpu_s += took_s
            kept.idles(now, idle=True)
        return self.tick(now)

    def lost(self, model: str, now: float) -> None:
        """Load a model again whose last worker died; another one is being started."""
        kept = self.of(model)
        before = kept.residence
        kept.residence = follow(before, PoolEvent.LOST)
        if before is Residence.READY:
            kept.idles(now, idle=False)
            kept.loading_s, kept.loading_from, kept.reason = now, Tier.HOST, "its worker died"
            self._reach(kept, Tier.HOST, now, kept.reason)

    def given_up(
        self, model: str, now: float, reason: str, retry_at_s: float = 0.0
    ) -> list[PoolOrder]:
        """Have a model leave that no worker of it can be started for, until `retry_at_s`.

        Its requests wait on; the caller tells them why.
        """
        kept = self.of(model)
        kept.residence = follow(kept.residence, PoolEvent.GIVEN_UP)
        kept.keep_until_s, kept.prewarm_at_s, kept.retry_at_s = now, inf, retry_at_s
        self._log(kept, now, PoolChoice.EVICT, reason, {})
        if kept.visits:
            kept.residence = follow(kept.residence, PoolEvent.WANTED)
            kept.reason = "a request waits for it"
        return [PoolOrder(model, False, reason)]

    def is_in_the_way(self, model: str, now: float) -> bool:
        """Return True if another model waits for room on this model's device."""
        near = self._on(self.of(model).member.device)
        return any(
            one.name in self._queue and one.retry_at_s <= now for one in near if one.name != model
        )

    def gone(self, model: str, now: float) -> list[PoolOrder]:
        """Its workers have ended; its files are in the page cache, and its room is free."""
        kept = self.of(model)
        kept.residence = follow(kept.residence, PoolEvent.GONE)
        self._reach(kept, Tier.HOST, now, kept.reason)
        if kept.residence is Residence.QUEUED:
            self._enqueue(kept, now)
        return self.tick(now)

    def hint(self, model: str, hint: Hint, now: float) -> list[PoolOrder]:
        """It may soon be asked for: load it ahead, where that pays and nobody else has to go."""
        kept = self.of(model)
        if kept.visits:
            return []
        record = kept.hints.setdefault(hint, HintRecord())
        share = 1.0 if hint is Hint.OPERATOR else record.share
        record.came(now)
        spent_s = kept.load_s + (1 - share) * HINT_WINDOW_S
        features = {
            "share": share,
            "saved_gpu_s": share * self._cold_cost,
            "spent_gpu_s": spent_s,
        }
        if hint is not Hint.OPERATOR and share * self._cold_cost <= spent_s:
            why = f"a {hint} hint is right too seldom"
            self._log(kept, now, PoolChoice.DECLINE, why, features)
            return []
        until_s = now + kept.load_s + HINT_WINDOW_S
        kept.keep_until_s = max(kept.keep_until_s, until_s)
        if kept.residence in (Residence.LOADING, Residence.READY, Residence.QUEUED):
            return []
        if hint is not Hint.OPERATOR and not self._fits(kept):
            self._log(kept, now, PoolChoice.DECLINE, "there is no free room", features)
            return []
        return self._want(kept, now, PoolChoice.PREWARM, f"hint: {hint}", features)

    def pin(self, model: str, now: float, *, pinned: bool) -> list[PoolOrder]:
        """Keep it whatever the policy says, or no longer.

        Raises ConfigError where beside what is pinned there would not be room for each of the
        others, one at a time.
        """
        kept = self.of(model)
        device, near = kept.member.device, self._on(kept.member.device)
        cap = self._caps.get(device, inf)
        taken = sum(one.member.size for one in near if one.is_pinned or one is kept)
        for one in near if pinned else ():
            if taken + (0 if one.is_pinned or one is kept else one.member.size) > cap:
                raise ConfigError(
                    f"pinned models take {taken:g} of {device}, whose cap is {cap:g}, and"
                    f" {one.name!r} takes {one.member.size:g}",
                    field="pin",
                    hint="pin fewer, or raise the cap",
                )
        kept.is_pinned = pinned
        if not pinned and not kept.visits:
            self._decide(kept, now)
        return self.tick(now)

    def use(self, policy: KeepAlivePolicy, now: float) -> list[PoolOrder]:
        """Another policy from now on; what is idle is decided anew."""
        self._policy = policy
        if isinstance(policy, GreedyDual):
            self._ranking = policy
        return self.use_own(self._policies, now)

    def use_own(self, policies: Mapping[str, KeepAlivePolicy], now: float) -> list[PoolOrder]:
        """The same of the models that have one of their own."""
        self._policies = dict(policies)
        for kept in self._models.values():
            kept.policy = policies.get(kept.name, self._policy)
            if kept.is_idle:
                self._decide(kept, now)
        return self.tick(now)

    def tick(self, now: float) -> list[PoolOrder]:
        """What is due: models whose time is over leave, others are loaded ahead."""
        orders: list[PoolOrder] = []
        for kept in self._models.values():
            if kept.is_idle and self._until(kept, now) <= now:
                orders += self._evict(kept, now, f"{kept.policy.name}: its time is over")
        for kept in self._models.values():
            if kept.residence is not Residence.AWAY or kept.visits:
                continue
            wanted = self._override(kept, now)
            if wanted:
                orders += self._want(kept, now, PoolChoice.PREWARM, wanted, {})
            elif kept.prewarm_at_s <= now:
                orders += self._prewarm(kept, now)
        return orders + self._admit(now)

    def wake_at(self, now: float) -> float:
        """When `tick` is next to be called; infinite where nothing is due by itself."""
        return min((self._due(kept, now) for kept in self._models.values()), default=inf)

    # ---- what is known ----

    def of(self, model: str) -> KeptModel:
        """One model as it is: always the same object."""
        kept = self._models.get(model)
        if kept is None:
            hint = f"this pool has {', '.join(self._models)}"
            raise CallerError(f"no model is called {model!r}", field="model", hint=hint)
        return kept

    def expected_s(self, model: str, now: float) -> float:
        """Until it may be asked, if what was measured of its loads holds."""
        kept = self.of(model)
        if kept.is_ready:
            return 0.0
        begun_s = now - kept.loading_s if kept.residence is Residence.LOADING else 0.0
        return max(kept.load_s - begun_s, 0.0)

    def states(self) -> Collection[KeptModel]:
        return self._models.values()

    def used(self, device: str) -> float:
        """What its models hold of a device, those included that are about to come or go."""
        return sum(one.member.size for one in self._on(device) if one.residence in HOLDING_ROOM)

    def _on(self, device: str) -> list[KeptModel]:
        return [one for one in self._models.values() if one.member.device == device]

    # ---- the rules ----

    def _decide(self, kept: KeptModel, now: float) -> None:
        """It is idle: ask its policy."""
        decision = kept.policy.decide(kept.name, now)
        kept.keep_until_s = decision.keep_until_s
        kept.prewarm_at_s, kept.prewarm_until_s = decision.prewarm_at_s, decision.prewarm_until_s
        self._log(kept, now, PoolChoice.KEEP, decision.reason, decision.features)

    def _until(self, kept: KeptModel, now: float) -> float:
        """How long an idle model stays."""
        if kept.is_pinned:
            return inf
        until_s = kept.keep_until_s
        if kept.prewarm_at_s <= until_s:
            until_s = max(until_s, kept.prewarm_until_s)
        for one in kept.member.schedules:
            hours = one.next_hours(now)
            if hours.begin_s - kept.load_s <= now:
                until_s = max(until_s, hours.end_s)
        return until_s

    def _override(self, kept: KeptModel, now: float) -> str:
        """Return why the operator wants it now; empty if not, or if its workers cannot start."""
        if now < kept.retry_at_s:
            return ""
        if kept.is_pinned:
            return "pinned"
        if any(one.next_hours(now).begin_s - kept.load_s <= now for one in kept.member.schedules):
            return "scheduled"
        return ""

    def _due(self, kept: KeptModel, now: float) -> float:
        if kept.residence is Residence.QUEUED and now < kept.retry_at_s:
            return kept.retry_at_s
        if kept.visits:
            return self._turn_s(kept, now) if kept.residence is Residence.QUEUED else inf
        if kept.is_ready:
            return self._until(kept, now)
        if kept.residence is not Residence.AWAY:
            return inf
        begins = [one.next_hours(now).begin_s - kept.load_s for one in kept.member.schedules]
        if kept.is_pinned:
            begins.append(now)
        return min([kept.prewarm_at_s, *(max(begin_s, kept.retry_at_s) for begin_s in begins)])

    def _prewarm(self, kept: KeptModel, now: float) -> list[PoolOrder]:
        """Its policy wants it again, though nobody asked yet."""
        until_s, kept.prewarm_at_s = kept.prewarm_until_s, inf
        if until_s <= now:
            return []
        if not self._fits(kept):
            self._log(kept, now, PoolChoice.DECLINE, "there is no free room", {})
            return []
        kept.keep_until_s = until_s
        return self._want(kept, now, PoolChoice.PREWARM, "its next request is foreseen", {})

    def _want(
        self,
        kept: KeptModel,
        now: float,
        choice: PoolChoice,
        reason: str,
        features: dict[str, float],
    ) -> list[PoolOrder]:
        """See to it that it is loaded, now or when there is room."""
        before = kept.residence
        kept.residence = follow(before, PoolEvent.WANTED)
        if kept.residence is not before:
            kept.reason = reason
            self._log(kept, now, choice, reason, features)
        if before is Residence.AWAY:
            self._enqueue(kept, now)
        return self._admit(now)

    def _enqueue(self, kept: KeptModel, now: float) -> None:
        self._queue.append(kept.name)
        kept.queued_s = now

    def _admit(self, now: float) -> list[PoolOrder]:
        """Give room to those that wait for it: who is asked for first, then who came first.

        One that there is no room for lets others past only where they need nobody to go.
        """
        orders: list[PoolOrder] = []
        blocked: set[str] = set()
        for name in sorted(self._queue, key=lambda one: not self._models[one].visits):
            kept = self._models[name]
            if now < kept.retry_at_s:
                continue
            device, size = kept.member.device, kept.member.size
            missing = self.used(device) + size - self._caps.get(device, inf)
            if missing <= 0:
                orders.append(self._load(kept, now))
            elif device not in blocked:
                blocked.add(device)
                orders += self._make_room(kept, missing, now)
        return orders

    def _make_room(self, kept: KeptModel, missing: float, now: float) -> list[PoolOrder]:
        """Have idle models leave, if that is enough together with those that leave already."""
        near = self._on(kept.member.device)
        going = ABOUT_TO_GO | {Residence.DRAINING}
        missing -= sum(one.member.size for one in near if one.residence in going)
        idle = {
            one.name: one.member.size
            for one in near
            if one.is_idle and not self._override(one, now)
        }
        if missing <= 0:
            return []
        if sum(idle.values()) < missing:
            if kept.visits and now >= kept.queued_s + TURN_S:
                self._drain(kept, near, missing - sum(idle.values()), now)
            return []
        orders: list[PoolOrder] = []
        for name in self._ranking.victims(idle, idle, missing):
            reason = f"{kept.name} needs its room, and it was worth least"
            orders += self._evict(self._models[name], now, reason)
        return orders

    def _drain(
        self, kept: KeptModel, near: Sequence[KeptModel], missing: float, now: float
    ) -> None:
        """Have busy models leave in their turn, the one that has been ready longest first."""
        over: list[KeptModel] = []
        for one in sorted(self._busy(near, now), key=lambda one: one.ready_s):
            if missing > 0 and one.turn_ends_s <= now:
                over.append(one)
                missing -= one.member.size
        for one in over if missing <= 0 else ():
            one.residence = follow(one.residence, PoolEvent.DRAINED)
            one.reason = f"{kept.name} has waited for its room"
            due_s = max(kept.queued_s + TURN_S, one.turn_ends_s)
            features = {"waited_s": now - kept.queued_s, "late_s": now - due_s}
            self._log(one, now, PoolChoice.DRAIN, one.reason, features)

    def _busy(self, near: Sequence[KeptModel], now: float) -> list[KeptModel]:
        """Those that are asked, and might leave."""
        return [one for one in near if one.is_ready and one.visits and not self._override(one, now)]

    def _leave_to_others(self, kept: KeptModel, now: float) -> list[PoolOrder]:
        """It drained, and the last of its streams is over; who waits for it waits on."""
        orders = self._evict(kept, now, kept.reason)
        if kept.waiting:
            kept.residence = follow(kept.residence, PoolEvent.WANTED)
            kept.cold_starts += 1
            kept.reason = "a request waits for it"
        else:
            kept.ended_s = now
            self._decide(kept, now)
        return orders

    def _turn_s(self, kept: KeptModel, now: float) -> float:
        """When it may have its turn, as far as that is a matter of time."""
        near = self._on(kept.member.device)
        ends_s = min((one.turn_ends_s for one in self._busy(near, now)), default=inf)
        turn_s = max(kept.queued_s + TURN_S, ends_s)
        return turn_s if turn_s > now else inf

    def _load(self, kept: KeptModel, now: float) -> PoolOrder:
        self._queue.remove(kept.name)
        kept.residence = follow(kept.residence, PoolEvent.ADMITTED)
        kept.loading_s, kept.loading_from = now, kept.tier
        kept.loads += 1
        return PoolOrder(kept.name, True, kept.reason)

    def _evict(self, kept: KeptModel, now: float, reason: str) -> list[PoolOrder]:
        kept.residence = follow(kept.residence, PoolEvent.EVICTED)
        kept.reason = reason
        kept.idles(now, idle=False)
        idle_s = 0.0 if kept.ended_s is None else now - kept.ended_s
        self._log(kept, now, PoolChoice.EVICT, reason, {"idle_s": idle_s})
        return [PoolOrder(kept.name, False, reason)]

    def _fits(self, kept: KeptModel) -> bool:
        device = kept.member.device
        waiting = sum(one.member.size for one in self._on(device) if one.name in self._queue)
        return self.used(device) + waiting + kept.member.size <= self._caps.get(device, inf)

    # ---- what is told ----

    def _reach(
        self, kept: KeptModel, tier: Tier, now: float, reason: str, took_s: float | None = None
    ) -> None:
        if tier is kept.tier and took_s is None:
            return
        before, kept.tier = kept.tier, tier
        self._keep(TierChange(kept.name, now, before, tier, reason, took_s))

    def _log(
        self,
        kept: KeptModel,
        now: float,
        choice: PoolChoice,
        reason: str,
        features: dict[str, float],
    ) -> None:
        times: tuple[float | None, ...] = ()
        if choice is PoolChoice.KEEP:
            ahead = (kept.prewarm_at_s, kept.prewarm_until_s)
            times = (kept.keep_until_s, *(ahead if kept.prewarm_at_s != inf else ()))
        decided = (kept.name, now, kept.policy.name, choice, reason, features)
        self._keep(PoolDecision(*decided, *times))
