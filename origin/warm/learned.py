"""Policies that learn from the gaps of models, and every policy by the name that people give it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import exp, log

import numpy as np

from tailrace.ledger.errors import CallerError
from tailrace.origin.warm.policies import (
    BreakEven,
    FixedTtl,
    GreedyDual,
    KeepAlivePolicy,
    KeepDecision,
    WarmPrices,
)
from tailrace.origin.warm.trace import Indices, Seconds, cost_of_gaps

SHARES = (0.0, *np.geomspace(0.02, 1.0, 17).tolist(), 1.5, 2.5)
"""The TTLs, in cold costs."""
BREAK_EVEN = SHARES.index(1.0)
FORGET = 0.999
"""What is left of a sum at the next gap: about the last thousand count."""
LEAN_MODEL, LEAN_CONTEXT = 4.0, 10.0
"""So many gaps a sum must have, to weigh as much as the mean above it."""
DOUBT = 2.0
"""As many gaps speak for break-even before any was seen."""
DOUBT_COST = 0.2
"""What any other TTL is taken to cost more then, in cold costs."""
USUAL_WEIGHT = 0.05
"""Of the newest gap in the usual one of a model."""
USUAL_STEP = log(1.5)
"""Usual gaps are alike if their logarithms differ by less."""
LEAST_GAP = 0.01
"""Shorter gaps, in cold costs, are all alike."""
HOUR_S, DAY_S = 3600.0, 86_400.0
MAX_TTL_S = 10 * 365 * 86_400
"""Maximum TTL that a policy's name may give, in seconds: ten years."""

REASONS = (
    "the cheapest TTL for this model's gaps",
    "the cheapest TTL for gaps that begin in this hour of the day",
    "the cheapest TTL behind gaps as long as the last ones",
)

RECENT_GAPS = 128
"""Gaps of a model that plans are tried on."""
LEARNED_FROM = 8
"""Gaps before a plan is trusted; it is made again at each doubling, and then each `FIT_EVERY`."""
FIT_EVERY = 16
SPREAD_MARGIN = 0.25
"""Of the distance between their quartiles: so much earlier a prewarm begins, and later it ends."""
LOW_QUANTILES, HIGH_QUANTILES = (0.0, 0.05, 0.25, 0.5), (0.75, 0.9, 0.99, 1.0)

PREWARM_MARGIN = 0.9
KEEP_MARGIN = 1.1
OUT_OF_BOUNDS = 0.5
"""From this share of gaps beyond the bins on, the histogram says nothing."""
REPRESENTATIVE_CV = 2.0
"""Below this coefficient of variation of the bins' counts it says too little."""
FORECAST_PREWARM, FORECAST_KEEP = 0.85, 0.30
FORECAST_WEIGHT = 0.3
"""Of the newest gap in the forecast."""


class _Costs:
    """What each TTL has cost above the optimum, in all, and for how many gaps."""

    def __init__(self) -> None:
        self.sums: Seconds = np.zeros(len(SHARES))
        self.gaps = 0.0

    def add(self, cost: Seconds) -> None:
        self.sums = self.sums * FORGET + cost
        self.gaps = self.gaps * FORGET + 1.0

    def mean(self, above: Seconds, lean: float) -> Seconds:
        mean: Seconds = (self.sums + lean * above) / (self.gaps + lean)
        return mean


@dataclass(slots=True)
class _Learned:
    """Of one model. `choices` and `used` are of the last decision, one for each context."""

    all: _Costs = field(default_factory=_Costs)
    hours: dict[int, _Costs] = field(default_factory=dict)
    usual: dict[int, _Costs] = field(default_factory=dict)
    usual_log: float | None = None
    choices: tuple[int, ...] = ()
    used: tuple[_Costs, ...] = ()
    paid: Seconds = field(default_factory=lambda: np.zeros(len(REASONS)))


