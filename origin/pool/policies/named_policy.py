"""Policies of the warm pool by the names that settings and commands use."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.ledger.errors import CallerError, ConfigError
from tailrace.origin.pool.policies.adaptive_ttl import AdaptiveTtl
from tailrace.origin.pool.policies.policies import (
    BreakEven,
    FixedTtl,
    GreedyDual,
    KeepAlivePolicy,
    WarmPrices,
)

MAX_TTL_S = 10 * 365 * 86_400
"""Maximum TTL that a policy's name may give, in seconds: ten years."""


def _with_numpy(name: str, prices: WarmPrices) -> KeepAlivePolicy:
    try:
        from tailrace.origin.pool.policies.learned import HybridHistogram, PredictivePrewarm
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the policy {name} needs the package {error.name!r}",
            hint="pip install 'tailrace[torch]'",
        ) from error
    match name:
        case "predictive-prewarm":
            return PredictivePrewarm(prices)
        case "hybrid-histogram-1s":
            return HybridHistogram(14_400, 1.0)
        case _:
            return HybridHistogram()


_KNOWN: dict[str, Callable[[str, WarmPrices], KeepAlivePolicy]] = {
    "adaptive-ttl": lambda _, prices: AdaptiveTtl(prices),
    "predictive-prewarm": _with_numpy,
    "break-even": lambda _, prices: BreakEven(prices),
    "hybrid-histogram": _with_numpy,
    "hybrid-histogram-1s": _with_numpy,
    "greedy-dual": lambda _, prices: GreedyDual(prices.cold_cost_gpu_s),
}
POLICY_NAMES = ("ttl-SECONDS", *_KNOWN)


def named_policy(name: str, prices: WarmPrices, field: str = "policy") -> KeepAlivePolicy:
    """Return a new policy by its name.

    Raises CallerError, whose `field` says where the name came from.
    """
    kind, _, seconds = name.partition("-")
    if kind == "ttl":
        try:
            ttl_s = float(seconds)
        except ValueError:
            hint = "ttl-300 keeps for 300 s"
            raise CallerError(f"{name!r} has no valid TTL", field=field, hint=hint) from None
        if not 0 <= ttl_s <= MAX_TTL_S:  # in this form, the test also refuses NaN
            hint = "greedy-dual keeps a model until another one needs its room"
            bounds = f"from ttl-0 to ttl-{MAX_TTL_S} (10 years)"
            raise CallerError(f"{name!r} is not a TTL {bounds}", field=field, hint=hint)
        return FixedTtl(ttl_s)
    if name not in _KNOWN:
        hint = ", ".join(POLICY_NAMES)
        raise CallerError(f"no policy is called {name!r}", field=field, hint=hint)
    return _KNOWN[name](name, prices)
