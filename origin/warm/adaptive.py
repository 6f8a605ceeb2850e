"""The default policy: of some TTLs the one that was cheapest for the gaps that were alike.

What each TTL would have cost is known for every gap, whatever was done; so nothing has to be
tried. The sums are kept of all models, of a model, and of a model's gaps in two contexts: those
that began in this hour of the day, and those behind gaps as long as the last ones. A sum of few
gaps leans on the one above it. Which context is believed is what has been cheapest, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

import numpy as np

from origin.warm.policies import KeepDecision
from origin.warm.prices import WarmPrices
from origin.warm.trace import Seconds

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

REASONS = (
    "the cheapest TTL for this model's gaps",
    "the cheapest TTL for gaps that begin in this hour of the day",
    "the cheapest TTL behind gaps as long as the last ones",
)


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
    """Break-even at first; then what the gaps say, of this model and of the others."""

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
