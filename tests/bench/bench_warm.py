"""The table of docs/warm-pools.md, and how fast TTLs are swept; ends with one line of JSON.

python tests/bench/bench_warm.py [--days 7] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np

from origin.warm.generated import GENERATED, generated
from origin.warm.histogram import HistogramBins, HybridHistogram
from origin.warm.optimum import keep_alive_optimum, prewarm_optimum
from origin.warm.policies import (
    BreakEven,
    FixedTtl,
    GreedyDual,
    KeepAlivePolicy,
    PredictivePrewarm,
)
from origin.warm.prices import WarmPrices
from origin.warm.simulate import compare, hindsight_cost, sweep_ttls
from origin.warm.trace import idle_gaps

COLD_COSTS = (60.0, 600.0)
GAPS, TTLS = 1_000_000, 20


def ratios(kind: str, days: float, seed: int, prices: WarmPrices) -> dict[str, float]:
    """Cost over the optimum: without a cap, and with one that holds half of the models."""
    trace = generated(kind, seed, days)
    gaps = idle_gaps(trace)
    policies: list[KeepAlivePolicy] = [
        *(FixedTtl(60.0), FixedTtl(300.0), FixedTtl(3600.0), BreakEven(prices)),
        *(HybridHistogram(), HybridHistogram(HistogramBins.fine())),
        *(PredictivePrewarm(prices, prewarm=False), PredictivePrewarm(prices)),
    ]
    outcomes, _ = compare(trace, policies, prices)
    found = {one.policy: one.over_optimum for one in outcomes}
    best = keep_alive_optimum(gaps, prices).cost_gpu_s
    found["best TTL per model in hindsight"] = hindsight_cost(gaps, prices) / best
    found["clairvoyant prewarm"] = prewarm_optimum(gaps, prices).cost_gpu_s / best
    cap = len(trace.names) / 2
    capped: list[KeepAlivePolicy] = [GreedyDual(prices.cold_cost_gpu_s), BreakEven(prices)]
    outcomes, method = compare(trace, capped, prices, cap=cap)
    found |= {f"{one.policy}, cap, {method}": one.over_optimum for one in outcomes}
    return found


def gaps_per_s() -> float:
    lengths = np.random.default_rng(1).lognormal(4.0, 2.0, GAPS)
    began = time.perf_counter()
    sweep_ttls(lengths, np.geomspace(1.0, 1e5, TTLS).tolist(), WarmPrices())
    return GAPS * TTLS / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    columns: dict[tuple[str, float], dict[str, float]] = {}
    for cold_cost in COLD_COSTS:
        for kind in GENERATED:
            found = ratios(kind, given.days, given.seed, WarmPrices(cold_cost))
            columns[kind, cold_cost] = found
    rows = list(dict.fromkeys(name for found in columns.values() for name in found))
    print("| policy | " + " | ".join(f"{kind} {cost:g}" for kind, cost in columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name in rows:
        cells = [f"{found[name]:.2f}" if name in found else "" for found in columns.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")
    worst = {
        name: max(found[name] for found in columns.values())
        for name in ("break-even", "learned-ttl")
    }
    said = {"default_cost_over_opt": worst["break-even"], "learned_over_opt": worst["learned-ttl"]}
    said |= {"gap_ttl_pairs_per_s": gaps_per_s(), "load": os.getloadavg()[0]}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
