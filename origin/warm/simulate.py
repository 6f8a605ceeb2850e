"""A trace through policies: what each would have cost, beside the clairvoyant optimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ledger.errors import CallerError
from origin.warm.optimum import capped_optimum, keep_alive_optimum
from origin.warm.policies import KeepAlivePolicy
from origin.warm.prices import WarmPrices, cost_of_gaps
from origin.warm.room import PROGRESS_EVERY, replay_capped
from origin.warm.trace import ArrivalTrace, IdleGaps, Seconds, busy_periods, idle_gaps


@dataclass(frozen=True)
class PolicyOutcome:
    """`cold_starts` counts the first one of each model, too; the cost does not.

    A start that a prewarm was under way for is a cold one, of which only the rest is charged.
    `overcommitted` counts starts for which busy models alone were too large for the cap.
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
    """One figure for each TTL."""

    ttl_s: Seconds
    cold_starts: Seconds
    wasted_gpu_s: Seconds
    cost_gpu_s: Seconds


def sweep_ttls(length_s: Seconds, ttls: Sequence[float], prices: WarmPrices) -> TtlSweep:
    """Every TTL from one sort: gaps up to it are idled through, from longer ones it is wasted."""
    ttl_s = np.asarray(ttls, np.float64)
    ordered = np.sort(length_s)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    warm = np.searchsorted(ordered, ttl_s, side="right")
    cold = (len(ordered) - warm).astype(np.float64)
    # An infinite TTL leaves no gap that is longer.
    wasted = sums[warm] + np.where(cold > 0, ttl_s, 0.0) * cold
    return TtlSweep(ttl_s, cold, wasted, wasted + prices.cold_cost_gpu_s * cold)


def replay(
    gaps: IdleGaps,
    names: Sequence[str],
    policy: KeepAlivePolicy,
    prices: WarmPrices,
    progress: Callable[[int], None] = lambda done: None,
) -> PolicyOutcome:
    """Without a cap; the policy is told of each gap only after it has decided about it."""
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
    """Every policy, and how the optimum that they are compared with was found."""
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
