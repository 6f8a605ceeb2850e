"""Replays a trace through policies, and compares their cost with the clairvoyant optimum.

Without a cap on memory each gap is independent. With a cap, `CappedPool` decides which models are
resident and which are evicted. The optimum with a cap is exact if all worthwhile gaps fit;
otherwise it is a lower bound, and `ClairvoyantCost.method` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailrace.ledger.errors import CallerError
from tailrace.origin.pool.policies.policies import GreedyDual, KeepAlivePolicy, WarmPrices
from tailrace.origin.pool.policies.trace import (
    PROGRESS_EVERY,
    ArrivalTrace,
    BusyPeriods,
    IdleGaps,
    Indices,
    Seconds,
    busy_periods,
    cost_of_gaps,
    idle_gaps,
)

BOUND_STEPS = 200
"""Number of steps of the subgradient method; each gives a bound, and the best one counts."""


@dataclass(frozen=True)
class ClairvoyantCost:
    """Cost of the optimum; `method` says if `cost_gpu_s` is exact or a lower bound."""

    cost_gpu_s: float
    method: Literal["exact", "lagrangian-bound"]


def keep_alive_optimum(gaps: IdleGaps, prices: WarmPrices) -> ClairvoyantCost:
    """Compute the optimum without a cap: for each gap, idle through it or pay for a cold start."""
    cost = np.minimum(gaps.length_s, prices.cold_cost_gpu_s).sum()
    return ClairvoyantCost(float(cost), "exact")


def capped_optimum(
    gaps: IdleGaps, busy: BusyPeriods, sizes: Seconds, cap: float, prices: WarmPrices
) -> ClairvoyantCost:
    """Compute the optimum with a cap on memory: which gaps to bridge, if not all fit.

    With models of unequal sizes the choice is NP-hard; for any sizes, the Lagrangian relaxation of
    the cap is a lower bound of the best cost.
    """
    saving = prices.cold_cost_gpu_s - gaps.length_s
    worth = saving > 0
    without = prices.cold_cost_gpu_s * len(gaps)
    begin, length, model = gaps.start_s[worth], gaps.length_s[worth], gaps.model[worth]
    saving = saving[worth]
    if not len(saving):
        return ClairvoyantCost(without, "exact")
    # A gap ends when its model becomes busy, so both times must be exactly the same number.
    at = _instants(begin, length, model, busy)
    free = np.maximum(cap - at.load(at.busy_from, at.busy_to, sizes[busy.model]), 0.0)
    if np.all(at.load(at.gap_from, at.gap_to, sizes[model]) <= free):
        return ClairvoyantCost(without - float(saving.sum()), "exact")
    bound = _lagrangian(at, saving, sizes[model], free)
    return ClairvoyantCost(max(without - bound, 0.0), "lagrangian-bound")


@dataclass(frozen=True)
class _Instants:
    """Gaps and busy periods as half-open ranges of segments.

    A segment is the time between two consecutive instants at which any gap or busy period begins or
    ends.
    """

    gap_from: Indices
    gap_to: Indices
    busy_from: Indices
    busy_to: Indices
    count: int

    def load(self, begin: Indices, end: Indices, size: Seconds) -> Seconds:
        """Return the sum of sizes on each segment."""
        steps = np.bincount(begin, size, self.count) - np.bincount(end, size, self.count)
        return np.cumsum(steps)[:-1]


def _instants(begin: Seconds, length: Seconds, model: Indices, busy: BusyPeriods) -> _Instants:
    ends = np.empty(len(begin))
    for one in np.unique(model):
        mine = np.sort(busy.start_s[busy.model == one])
        of = model == one
        # Use the start of the next busy period as the end of a gap: begin plus length is rounded.
        follows = np.searchsorted(mine, begin[of] + length[of] / 2)
        ends[of] = mine[follows]
    times, index = np.unique(
        np.concatenate([begin, ends, busy.start_s, busy.end_s]), return_inverse=True
    )
    cuts = np.cumsum([len(begin), len(begin), len(busy)])
    gap_from, gap_to, busy_from, busy_to = np.split(index, cuts)
    return _Instants(gap_from, gap_to, busy_from, busy_to, len(times))


def _lagrangian(at: _Instants, saving: Seconds, gap_size: Seconds, free: Seconds) -> float:
    """Return an upper bound of the savings.

    Any choice of prices for memory in the segments gives a bound; the lowest one found is returned.
    """
    price = np.zeros(at.count - 1)
    best = float(saving.sum())
    step = float(saving.mean() / gap_size.mean())
    for turn in range(1, BOUND_STEPS + 1):
        paid = np.concatenate([[0.0], np.cumsum(price)])
        left = saving - gap_size * (paid[at.gap_to] - paid[at.gap_from])
        chosen = left > 0
        best = min(best, float(left[chosen].sum() + price @ free))
        over = at.load(at.gap_from[chosen], at.gap_to[chosen], gap_size[chosen]) - free
        size = float(np.abs(over[(over > 0) | (price > 0)]).max(initial=0.0))
        if size == 0:
            break
        price = np.maximum(price + step / turn**0.5 * over / size, 0.0)
    return best


@dataclass(frozen=True)
class CappedOutcome:
    """Result of a replay with a cap.

    `overcommitted` counts starts at which busy models alone exceeded the cap. Such requests are
    served all the same, as a simulation delays no request.
    """

    wasted_gpu_s: float
    cold_starts: int
    overcommitted: int


class CappedPool:
    """One device with resident models, which have names and sizes, and a memory cap.

    Idle models are evicted while the sizes of all resident models add up to more than the cap. A
    model that is busy, including one that is loading, is never evicted.
    """

    def __init__(
        self, policy: KeepAlivePolicy, ranking: GreedyDual, sizes: dict[str, float], cap: float
    ) -> None:
        largest = max(sizes, key=lambda one: sizes[one])
        if not min(sizes.values()) > 0:
            raise CallerError("must be above zero for every model", field="sizes")
        if not cap >= sizes[largest]:
            raise CallerError(
                f"{cap:g} is too small for {largest!r}, which takes {sizes[largest]:g}",
                field="memory",
                hint="set a cap that is at least the size of the largest model",
            )
        self._policy, self._ranking, self._sizes, self._cap = policy, ranking, sizes, cap
        self._busy: set[str] = set()
        self._idle: dict[str, tuple[float, float]] = {}
        self.overcommitted = 0
        self.wasted: dict[str, float] = {}
        """Seconds that each model was resident, without requests, in its latest gap that ended."""

    def begin(self, model: str, now: float) -> bool:
        """Start a request of a model that was not busy; return True if it was warm."""
        self._expire(now)
        held = self._idle.pop(model, None)
        if held is not None:
            self.wasted[model] = now - held[0]
        self._busy.add(model)
        self._ranking.arrived(model, self._sizes[model])
        self._make_room(now)
        return held is not None

    def end(self, model: str, now: float) -> None:
        """End the last request of a model."""
        self._expire(now)
        self._busy.discard(model)
        decision = self._policy.decide(model, now)
        self._idle[model] = (now, decision.keep_until_s)
        self.wasted[model] = 0.0
        self._make_room(now)

    def used(self) -> float:
        return sum(self._sizes[one] for one in self._busy | self._idle.keys())

    def _expire(self, now: float) -> None:
        for model in [one for one, (_, until) in self._idle.items() if until <= now]:
            since, until = self._idle.pop(model)
            self.wasted[model] = until - since

    def _make_room(self, now: float) -> None:
        used = self.used()
        while used > self._cap and self._idle:
            for model in self._ranking.victims(self._idle, self._sizes, used - self._cap):
                since, _ = self._idle.pop(model)
                self.wasted[model] = now - since
            used = self.used()
        self.overcommitted += used > self._cap


def replay_capped(
    trace: ArrivalTrace,
    policy: KeepAlivePolicy,
    sizes: dict[str, float],
    cap: float,
    prices: WarmPrices,
    progress: Callable[[int], None] = lambda done: None,
) -> CappedOutcome:
    """Replay with a cap: the policy decides how long to keep, greedy-dual which to evict early.

    Nothing is prewarmed.
    """
    ranking = policy if isinstance(policy, GreedyDual) else GreedyDual(prices.cold_cost_gpu_s)
    pool = CappedPool(policy, ranking, sizes, cap)
    busy = busy_periods(trace)
    # Of events at the same time, ends come before starts, since a model whose request has ended may
    # be evicted for the start.
    order = np.lexsort((np.repeat([1, 0], len(busy)), np.concatenate([busy.start_s, busy.end_s])))
    last_end: dict[str, float] = {}
    wasted, cold = 0.0, 0
    for done, event in enumerate(order.tolist()):
        if done % PROGRESS_EVERY == 0:
            progress(done // 2)
        begins, period = event < len(busy), event % len(busy)
        name = trace.names[busy.model[period]]
        if not begins:
            last_end[name] = float(busy.end_s[period])
            pool.end(name, last_end[name])
            continue
        now = float(busy.start_s[period])
        warm = pool.begin(name, now)
        if name in last_end:
            policy.observe(name, now - last_end[name])
            wasted += pool.wasted[name]
            cold += not warm
    return CappedOutcome(wasted, cold, pool.overcommitted)


@dataclass(frozen=True)
class PolicyOutcome:
    """Cost of a policy; `cold_starts` includes each model's first start, the cost does not.

    A request during a prewarm's load counts as a cold start, but only the rest of the load is
    charged. `overcommitted`: starts at which busy models alone exceeded the cap.
    """

    policy: str
    requests: int
    cold_starts: int
    wasted_gpu_s: float
    added_latency_s: float
    cost_gpu_s: float
    over_optimum: float
    overcommitted: int = 0

    @property
    def cold_rate(self) -> float:
        return self.cold_starts / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class TtlSweep:
    """Costs of all TTLs, one per TTL."""

    ttl_s: Seconds
    cold_starts: Seconds
    wasted_gpu_s: Seconds
    cost_gpu_s: Seconds


def sweep_ttls(length_s: Seconds, ttls: Sequence[float], prices: WarmPrices) -> TtlSweep:
    """Compute the cost of every TTL with one sort.

    A gap that is shorter than the TTL costs its own length; a longer gap costs the TTL and a cold
    start.
    """
    ttl_s = np.asarray(ttls, np.float64)
    ordered = np.sort(length_s)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    warm = np.searchsorted(ordered, ttl_s, side="right")
    cold = (len(ordered) - warm).astype(np.float64)
    # With an infinite TTL `cold` is 0, and inf * 0 would be NaN.
    wasted = sums[warm] + np.where(cold > 0, ttl_s, 0.0) * cold
    return TtlSweep(ttl_s, cold, wasted, wasted + prices.cold_cost_gpu_s * cold)


def replay(
    gaps: IdleGaps,
    names: Sequence[str],
    policy: KeepAlivePolicy,
    prices: WarmPrices,
    progress: Callable[[int], None] = lambda done: None,
) -> PolicyOutcome:
    """Replay without a cap; the policy learns each gap only after it has decided about it."""
    keep, prewarm, until = (np.empty(len(gaps)) for _ in range(3))
    rows = zip(gaps.model.tolist(), gaps.start_s.tolist(), gaps.length_s.tolist(), strict=True)
    for index, (model, start, length) in enumerate(rows):
        if index % PROGRESS_EVERY == 0:
            progress(index)
        decision = policy.decide(names[model], start)
        keep[index] = decision.keep_until_s - start
        prewarm[index] = decision.prewarm_at_s - start
        until[index] = decision.prewarm_until_s - start
        policy.observe(names[model], length)
    costs = cost_of_gaps(gaps.length_s, keep, prewarm, until, prices.load_s)
    cost = float(costs.cost(prices).sum())
    shares = float(costs.cold_share.sum())
    return PolicyOutcome(
        policy=policy.name,
        requests=gaps.requests,
        cold_starts=int(np.count_nonzero(costs.cold_share)) + gaps.first_starts,
        wasted_gpu_s=float(costs.wasted_gpu_s.sum()),
        added_latency_s=(shares + gaps.first_starts) * prices.load_s,
        cost_gpu_s=cost,
        over_optimum=_over(cost, keep_alive_optimum(gaps, prices).cost_gpu_s),
    )


def compare(
    trace: ArrivalTrace,
    policies: Sequence[KeepAlivePolicy],
    prices: WarmPrices,
    *,
    sizes: dict[str, float] | None = None,
    cap: float | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[PolicyOutcome], str]:
    """Return the outcome of every policy, and how the optimum was computed."""
    gaps = idle_gaps(trace)
    if not len(gaps):
        raise CallerError("has no idle gap, so there is nothing to decide", field="trace")
    if cap is None:
        return [replay(gaps, trace.names, one, prices, progress) for one in policies], "exact"
    used = sizes or dict.fromkeys(trace.names, 1.0)
    by_index = np.array([used[name] for name in trace.names])
    best = capped_optimum(gaps, busy_periods(trace), by_index, cap, prices)
    outcomes = []
    for policy in policies:
        seen = replay_capped(trace, policy, used, cap, prices, progress)
        cost = seen.wasted_gpu_s + prices.cold_cost_gpu_s * seen.cold_starts
        starts = seen.cold_starts + gaps.first_starts
        outcomes.append(
            PolicyOutcome(
                policy=policy.name,
                requests=gaps.requests,
                cold_starts=starts,
                wasted_gpu_s=seen.wasted_gpu_s,
                added_latency_s=starts * prices.load_s,
                cost_gpu_s=cost,
                over_optimum=_over(cost, best.cost_gpu_s),
                overcommitted=seen.overcommitted,
            )
        )
    return outcomes, best.method


def _over(cost: float, optimum: float) -> float:
    return cost / optimum if optimum else (1.0 if not cost else float("inf"))
