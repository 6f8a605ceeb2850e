"""Policies under a cap on memory: who is resident, and who goes when there is no room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ledger.errors import CallerError
from origin.warm.policies import GreedyDual, KeepAlivePolicy
from origin.warm.prices import WarmPrices
from origin.warm.trace import ArrivalTrace, busy_periods

PROGRESS_EVERY = 10_000


@dataclass(frozen=True)
class CappedOutcome:
    """`overcommitted` counts starts for which busy models alone were too large for the cap.

    They are served all the same, as nobody's request is put off here.
    """

    wasted_gpu_s: float
    cold_starts: int
    overcommitted: int


class CappedPool:
    """One device: residents by name, their sizes, and a cap that idle ones never exceed.

    A busy model, and so one that is loading, is never evicted.
    """

    def __init__(
        self, policy: KeepAlivePolicy, ranking: GreedyDual, sizes: dict[str, float], cap: float
    ) -> None:
        largest = max(sizes, key=lambda one: sizes[one])
        if not min(sizes.values()) > 0:
            raise CallerError("is to be above zero for every model", field="sizes")
        if not cap >= sizes[largest]:
            raise CallerError(
                f"{cap:g} is too small for {largest!r}, which takes {sizes[largest]:g}",
                field="memory",
                hint="a cap that holds the largest model",
            )
        self._policy, self._ranking, self._sizes, self._cap = policy, ranking, sizes, cap
        self._busy: set[str] = set()
        self._idle: dict[str, tuple[float, float]] = {}
        self.overcommitted = 0
        self.wasted: dict[str, float] = {}
        """Of the gap that each model is in."""

    def begin(self, model: str, now: float) -> bool:
        """A request came for a model that was not busy; True if it was warm."""
        self._expire(now)
        held = self._idle.pop(model, None)
        if held is not None:
            self.wasted[model] = now - held[0]
        self._busy.add(model)
        self._ranking.arrived(model, self._sizes[model])
        self._make_room(now)
        return held is not None

    def end(self, model: str, now: float) -> None:
        """Its last request ended."""
        self._expire(now)
        self._busy.discard(model)
        decision = self._policy.decide(model, now)
        self._idle[model] = (now, decision.keep_until_s)
        self.wasted[model] = 0.0
        self._make_room(now)

    def used(self) -> float:
        return sum(self._sizes[one] for one in self._busy | self._idle.keys())

    def _expire(self, now: float) -> None:
        for model in [one for one, (_, until) in self._idle.items() if until <= now]:
            since, until = self._idle.pop(model)
            self.wasted[model] = until - since

    def _make_room(self, now: float) -> None:
        used = self.used()
        while used > self._cap and self._idle:
            for model in self._ranking.victims(self._idle, self._sizes, used - self._cap):
                since, _ = self._idle.pop(model)
                self.wasted[model] = now - since
            used = self.used()
        self.overcommitted += used > self._cap


def replay_capped(
    trace: ArrivalTrace,
    policy: KeepAlivePolicy,
    sizes: dict[str, float],
    cap: float,
    prices: WarmPrices,
    progress: Callable[[int], None] = lambda done: None,
) -> CappedOutcome:
    """The policy decides how long to keep, greedy-dual who goes early; nothing is prewarmed."""
    ranking = policy if isinstance(policy, GreedyDual) else GreedyDual(prices.cold_cost_gpu_s)
    pool = CappedPool(policy, ranking, sizes, cap)
    busy = busy_periods(trace)
    # Ends sort before begins of the same instant: what has ended may go.
    order = np.lexsort((np.repeat([1, 0], len(busy)), np.concatenate([busy.start_s, busy.end_s])))
    last_end: dict[str, float] = {}
    wasted, cold = 0.0, 0
    for done, event in enumerate(order.tolist()):
        if done % PROGRESS_EVERY == 0:
            progress(done // 2)
        begins, period = event < len(busy), event % len(busy)
        name = trace.names[busy.model[period]]
        if not begins:
            last_end[name] = float(busy.end_s[period])
            pool.end(name, last_end[name])
            continue
        now = float(busy.start_s[period])
        warm = pool.begin(name, now)
        if name in last_end:
            policy.observe(name, now - last_end[name])
            wasted += pool.wasted[name]
            cold += not warm
    return CappedOutcome(wasted, cold, pool.overcommitted)
