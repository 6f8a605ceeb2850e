"""Costs of a trace for policies that know the future: a measure for tests and for the bench."""

from __future__ import annotations

import numpy as np

from tailrace.origin.pool.policies.policies import WarmPrices
from tailrace.origin.pool.policies.trace import ArrivalTrace, IdleGaps
from tailrace.origin.pool.replay import PoolReplay


def prewarm_optimum(gaps: IdleGaps, prices: WarmPrices) -> float:
    """Return the cost if every model is loaded again just in time: the load alone, and no wait."""
    cheapest = min(prices.cold_cost_gpu_s, prices.load_s)
    return float(np.minimum(gaps.length_s, cheapest).sum())


def hindsight_cost(gaps: IdleGaps, prices: WarmPrices) -> float:
    """Return the cost of the best fixed TTL for each model, chosen with all of its gaps known."""
    total = 0.0
    for model in np.unique(gaps.model):
        ordered = np.sort(gaps.length_s[gaps.model == model])
        longer = np.arange(len(ordered), -1, -1)
        ttl = np.concatenate([[0.0], ordered])
        idled = np.concatenate([[0.0], np.cumsum(ordered)])
        total += float((idled + (ttl + prices.cold_cost_gpu_s) * longer).min())
    return total


def play_trace(replay: PoolReplay, trace: ArrivalTrace) -> None:
    """Its requests, until all of them are over; what follows the last one is nobody's guess."""
    rows = (trace.model.tolist(), trace.arrival_s.tolist(), trace.duration_s.tolist())
    for model, at, service_s in zip(*rows, strict=True):
        replay.request(trace.names[model], at, service_s)
    while any(one.requests for one in replay.pool.models):
        replay.advance(replay._events[0][0])
