"""Loading again ahead of the next request, where a model's requests come regularly enough."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from origin.warm.adaptive import AdaptiveTtl
from origin.warm.policies import KeepDecision
from origin.warm.prices import WarmPrices, cost_of_gaps
from origin.warm.trace import Seconds

RECENT_GAPS = 128
"""Gaps of a model that plans are tried on."""
LEARNED_FROM = 8
"""Gaps before a plan is trusted; it is made again at each doubling, and then each `FIT_EVERY`."""
FIT_EVERY = 16
SPREAD_MARGIN = 0.25
"""Of the distance between their quartiles: so much earlier a prewarm begins, and later it ends."""
LOW_QUANTILES, HIGH_QUANTILES = (0.0, 0.05, 0.25, 0.5), (0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class _Plan:
    """Since a gap began: load at `begin_s`, keep to `until_s`; what that costs in the mean."""

    begin_s: float
    until_s: float
    mean_gpu_s: float


@dataclass(slots=True)
class _Recent:
    """`paid` is what keeping without a prewarm has cost for each of `gaps`."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_GAPS))
    paid: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_GAPS))
    seen: int = 0
    keep_s: float | None = None
    plan: _Plan | None = None


class PredictivePrewarm:
    """As AdaptiveTtl, or unload at once and load again between two quantiles of the recent gaps,
    where that would have been cheaper for these."""

    name = "predictive-prewarm"

    def __init__(self, prices: WarmPrices) -> None:
        self.prices = prices
        self._keeping = AdaptiveTtl(prices)
        self._models: dict[str, _Recent] = {}

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        recent = self._models.setdefault(model, _Recent())
        keeping = self._keeping.decide(model, idle_since_s)
        recent.keep_s = keeping.keep_until_s - idle_since_s
        plan = recent.plan
        if plan is None:
            return keeping
        features = {
            "gaps": float(recent.seen),
            "mean_cost_gpu_s": plan.mean_gpu_s,
            "keeping_gpu_s": sum(recent.paid) / len(recent.paid),
        }
        return replace(
            keeping,
            keep_until_s=idle_since_s,
            reason="loading again ahead was cheaper for the recent gaps than keeping",
            features=features,
            prewarm_at_s=idle_since_s + plan.begin_s,
            prewarm_until_s=idle_since_s + plan.until_s,
        )

    def observe(self, model: str, gap_s: float) -> None:
        self._keeping.observe(model, gap_s)
        recent = self._models.setdefault(model, _Recent())
        if recent.keep_s is None:
            return  # nobody asked what to do about it
        cold = self.prices.cold_cost_gpu_s
        recent.gaps.append(gap_s)
        recent.paid.append(gap_s if gap_s <= recent.keep_s else recent.keep_s + cold)
        recent.seen += 1
        seen = recent.seen
        if seen % FIT_EVERY == 0 or (seen >= LEARNED_FROM and not seen & (seen - 1)):
            plan = self._cheapest(np.array(recent.gaps))
            kept = float(np.mean(recent.paid))
            recent.plan = plan if plan.mean_gpu_s < kept else None

    def _cheapest(self, gaps: Seconds) -> _Plan:
        slack = SPREAD_MARGIN * float(np.subtract(*np.quantile(gaps, [0.75, 0.25])))
        lows = np.repeat(np.quantile(gaps, LOW_QUANTILES), len(HIGH_QUANTILES)) - slack
        until = np.tile(np.quantile(gaps, HIGH_QUANTILES), len(LOW_QUANTILES)) + slack
        begin = np.maximum(lows - self.prices.load_s, 0.0)
        columns = (np.zeros((len(begin), 1)), begin[:, None], until[:, None])
        means = cost_of_gaps(gaps[None, :], *columns, self.prices.load_s).cost(self.prices)
        mean = means.mean(axis=1)
        best = int(mean.argmin())
        return _Plan(float(begin[best]), float(until[best]), float(mean[best]))
