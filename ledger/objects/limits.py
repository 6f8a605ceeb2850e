"""How much the object runtime holds, how long it waits, and how durable objects are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ledger.frame import Durability
from ledger.objects.alarm import RetryPolicy


@dataclass(frozen=True, slots=True)
class ObjectLimits:
    """Of one runtime."""

    resident: int = 4_096
    """Instances in memory. Above it idle ones are evicted, the longest idle first."""
    idle_s: float = 60.0
    """An instance that had no event for so long is evicted."""
    waiting: int = 1_024
    """Events at the input gate of one object; who comes then is told `Overloaded`."""
    block_s: float = 30.0
    """What a `block_concurrency_while` may take, as in Durable Objects."""
    close_s: float = 5.0
    """What events may take to end when the runtime is closed."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    durability: Durability = Durability.PROCESS
    """Of all that objects store, except what goes into a stream that asks for more."""
    alarms_at_once: Mapping[str, int] = field(default_factory=dict)
    """Alarm handlers that run at the same time, of classes whose handlers wait for others: they
    take no places from the rest."""
