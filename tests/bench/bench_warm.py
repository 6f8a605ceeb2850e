"""The table of docs/warm-pools.md, how fast TTLs are swept, a cold start, workers that are killed.

python tests/bench/bench_warm.py [--days 7] [--seed 1] [--starts 9] [--kills 200] [--hangs 50]
                              [--day-s 60]

Ends with one line of JSON. What is killed and stopped is that of `bench_kill_workers` beside this;
0 kills leave that out. The day through a real pool is that of `bench_pool`; 0 s leave it out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from origin.config import OriginConfig  # noqa: E402
from origin.warm.generated import GENERATED, REGULAR, generated  # noqa: E402
from origin.warm.histogram import HistogramBins, HybridHistogram  # noqa: E402
from origin.warm.named import DEFAULT_POLICY, named_policy  # noqa: E402
from origin.warm.optimum import keep_alive_optimum, prewarm_optimum  # noqa: E402
from origin.warm.policies import (  # noqa: E402
    BreakEven,
    FixedTtl,
    GreedyDual,
    KeepAlivePolicy,
)
from origin.warm.prewarm import PredictivePrewarm  # noqa: E402
from origin.warm.prices import WarmPrices  # noqa: E402
from origin.warm.simulate import compare, hindsight_cost, sweep_ttls  # noqa: E402
from origin.warm.trace import idle_gaps  # noqa: E402
from origin.workers.load_profile import profile  # noqa: E402
from tests.bench.bench_kill_workers import measure  # noqa: E402
from tests.bench.bench_pool import POLICIES, days  # noqa: E402

STREAMS, BATCH = 32, 190
COLD_COSTS = (60.0, 600.0)
HINDSIGHT = "best TTL per model in hindsight"
GAPS, TTLS = 1_000_000, 20


def ratios(kind: str, days: float, seed: int, prices: WarmPrices) -> dict[str, float]:
    """Cost over the optimum: without a cap, and with one that holds half of the models."""
    trace = generated(kind, seed, days)
    gaps = idle_gaps(trace)
    policies: list[KeepAlivePolicy] = [
        *(FixedTtl(60.0), FixedTtl(300.0), FixedTtl(3600.0), BreakEven(prices)),
        *(HybridHistogram(), HybridHistogram(HistogramBins.fine())),
        *(named_policy(DEFAULT_POLICY, prices), PredictivePrewarm(prices)),
    ]
    outcomes, _ = compare(trace, policies, prices)
    found = {one.policy: one.over_optimum for one in outcomes}
    best = keep_alive_optimum(gaps, prices).cost_gpu_s
    found[HINDSIGHT] = hindsight_cost(gaps, prices) / best
    found["clairvoyant prewarm"] = prewarm_optimum(gaps, prices).cost_gpu_s / best
    cap = len(trace.names) / 2
    capped: list[KeepAlivePolicy] = [
        *(GreedyDual(prices.cold_cost_gpu_s), BreakEven(prices)),
        named_policy(DEFAULT_POLICY, prices),
    ]
    outcomes, _ = compare(trace, capped, prices, cap=cap)
    found |= {f"{one.policy}, cap": one.over_optimum for one in outcomes}
    return found


def gaps_per_s() -> float:
    lengths = np.random.default_rng(1).lognormal(4.0, 2.0, GAPS)
    began = time.perf_counter()
    sweep_ttls(lengths, np.geomspace(1.0, 1e5, TTLS).tolist(), WarmPrices())
    return GAPS * TTLS / (time.perf_counter() - began)


def cold_start(starts: int) -> dict[str, float]:
    """Of a worker of the demo model."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(profile(OriginConfig(data=Path(folder)), starts))
    return {
        "cold_start_ms": round(found.cold_s * 1e3),
        "cold_start_over_floor": round(found.over_floor, 2),
        "attributed": round(found.cold.attributed, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hangs", type=int, default=50)
    parser.add_argument("--day-s", type=float, default=60.0)
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
    of_people = [found for (kind, _), found in columns.items() if kind not in REGULAR]
    said: dict[str, Any] = {
        "default_cost_over_opt": round(max(found[DEFAULT_POLICY] for found in of_people), 3),
        "break_even_over_opt": round(max(found["break-even"] for found in of_people), 3),
        "hindsight_over_opt": round(max(found[HINDSIGHT] for found in of_people), 3),
    }
    said |= {"gap_ttl_pairs_per_s": gaps_per_s(), "load": os.getloadavg()[0]}
    said |= cold_start(given.starts)
    if given.day_s:
        played = asyncio.run(days(POLICIES, given.day_s, given.seed, print))
        said["sim_vs_real"] = round(max(one.off for one in played), 4)
    if given.kills:
        said |= asyncio.run(measure(given.kills, given.hangs, STREAMS, BATCH, given.seed))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