class AdaptiveTtl:
    """The default: break-even at first, then the TTL that was cheapest for gaps that were alike.

    What each TTL would have cost is known for every gap, whatever was done; so nothing has to be
    tried. The sums are kept of all models, of a model, and of a model's gaps in two contexts: those
    that began in this hour of the day, and those behind gaps as long as the last ones. A sum of few
    gaps leans on the one above it. Which context is believed is what has been cheapest, too.
    """

    name = "adaptive-ttl"

    def __init__(self, prices: WarmPrices) -> None:
        self.prices = prices
        self._ttls = np.array(SHARES) * prices.cold_cost_gpu_s
        doubt = np.full(len(SHARES), DOUBT_COST * prices.cold_cost_gpu_s)
        doubt[BREAK_EVEN] = 0.0
        self._doubt = doubt
        self._pool = _Costs()
        self._models: dict[str, _Learned] = {}

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        known = self._models.setdefault(model, _Learned())
        of_model = known.all.mean(self._pool.mean(self._doubt, DOUBT), LEAN_MODEL)
        hour = known.hours.setdefault(int(idle_since_s % DAY_S // HOUR_S), _Costs())
        alike = 0 if known.usual_log is None else round(known.usual_log / USUAL_STEP)
        usual = known.usual.setdefault(alike, _Costs())
        means = (of_model, *(one.mean(of_model, LEAN_CONTEXT) for one in (hour, usual)))
        known.used = (hour, usual)
        known.choices = tuple(int(mean.argmin()) for mean in means)
        believed = int(known.paid.argmin())
        choice = known.choices[believed]
        features = {
            "gaps": float(round(known.all.gaps)),
            "ttl_s": float(self._ttls[choice]),
            "over_optimum_gpu_s": float(means[believed][choice]),
            "break_even_over_optimum_gpu_s": float(means[believed][BREAK_EVEN]),
        }
        if known.usual_log is not None:
            features["usual_gap_s"] = exp(known.usual_log)
        until_s = idle_since_s + float(self._ttls[choice])
        return KeepDecision(until_s, REASONS[believed], features)

    def observe(self, model: str, gap_s: float) -> None:
        known = self._models.setdefault(model, _Learned())
        cold = self.prices.cold_cost_gpu_s
        cost = np.where(gap_s > self._ttls, self._ttls + cold, gap_s) - min(gap_s, cold)
        if known.choices:
            known.paid = known.paid * FORGET + cost[list(known.choices)]
        for costs in (self._pool, known.all, *known.used):
            costs.add(cost)
        at = log(max(gap_s, LEAST_GAP * cold))
        before = at if known.usual_log is None else known.usual_log
        known.usual_log = before + USUAL_WEIGHT * (at - before)


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


class HybridHistogram:
    """Unload, load again before the 5th percentile of the gaps, and keep until past the 99th.

    The policy of "Serverless in the Wild" (Shahrad et al., ATC 2020). For gaps beyond the bins the
    paper fits an ARIMA model; here an exponentially weighted mean of those gaps forecasts the next
    one. The paper's bins are 240 of one minute.
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
            # Deviation over mean of the counts of the bins, by their sum and that of their squares.
            spread = max(squares * self._bins / inside**2 - 1, 0.0) ** 0.5 if inside else 0.0
            features["cv"] = spread
            if counts is None or spread < REPRESENTATIVE_CV:
                until_s = idle_since_s + self._bins * self._width_s
                return KeepDecision(until_s, "not representative", features)
            heap, reason = np.cumsum(counts), "percentiles"
            low = int(np.searchsorted(heap, 0.05 * inside)) * self._width_s * PREWARM_MARGIN
            high = (int(np.searchsorted(heap, 0.99 * inside)) + 1) * self._width_s * KEEP_MARGIN
        until_s = idle_since_s + high
        if low <= 0:  # the next request may come at once: it is not unloaded at all
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


_KNOWN: dict[str, Callable[[WarmPrices], KeepAlivePolicy]] = {
    "adaptive-ttl": AdaptiveTtl,
    "predictive-prewarm": PredictivePrewarm,
    "break-even": BreakEven,
    "hybrid-histogram": lambda prices: HybridHistogram(),
    "hybrid-histogram-1s": lambda prices: HybridHistogram(14_400, 1.0),
    "greedy-dual": lambda prices: GreedyDual(prices.cold_cost_gpu_s),
}
POLICY_NAMES = ("ttl-SECONDS", *_KNOWN)


def named_policy(name: str, prices: WarmPrices, field: str = "policy") -> KeepAlivePolicy:
    """Return a new policy by its name.

    Raises `CallerError`, with `field` as the place that the name came from.
    """
    kind, _, seconds = name.partition("-")
    if kind == "ttl":
        try:
            ttl_s = float(seconds)
        except ValueError:
            hint = "ttl-300 keeps for 300 s"
            raise CallerError(f"{name!r} names no time", field=field, hint=hint) from None
        if not 0 <= ttl_s <= MAX_TTL_S:  # which is true of nan, too
            hint = "greedy-dual keeps a model until another one needs its room"
            bounds = f"from ttl-0 to ttl-{MAX_TTL_S} (10 years)"
            raise CallerError(f"{name!r} is not a TTL {bounds}", field=field, hint=hint)
        return FixedTtl(ttl_s)
    if name not in _KNOWN:
        hint = ", ".join(POLICY_NAMES)
        raise CallerError(f"no policy is called {name!r}", field=field, hint=hint)
    return _KNOWN[name](prices)
