"""What a pool knows of a model, and of a request for it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf

from tailrace.ledger.links.hints import Hint
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.policies import KeepAlivePolicy
from tailrace.origin.pool.tiers import Residence, Tier

HINT_WINDOW_S = 30.0
"""A request within so long after a hint makes it a right one; so long it keeps a model, too."""
PRIOR_RIGHT, PRIOR_SEEN = 1.0, 2.0
"""Before anything was seen, every second hint is taken to be right."""


@dataclass(slots=True)
class HintRecord:
    """Of one kind of hint for one model. Hints within one window are one."""

    seen: float = PRIOR_SEEN
    right: float = PRIOR_RIGHT
    last_s: float | None = None

    def came(self, now: float) -> None:
        if self.last_s is None or now - self.last_s > HINT_WINDOW_S:
            self.seen += 1
            self.last_s = now

    def asked(self, now: float) -> None:
        """A request came: the hint before it was right, if it was not long ago."""
        if self.last_s is not None and now - self.last_s <= HINT_WINDOW_S:
            self.right += 1
        self.last_s = None

    @property
    def share(self) -> float:
        return self.right / self.seen


TURN_S = 15.0
"""A model whose requests have waited so long for room that busy ones hold has its turn: of these,
the one that has been ready longest drains, if that is as long, and as long as its load took."""


@dataclass(slots=True)
class Visit:
    model: str
    arrived_s: float
    tier: Tier
    taken_s: float | None = None


@dataclass(slots=True)
class KeptModel:
    """What is known of a model: the pool changes it, and others read it.

    `prices_s` is what a load took, by the tier that it began at; `wasted_gpu_s` how long it was
    ready and not asked, and was loaded for nobody who waited.
    """

    member: PoolMember
    policy: KeepAlivePolicy
    load_s: float
    is_pinned: bool
    residence: Residence = Residence.AWAY
    tier: Tier = Tier.COLD
    visits: int = 0
    waiting: list[Hashable] = field(default_factory=list)
    ended_s: float | None = None
    """When it last fell idle; None while it is busy, or was never asked."""
    keep_until_s: float = 0.0
    prewarm_at_s: float = inf
    prewarm_until_s: float = inf
    retry_at_s: float = 0.0
    """Until then it is not loaded, because none of its workers could start."""
    queued_s: float = 0.0
    ready_s: float = 0.0
    loading_s: float = 0.0
    loading_from: Tier = Tier.COLD
    reason: str = ""
    prices_s: dict[Tier, float] = field(default_factory=dict)
    hints: dict[Hint, HintRecord] = field(default_factory=dict)
    cold_starts: int = 0
    requests: int = 0
    loads: int = 0
    idle_from_s: float | None = None
    """Since when it is ready and nobody asks, if so."""
    wasted_gpu_s: float = 0.0

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def is_ready(self) -> bool:
        return self.residence is Residence.READY

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.visits

    @property
    def turn_ends_s(self) -> float:
        return self.ready_s + max(TURN_S, self.load_s)

    def idles(self, now: float, *, idle: bool) -> None:
        """From now on it is ready and nobody asks, or that is over."""
        if self.idle_from_s is not None:
            self.wasted_gpu_s += now - self.idle_from_s
        self.idle_from_s = now if idle else None
