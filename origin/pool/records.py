"""Records of the pool's work, for its history and log. Times are Unix time in seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tailrace.origin.core.states import ModelState
from tailrace.origin.pool.tiers import Tier


@dataclass(frozen=True, slots=True)
class ArrivalRecord:
    """A request that has ended.

    `tier` is the model's tier when the request arrived, and `waited_s` the time until the model
    could serve the request.
    """

    model: str
    arrived_s: float
    waited_s: float
    ended_s: float
    tier: Tier


@dataclass(frozen=True, slots=True)
class TierChange:
    """A model has reached `tier`; `took_s` is the duration of its load if it became ready."""

    model: str
    at_s: float
    before: Tier
    tier: Tier
    reason: str
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of a model's state."""

    model: str
    before: ModelState
    state: ModelState
    reason: str


@dataclass(frozen=True, slots=True)
class CircuitChange:
    """A change of the circuit breaker of a model's workers; `state` is a `CircuitState`."""

    model: str
    state: str
    reason: str


class PoolChoice(StrEnum):
    """The kinds of decisions of the pool."""

    KEEP = "keep"
    """The model became idle: how long it stays loaded, and when it is prewarmed."""
    LOAD = "load"
    PREWARM = "prewarm"
    EVICT = "evict"
    DRAIN = "drain"
    """The model takes no more requests, so that another model gets its memory."""
    DECLINE = "decline"
    """A hint or a prewarm was not followed."""


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """A decision about a model, with the policy that made it and the figures behind it."""

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
