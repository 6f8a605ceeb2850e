"""Policies that fit a plan to the recent gaps of a model, with numpy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from tailrace.origin.pool.policies.adaptive_ttl import AdaptiveTtl
from tailrace.origin.pool.policies.policies import KeepDecision, WarmPrices
from tailrace.origin.pool.policies.trace import Indices, Seconds, cost_of_gaps

RECENT_GAPS = 128
"""Number of a model's recent gaps on which plans are evaluated."""
LEARNED_FROM = 8
"""Minimum number of gaps for fitting and using a plan.

The plan is fitted again whenever the number of gaps has doubled, later after each `FIT_EVERY` gaps.
"""
FIT_EVERY = 16
SPREAD_MARGIN = 0.25
"""Time that is added to a prewarm before its begin and after its end, as a share of the distance
between the gaps' quartiles."""
LOW_QUANTILES, HIGH_QUANTILES = (0.0, 0.05, 0.25, 0.5), (0.75, 0.9, 0.99, 1.0)

PREWARM_MARGIN = 0.9
KEEP_MARGIN = 1.1
OUT_OF_BOUNDS = 0.5
"""The histogram is not used if at least this share of the gaps lies beyond its last bin."""
REPRESENTATIVE_CV = 2.0
"""Coefficient of variation of the bins' counts below which the histogram is not used."""
FORECAST_PREWARM, FORECAST_KEEP = 0.85, 0.30
FORECAST_WEIGHT = 0.3
"""Weight of the newest gap in the forecast of the next one."""


@dataclass(frozen=True)
class _Plan:
    """A plan for a gap: load the model at `begin_s`, keep it until `until_s`.

    `mean_gpu_s` is the mean cost of the plan for recent gaps.
    """

    begin_s: float
    until_s: float
    mean_gpu_s: float


@dataclass(slots=True)
class _Recent:
    """Recent gaps of one model; `paid` is the cost of each gap with keep-alive and no prewarm."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_GAPS))
    paid: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_GAPS))
    seen: int = 0
    keep_s: float | None = None
    plan: _Plan | None = None


class PredictivePrewarm:
    """AdaptiveTtl, or a plan to unload at once and to load again in time for the next request.

    The plan has the model loaded from a low quantile of the recent gaps until a high one. The plan
    is used if it would have been cheaper for these gaps than AdaptiveTtl.
    """

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
            return  # without a call of `decide` for this gap its cost is unknown
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


class HybridHistogram:
    """Unload, load again before the 5th percentile of the gaps, and keep until past the 99th.

    This is the policy of "Serverless in the Wild" (Shahrad et al., ATC 2020). For gaps beyond the
    bins the paper fits an ARIMA model; here an exponentially weighted mean of those gaps forecasts
    the next one. The paper has 240 bins of one minute.
    """

    def __init__(self, bins: int = 240, width_s: float = 60.0) -> None:
        self._bins, self._width_s = bins, width_s
        self._counts: dict[str, Indices] = {}
        self._inside: dict[str, tuple[int, int]] = {}
        self._beyond: dict[str, int] = {}
        self._forecast: dict[str, float] = {}

    @property
    def name(self) -> str:
        return "hybrid-histogram" + ("" if self._width_s == 60.0 else f"-{self._width_s:g}s")

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        counts, beyond = self._counts.get(model), self._beyond.get(model, 0)
        inside, squares = self._inside.get(model, (0, 0))
        features = {"gaps": float(inside + beyond), "out_of_bounds": float(beyond)}
        if beyond and beyond >= OUT_OF_BOUNDS * (inside + beyond):
            forecast = features["forecast_s"] = self._forecast[model]
            low, reason = FORECAST_PREWARM * forecast, "forecast"
            high = low + FORECAST_KEEP * forecast
        else:
            # Standard deviation over mean of the bins' counts, from their sum and sum of squares.
            spread = max(squares * self._bins / inside**2 - 1, 0.0) ** 0.5 if inside else 0.0
            features["cv"] = spread
            if counts is None or spread < REPRESENTATIVE_CV:
                until_s = idle_since_s + self._bins * self._width_s
                return KeepDecision(until_s, "not representative", features)
            heap, reason = np.cumsum(counts), "percentiles"
            low = int(np.searchsorted(heap, 0.05 * inside)) * self._width_s * PREWARM_MARGIN
            high = (int(np.searchsorted(heap, 0.99 * inside)) + 1) * self._width_s * KEEP_MARGIN
        until_s = idle_since_s + high
        if low <= 0:  # the next request may come at once, so the model is not unloaded
            return KeepDecision(until_s, reason, features)
        return KeepDecision(idle_since_s, reason, features, idle_since_s + low, until_s)

    def observe(self, model: str, gap_s: float) -> None:
        index = int(gap_s / self._width_s)
        if index >= self._bins:
            self._beyond[model] = self._beyond.get(model, 0) + 1
            before = self._forecast.get(model, gap_s)
            self._forecast[model] = before + FORECAST_WEIGHT * (gap_s - before)
            return
        counts = self._counts.setdefault(model, np.zeros(self._bins, np.int64))
        inside, squares = self._inside.get(model, (0, 0))
        self._inside[model] = inside + 1, squares + 2 * int(counts[index]) + 1
        counts[index] += 1
