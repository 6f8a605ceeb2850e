"""The default policy of the warm pool: the TTL that was cheapest for similar idle gaps of a model.

It needs no numpy, since every origin of several models uses it, also origins with upstream servers
only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log

from tailrace.origin.pool.policies.policies import KeepDecision, WarmPrices

STEPS = 16
SHARES = (0.0, *(0.02 ** (1 - step / STEPS) for step in range(STEPS + 1)), 1.5, 2.5)
"""TTLs to choose from, as multiples of the price of a cold start.

They are 0, a geometric sequence from 0.02 to 1, and two larger ones.
"""
BREAK_EVEN = SHARES.index(1.0)
FORGET = 0.999
"""Factor by which a sum decays at each gap, so that about the last thousand gaps count."""
LEAN_MODEL, LEAN_CONTEXT = 4.0, 10.0
"""Weight of the fallback in a model's mean costs, and in those of one of its contexts.

The unit is observed gaps: when a model or a context has this many, they weigh as much as the
fallback, which is the mean of the next larger group.
"""
DOUBT = 2.0
"""Weight of the initial costs (`DOUBT_COST`) in the mean of all models, in observed gaps."""
DOUBT_COST = 0.2
"""Initial cost per gap of each TTL except break-even, whose initial cost is 0.

The unit is the price of a cold start. So before any gap was observed, break-even is the cheapest.
"""
USUAL_WEIGHT = 0.05
"""Weight of the newest gap in the exponential mean of a model's gaps."""
USUAL_STEP = log(1.5)
"""Width of the buckets into which mean gaps are sorted, on a logarithmic scale."""
LEAST_GAP = 0.01
"""Minimum length of a gap, as a multiple of the price of a cold start."""
HOUR_S, DAY_S = 3600.0, 86_400.0

REASONS = (
    "the cheapest TTL for this model's gaps",
    "the cheapest TTL for gaps that begin in this hour of the day",
    "the cheapest TTL while gaps are about as long as the last ones",
)

Costs = list[float]
"""Type of costs in GPU-seconds, one for each TTL in `SHARES`."""


class _Sums:
    """For each TTL, the decayed sum over gaps of how much more it cost than the optimum.

    `gaps` is the number of these gaps, decayed in the same way.
    """

    def __init__(self) -> None:
        self.sums: Costs = [0.0] * len(SHARES)
        self.gaps = 0.0

    def add(self, costs: Costs) -> None:
        self.sums = [held * FORGET + cost for held, cost in zip(self.sums, costs, strict=True)]
        self.gaps = self.gaps * FORGET + 1.0

    def mean(self, fallback: Costs, lean: float) -> Costs:
        """Return the mean cost of each TTL, mixed with the mean costs of a larger group of gaps.

        These costs, `fallback`, weigh as much as `lean` observed gaps.
        """
        weight = self.gaps + lean
        return [
            (held + lean * other) / weight for held, other in zip(self.sums, fallback, strict=True)
        ]


def _cheapest(costs: Costs) -> int:
    return costs.index(min(costs))


@dataclass(slots=True)
class _Learned:
    """The sums of one model, and its last decision.

    `choices` has the TTL that the model's own sums and each context chose then, as an index of
    `SHARES`. `used` has the sums of the two contexts.
    """

    all: _Sums = field(default_factory=_Sums)
    hours: dict[int, _Sums] = field(default_factory=dict)
    usual: dict[int, _Sums] = field(default_factory=dict)
    usual_log: float | None = None
    choices: tuple[int, ...] = ()
    used: tuple[_Sums, ...] = ()
    paid: Costs = field(default_factory=lambda: [0.0] * len(REASONS))


class AdaptiveTtl:
    """Break-even at first, then the TTL that would have been cheapest for similar gaps.

    The cost of each TTL is known for every gap, whatever was decided, so no exploration is needed.
    Sums are kept for all models together, for each model, and for a model's gaps in two contexts:
    gaps that began in the same hour of the day, and gaps that began when the model's mean gap was
    about as long as it is now. A mean of few gaps is mixed with the mean of the next larger group.
    Of the model's own mean and the two contexts, the one whose choices have been cheapest so far
    decides.
    """

    name = "adaptive-ttl"

    def __init__(self, prices: WarmPrices) -> None:
        self.prices = prices
        cold = prices.cold_cost_gpu_s
        self._ttls = [share * cold for share in SHARES]
        self._doubt = [DOUBT_COST * cold] * len(SHARES)
        self._doubt[BREAK_EVEN] = 0.0
        self._pool = _Sums()
        self._models: dict[str, _Learned] = {}

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        known = self._models.setdefault(model, _Learned())
        of_model = known.all.mean(self._pool.mean(self._doubt, DOUBT), LEAN_MODEL)
        hour = known.hours.setdefault(int(idle_since_s % DAY_S // HOUR_S), _Sums())
        alike = 0 if known.usual_log is None else round(known.usual_log / USUAL_STEP)
        usual = known.usual.setdefault(alike, _Sums())
        means = (of_model, *(one.mean(of_model, LEAN_CONTEXT) for one in (hour, usual)))
        known.used = (hour, usual)
        known.choices = tuple(map(_cheapest, means))
        believed = _cheapest(known.paid)
        choice = known.choices[believed]
        features = {
            "gaps": float(round(known.all.gaps)),
            "ttl_s": self._ttls[choice],
            "over_optimum_gpu_s": means[believed][choice],
            "break_even_over_optimum_gpu_s": means[believed][BREAK_EVEN],
        }
        if known.usual_log is not None:
            features["usual_gap_s"] = exp(known.usual_log)
        return KeepDecision(idle_since_s + self._ttls[choice], REASONS[believed], features)

    def observe(self, model: str, gap_s: float) -> None:
        known = self._models.setdefault(model, _Learned())
        cold = self.prices.cold_cost_gpu_s
        optimum = min(gap_s, cold)
        costs = [(ttl + cold if gap_s > ttl else gap_s) - optimum for ttl in self._ttls]
        if known.choices:
            known.paid = [
                paid * FORGET + costs[choice]
                for paid, choice in zip(known.paid, known.choices, strict=True)
            ]
        for sums in (self._pool, known.all, *known.used):
            sums.add(costs)
        at = log(max(gap_s, LEAST_GAP * cold))
        before = at if known.usual_log is None else known.usual_log
        known.usual_log = before + USUAL_WEIGHT * (at - before)
