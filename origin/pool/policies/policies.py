"""Policies of the warm pool, which decide how long idle models stay loaded.

A policy also decides whether to load an unloaded model again before its next request. Policies may
learn from the time that passes between the requests for a model. Each decision has a reason and the
figures behind it, so that it can be logged. Times are seconds on the caller's clock. The cost of a
decision is the GPU-seconds of idling, plus a price in GPU-seconds for each cold start.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from tailrace.ledger.errors import CallerError

COLD_COST_GPU_S = 60.0
"""Default price of a cold start, in GPU-seconds."""
LOAD_S = 10.0
"""Default duration of a cold start in seconds."""


@dataclass(frozen=True)
class WarmPrices:
    """The price of a cold start, in GPU-seconds, and its duration `load_s` in seconds."""

    cold_cost_gpu_s: float = COLD_COST_GPU_S
    load_s: float = LOAD_S

    def __post_init__(self) -> None:
        for name in ("cold_cost_gpu_s", "load_s"):
            if not 0 < getattr(self, name) < inf:
                raise CallerError("must be a time above zero", field=name)


@dataclass(frozen=True)
class KeepDecision:
    """A policy's decision about an idle model.

    Keep the model until `keep_until_s`, load it again at `prewarm_at_s`, and then keep it until
    `prewarm_until_s`.
    """

    keep_until_s: float
    reason: str
    features: dict[str, float] = field(default_factory=dict)
    prewarm_at_s: float = inf
    prewarm_until_s: float = inf


class KeepAlivePolicy(Protocol):
    """Interface of the policies for a pool or its simulation."""

    @property
    def name(self) -> str: ...

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        """Decide about a model that has just become idle."""

    def observe(self, model: str, gap_s: float) -> None:
        """Learn that `gap_s` seconds passed between the end of a request and the next request."""


class FixedTtl:
    """Keeps every model for the same time."""

    def __init__(self, ttl_s: float) -> None:
        if not ttl_s >= 0:
            raise CallerError("must be zero or more seconds", field="ttl_s")
        self.ttl_s = ttl_s

    @property
    def name(self) -> str:
        return f"ttl-{self.ttl_s:g}"

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        until = idle_since_s + self.ttl_s
        return KeepDecision(until, f"kept for {self.ttl_s:g} s, as all are")

    def observe(self, model: str, gap_s: float) -> None:
        """Do nothing; this policy does not learn."""


class BreakEven(FixedTtl):
    """Keeps a model until idling has cost as much as a cold start: at most twice the optimum."""

    def __init__(self, prices: WarmPrices) -> None:
        super().__init__(prices.cold_cost_gpu_s)

    @property
    def name(self) -> str:
        return "break-even"

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        reason = f"idling for {self.ttl_s:g} s costs as much as a cold start"
        features = {"cold_cost_gpu_s": self.ttl_s}
        return KeepDecision(idle_since_s + self.ttl_s, reason, features)


class GreedyDual:
    """Chooses the idle model to evict: that of the lowest priority.

    The priority of a model is clock + frequency * cost / size, computed at its last request. The
    clock is the priority of the last evicted model, so models without requests age. A model stays
    until its memory is needed.
    """

    name = "greedy-dual"

    def __init__(self, cold_cost_gpu_s: float) -> None:
        self.cold_cost_gpu_s = cold_cost_gpu_s
        self.clock = 0.0
        self._frequency: dict[str, int] = {}
        self._priority: dict[str, float] = {}

    def arrived(self, model: str, size: float) -> None:
        self._frequency[model] = self._frequency.get(model, 0) + 1
        worth = self._frequency[model] * self.cold_cost_gpu_s / size
        self._priority[model] = self.clock + worth

    def decide(self, model: str, idle_since_s: float) -> KeepDecision:
        features = {"clock": self.clock, "priority": self._priority.get(model, self.clock)}
        return KeepDecision(inf, "kept until its room is needed", features)

    def observe(self, model: str, gap_s: float) -> None:
        """Do nothing; frequency is counted at the arrival of a request."""

    def victims(self, idle: Collection[str], sizes: dict[str, float], needed: float) -> list[str]:
        """Return the models to evict, by lowest priority, until `needed` memory is free.

        Return all idle models if even these are not enough.
        """
        chosen: list[str] = []
        for model in sorted(idle, key=lambda one: (self._worth(one), one)):
            if needed <= 0:
                break
            needed -= sizes[model]
            self.clock = max(self.clock, self._worth(model))
            self._frequency[model] = 0  # eviction resets the frequency, as in FaasCache
            chosen.append(model)
        return chosen

    def _worth(self, model: str) -> float:
        """Return the priority of a model: 0, the lowest, if it was prewarmed and never used."""
        return self._priority.get(model, 0.0)
