"""What a clairvoyant pool would have paid: exact where that can be had, else a named bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from origin.warm.prices import WarmPrices
from origin.warm.trace import BusyPeriods, IdleGaps, Indices, Seconds

BOUND_STEPS = 200
"""Of the subgradient method; each of them gives a bound, and the best one is kept."""


@dataclass(frozen=True)
class ClairvoyantCost:
    """`method` says whether `cost_gpu_s` is exact, or no more than the optimum."""

    cost_gpu_s: float
    method: Literal["exact", "lagrangian-bound"]


def keep_alive_optimum(gaps: IdleGaps, prices: WarmPrices) -> ClairvoyantCost:
    """Without a cap each gap is its own: idle through it, or pay for a cold start."""
    cost = np.minimum(gaps.length_s, prices.cold_cost_gpu_s).sum()
    return ClairvoyantCost(float(cost), "exact")


def capped_optimum(
    gaps: IdleGaps, busy: BusyPeriods, sizes: Seconds, cap: float, prices: WarmPrices
) -> ClairvoyantCost:
    """Keep-alive under a cap on memory: which gaps to bridge, as there may not be room for all.

    Where there is not, to choose among models of unequal sizes is NP-hard; for any sizes, the
    Lagrangian relaxation of the cap bounds from below what the best choice costs.
    """
    saving = prices.cold_cost_gpu_s - gaps.length_s
    worth = saving > 0
    without = prices.cold_cost_gpu_s * len(gaps)
    begin, length, model = gaps.start_s[worth], gaps.length_s[worth], gaps.model[worth]
    saving = saving[worth]
    if not len(saving):
        return ClairvoyantCost(without, "exact")
    # Where a gap ends its model is busy: the same instant is to be the same number.
    at = _instants(begin, length, model, busy)
    free = np.maximum(cap - at.load(at.busy_from, at.busy_to, sizes[busy.model]), 0.0)
    if np.all(at.load(at.gap_from, at.gap_to, sizes[model]) <= free):
        return ClairvoyantCost(without - float(saving.sum()), "exact")
    bound = _lagrangian(at, saving, sizes[model], free)
    return ClairvoyantCost(max(without - bound, 0.0), "lagrangian-bound")


@dataclass(frozen=True)
class _Instants:
    """Gaps and busy periods as half-open ranges of the segments between instants."""

    gap_from: Indices
    gap_to: Indices
    busy_from: Indices
    busy_to: Indices
    count: int

    def load(self, begin: Indices, end: Indices, size: Seconds) -> Seconds:
        """What lies on each segment."""
        steps = np.bincount(begin, size, self.count) - np.bincount(end, size, self.count)
        return np.cumsum(steps)[:-1]


def _instants(begin: Seconds, length: Seconds, model: Indices, busy: BusyPeriods) -> _Instants:
    ends = np.empty(len(begin))
    for one in np.unique(model):
        mine = np.sort(busy.start_s[busy.model == one])
        of = model == one
        # The gap's own end is a sum of rounded numbers; the busy period after it is the instant.
        follows = np.searchsorted(mine, begin[of] + length[of] / 2)
        ends[of] = mine[follows]
    times, index = np.unique(
        np.concatenate([begin, ends, busy.start_s, busy.end_s]), return_inverse=True
    )
    cuts = np.cumsum([len(begin), len(begin), len(busy)])
    gap_from, gap_to, busy_from, busy_to = np.split(index, cuts)
    return _Instants(gap_from, gap_to, busy_from, busy_to, len(times))


def _lagrangian(at: _Instants, saving: Seconds, gap_size: Seconds, free: Seconds) -> float:
    """No choice of gaps saves more: room has a price in each segment, and any price bounds it."""
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
