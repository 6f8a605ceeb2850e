"""Policies by the names that people give them."""

from __future__ import annotations

from collections.abc import Callable

from ledger.errors import CallerError
from origin.warm.histogram import HistogramBins, HybridHistogram
from origin.warm.policies import (
    BreakEven,
    FixedTtl,
    GreedyDual,
    KeepAlivePolicy,
    PredictivePrewarm,
)
from origin.warm.prices import WarmPrices


def named_policy(name: str, prices: WarmPrices, field: str = "policy") -> KeepAlivePolicy:
    """A new one; `field` is where the name came from, for the CallerError."""
    kind, _, seconds = name.partition("-")
    if kind == "ttl":
        try:
            return FixedTtl(float(seconds))
        except ValueError:
            raise CallerError(f"{name!r} names no time", field=field) from None
    known: dict[str, Callable[[], KeepAlivePolicy]] = {
        "break-even": lambda: BreakEven(prices),
        "hybrid-histogram": HybridHistogram,
        "hybrid-histogram-1s": lambda: HybridHistogram(HistogramBins.fine()),
        "greedy-dual": lambda: GreedyDual(prices.cold_cost_gpu_s),
        "learned-ttl": lambda: PredictivePrewarm(prices, prewarm=False),
        "predictive-prewarm": lambda: PredictivePrewarm(prices),
    }
    if name not in known:
        hint = f"ttl-SECONDS, {', '.join(known)}"
        raise CallerError(f"no policy is called {name!r}", field=field, hint=hint)
    return known[name]()
