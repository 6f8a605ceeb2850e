"""The pool in time that is played, for a shadow of the pool that serves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from tailrace.origin.pool.warm_pool import PoolOrder, WarmPool

LEAVE_S = 0.1
"""What it takes until the memory of a model that leaves is free, unless it was measured."""
MOST_HELD = 100_000
"""Requests that a shadow keeps in mind; beyond it the oldest one counts as ended."""

_END, _GONE, _LOADED = range(3)
"""Of the same instant an end comes first, and arrivals after all of these."""


class PoolReplay:
    """Feeds a pool with requests, in the order of their arrival, and with what follows of them."""

    def __init__(
        self,
        pool: WarmPool,
        load_s: Callable[[str], float],
        leave_s: Callable[[str], float] = lambda model: LEAVE_S,
    ) -> None:
        self.pool = pool
        self.now = 0.0
        self._load_s, self._leave_s = load_s, leave_s
        self._events: list[tuple[float, int, int, Hashable]] = []
        self._waiting: dict[str, list[tuple[Hashable, float]]] = {}
        self._count = 0

    def start(self, now: float) -> None:
        self.now = now
        self.carry_out(self.pool.tick(now))

    def request(self, model: str, at: float, service_s: float) -> None:
        """One that takes so long once it was taken."""
        self.advance(at)
        self._count += 1
        orders = self.pool.arrive(model, self._count, self.now)
        if self.pool.of(model).is_ready:
            self._at(self.now + service_s, _END, self._count)
        else:
            self._waiting.setdefault(model, []).append((self._count, service_s))
        self.carry_out(orders)

    def advance(self, to: float) -> None:
        """All that happens until then."""
        while True:
            first = self._events[0][0] if self._events else inf
            due = max(min(first, self.pool.wake_at(self.now)), self.now)
            if due > to or due == inf:
                break
            self.now = due
            if first <= due:
                _, kind, _, what = heappop(self._events)
                self._happen(kind, what)
            else:
                self.carry_out(self.pool.tick(due))
        if to != inf:
            self.now = to

    def _happen(self, kind: int, what: Hashable) -> None:
        if kind == _END:
            orders = self.pool.end(what, self.now)
        elif kind == _GONE:
            orders = self.pool.gone(str(what), self.now)
        else:
            orders = self.pool.loaded(str(what), self.now)
            for request, service_s in self._waiting.pop(str(what), ()):
                self._at(self.now + service_s, _END, request)
        self.carry_out(orders)

    def carry_out(self, orders: list[PoolOrder]) -> None:
        for order in orders:
            takes_s, kind = (self._load_s, _LOADED) if order.load else (self._leave_s, _GONE)
            self._at(self.now + takes_s(order.model), kind, order.model)

    def _at(self, time_s: float, kind: int, what: Hashable) -> None:
        self._count += 1
        heappush(self._events, (time_s, kind, self._count, what))


@dataclass(frozen=True)
class PoolCounts:
    """What a pool has come to; `cold_starts` counts the first one of each model, too."""

    requests: int
    cold_starts: int
    loads: int
    wasted_gpu_s: float

    @classmethod
    def of(cls, pool: WarmPool) -> PoolCounts:
        states = pool.states()
        return cls(
            sum(one.requests for one in states),
            sum(one.cold_starts for one in states),
            sum(one.loads for one in states),
            sum(one.wasted_gpu_s for one in states),
        )

    @property
    def cold_rate(self) -> float:
        return self.cold_starts / self.requests if self.requests else 0.0


class ShadowPool:
    """Another policy beside the one that serves: it decides, and nothing is done about it.

    In the shadow a request takes as long as it did in truth, once it was taken; that is known when
    it has ended. So the shadow is behind by the longest request that is under way.
    """

    def __init__(self, replay: PoolReplay, now: float) -> None:
        self.replay = replay
        replay.start(now)
        self._open: OrderedDict[Hashable, _Shadowed] = OrderedDict()

    @property
    def counts(self) -> PoolCounts:
        return PoolCounts.of(self.replay.pool)

    def arrived(self, model: str, request: Hashable, now: float) -> None:
        self._open[request] = _Shadowed(model, now)
        if len(self._open) > MOST_HELD:
            first = next(iter(self._open))
            self.ended(first, now, now - self._open[first].arrived_s)

    def ended(self, request: Hashable, now: float, service_s: float) -> None:
        """It has ended, `service_s` after it was taken."""
        if request not in self._open:
            return
        self._open[request].service_s = service_s
        while self._open and (one := next(iter(self._open.values()))).service_s is not None:
            self._open.popitem(last=False)
            self.replay.request(one.model, one.arrived_s, one.service_s)
        if not self._open:
            self.replay.advance(now)


@dataclass(slots=True)
class _Shadowed:
    model: str
    arrived_s: float
    service_s: float | None = None
