"""Policies by the names that people give them."""

from __future__ import annotations

from collections.abc import Callable

from ledger.errors import CallerError
from origin.warm.adaptive import AdaptiveTtl
from origin.warm.histogram import HybridHistogram
from origin.warm.policies import BreakEven, FixedTtl, GreedyDual, KeepAlivePolicy
from origin.warm.prewarm import PredictivePrewarm
from origin.warm.prices import WarmPrices

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
    """A new one; `field` is where the name came from, for the CallerError."""
    kind, _, seconds = name.partition("-")
    if kind == "ttl":
        try:
            return FixedTtl(float(seconds))
        except ValueError:
            hint = "ttl-300 keeps for 300 s"
            raise CallerError(f"{name!r} names no time", field=field, hint=hint) from None
    if name not in _KNOWN:
        hint = ", ".join(POLICY_NAMES)
        raise CallerError(f"no policy is called {name!r}", field=field, hint=hint)
    return _KNOWN[name](prices)
