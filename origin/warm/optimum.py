"""What a clairvoyant pool would have paid: exact where that can be had, else a named bound."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from origin.warm.prices import WarmPrices
from origin.warm.room import BusyPeriods
from origin.warm.trace import IdleGaps, Indices, Seconds

EXACT_MAX_INTERVALS = 20_000
"""Gaps and busy periods of a trace whose optimum under a cap is computed exactly."""
BOUND_STEPS = 200
"""Of the subgradient method; each of them gives a bound, and the best one is kept."""
US_PER_S = 1_000_000


@dataclass(frozen=True)
class ClairvoyantCost:
    """`method` says whether `cost_gpu_s` is exact, or no more than the optimum."""

    cost_gpu_s: float
    method: Literal["exact", "lagrangian-bound"]


def keep_alive_optimum(gaps: IdleGaps, prices: WarmPrices) -> ClairvoyantCost:
    """Without a cap each gap is its own: idle through it, or pay for a cold start."""
    cost = np.minimum(gaps.length_s, prices.cold_cost_gpu_s).sum()
    return ClairvoyantCost(float(cost), "exact")


def capped_optimum(
    gaps: IdleGaps, busy: BusyPeriods, sizes: Seconds, cap: float, prices: WarmPrices
) -> ClairvoyantCost:
    """Keep-alive under a cap on memory: which gaps to bridge, as there is not room for all.

    Models of one size are a flow through time, whose optimum is whole numbers. Of unequal sizes
    it is NP-hard, and the Lagrangian relaxation of the cap bounds it from below.
    """
    saving = prices.cold_cost_gpu_s - gaps.length_s
    worth = saving > 0
    without = prices.cold_cost_gpu_s * len(gaps)
    begin, length, model = gaps.start_s[worth], gaps.length_s[worth], gaps.model[worth]
    saving = saving[worth]
    if not len(saving):
        return ClairvoyantCost(without, "exact")
    # Where a gap ends its model is busy: the same instant is to be the same number.
    at = _instants(begin, length, model, busy)
    used = sizes[np.unique(np.concatenate([model, busy.model]))]
    slots = int(cap // used[0])
    if (
        np.all(used == used[0])
        and len(saving) + len(busy) <= EXACT_MAX_INTERVALS
        and at.most_at_once(np.ones(len(busy))) <= slots
    ):
        bridged = _flow(at, saving, slots) / US_PER_S
        return ClairvoyantCost(without - bridged, "exact")
    bound = _lagrangian(at, saving, sizes[model], sizes[busy.model], cap)
    return ClairvoyantCost(max(without - bound, 0.0), "lagrangian-bound")


@dataclass(frozen=True)
class _Instants:
    """Gaps and busy periods as half-open ranges of the segments between instants."""

    gap_from: Indices
    gap_to: Indices
    busy_from: Indices
    busy_to: Indices
    count: int

    def most_at_once(self, size: Seconds) -> float:
        return float(self.load(self.busy_from, self.busy_to, size).max(initial=0.0))

    def load(self, begin: Indices, end: Indices, size: Seconds) -> Seconds:
        """What lies on each segment."""
        steps = np.bincount(begin, size, self.count) - np.bincount(end, size, self.count)
        return np.cumsum(steps)[:-1]


def _instants(begin: Seconds, length: Seconds, model: Indices, busy: BusyPeriods) -> _Instants:
    ends = np.empty(len(begin))
    for one in np.unique(model):
        mine = np.sort(busy.start_s[busy.model == one])
        of = model == one
        # The gap's own end is a sum of rounded numbers; the busy period after it is the instant.
        follows = np.searchsorted(mine, begin[of] + length[of] / 2)
        ends[of] = mine[follows]
    times, index = np.unique(
        np.concatenate([begin, ends, busy.start_s, busy.end_s]), return_inverse=True
    )
    cuts = np.cumsum([len(begin), len(begin), len(busy)])
    gap_from, gap_to, busy_from, busy_to = np.split(index, cuts)
    return _Instants(gap_from, gap_to, busy_from, busy_to, len(times))


def _lagrangian(
    at: _Instants, saving: Seconds, gap_size: Seconds, busy_size: Seconds, cap: float
) -> float:
    """No choice of gaps saves more: room has a price in each segment, and any price bounds it."""
    free = np.maximum(cap - at.load(at.busy_from, at.busy_to, busy_size), 0.0)
    price = np.zeros(at.count - 1)
    best = float(saving.sum())
    step = float(saving.mean() / gap_size.mean())
    for turn in range(1, BOUND_STEPS + 1):
        paid = np.concatenate([[0.0], np.cumsum(price)])
        left = saving - gap_size * (paid[at.gap_to] - paid[at.gap_from])
        chosen = left > 0
        best = min(best, float(left[chosen].sum() + price @ free))
        over = at.load(at.gap_from[chosen], at.gap_to[chosen], gap_size[chosen]) - free
        size = float(np.abs(over[(over > 0) | (price > 0)]).max(initial=0.0))
        if size == 0:
            break
        price = np.maximum(price + step / turn**0.5 * over / size, 0.0)
    return best


def _flow(at: _Instants, saving: Seconds, slots: int) -> int:
    """The most microseconds that `slots` paths through time save: successive shortest paths.

    Busy periods are arcs worth more than all gaps together, so that every one of them is taken.
    Whole microseconds, so that nothing is lost to rounding between paths.
    """
    worth: list[int] = np.floor(saving * US_PER_S).astype(np.int64).tolist()
    busy_worth = sum(worth) + 1
    network = _Network(at.count)
    for node in range(at.count - 1):
        network.arc(node, node + 1, slots, 0)
    for begin, end in zip(at.busy_from.tolist(), at.busy_to.tolist(), strict=True):
        network.arc(begin, end, 1, -busy_worth)
    for begin, end, one in zip(at.gap_from.tolist(), at.gap_to.tolist(), worth, strict=True):
        network.arc(begin, end, 1, -one)
    total = network.cheapest(slots)
    return -total - busy_worth * len(at.busy_from)


class _Network:
    """Arcs go forward in time; arc `n ^ 1` is the way back of arc `n`."""

    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._room: list[int] = []
        self._cost: list[int] = []

    def arc(self, begin: int, end: int, room: int, cost: int) -> None:
        for node, other, has, price in ((begin, end, room, cost), (end, begin, 0, -cost)):
            self._out[node].append(len(self._to))
            self._to.append(other)
            self._room.append(has)
            self._cost.append(price)

    def cheapest(self, paths: int) -> int:
        """What so many paths from the first instant to the last one cost."""
        potential = self._first_potentials()
        total = 0
        for _ in range(paths):
            distance, came_by = self._shortest(potential)
            potential = [old + new for old, new in zip(potential, distance, strict=True)]
            if potential[-1] >= 0:
                break  # the rest would only wait
            total += potential[-1]
            node = len(potential) - 1
            while node:
                arc = came_by[node]
                self._room[arc] -= 1
                self._room[arc ^ 1] += 1
                node = self._to[arc ^ 1]
        return total

    def _first_potentials(self) -> list[int]:
        potential = [0] * len(self._out)
        reached = [False] * len(self._out)
        reached[0] = True
        for node, arcs in enumerate(self._out):
            for arc in arcs:
                if self._room[arc]:
                    to, cost = self._to[arc], potential[node] + self._cost[arc]
                    if not reached[to] or cost < potential[to]:
                        potential[to], reached[to] = cost, True
        return potential

    def _shortest(self, potential: list[int]) -> tuple[list[int], list[int]]:
        distance: list[int | None] = [None] * len(self._out)
        came_by = [-1] * len(self._out)
        distance[0] = 0
        heap, done = [(0, 0)], [False] * len(self._out)
        while heap:
            far, node = heappop(heap)
            if done[node]:
                continue
            done[node] = True
            for arc in self._out[node]:
                to = self._to[arc]
                if not self._room[arc] or done[to]:
                    continue
                there = far + self._cost[arc] + potential[node] - potential[to]
                known = distance[to]
                if known is None or there < known:
                    distance[to], came_by[to] = there, arc
                    heappush(heap, (there, to))
        return [0 if one is None else one for one in distance], came_by
