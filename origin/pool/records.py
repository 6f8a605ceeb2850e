"""Records of what the pool did, for its history and log. Times are Unix time in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tailrace.origin.core.states import ModelState
from tailrace.origin.pool.tiers import Tier


@dataclass(frozen=True, slots=True)
class ArrivalRecord:
    """A request that has ended. `tier` is what it found, `waited_s` how long until it was taken."""

    model: str
    arrived_s: float
    waited_s: float
    ended_s: float
    tier: Tier


@dataclass(frozen=True, slots=True)
class TierChange:
    """A model has come to `tier`. `took_s`, of one that became ready: since the load began."""

    model: str
    at_s: float
    before: Tier
    tier: Tier
    reason: str
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class StateChange:
    """A model has come to another state, for this reason."""

    model: str
    before: ModelState
    state: ModelState
    reason: str


@dataclass(frozen=True, slots=True)
class CircuitChange:
    """The circuit breaker of a model's workers has another state: a word of `CircuitState`."""

    model: str
    state: str
    reason: str


class PoolChoice(StrEnum):
    """What a decision of the pool was about."""

    KEEP = "keep"
    """It fell idle: for how long it stays, and when it is loaded again."""
    LOAD = "load"
    PREWARM = "prewarm"
    EVICT = "evict"
    DRAIN = "drain"
    """It takes no more requests, so that another model has its turn."""
    DECLINE = "decline"
    """A hint or a prewarm that was not followed."""


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """What was decided about a model, by what, and from what it knew."""

    model: str
    at_s: float
    policy: str
    choice: PoolChoice
    reason: str
    features: dict[str, float] = field(default_factory=dict)
    keep_until_s: float | None = None
    prewarm_at_s: float | None = None
    prewarm_until_s: float | None = None


PoolRecord = ArrivalRecord | TierChange | StateChange | CircuitChange | PoolDecision
KeepRecord = Callable[[PoolRecord], None]
