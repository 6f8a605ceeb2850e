"""The table of docs/warm-pools.md, how fast TTLs are swept, a cold start, workers that are killed.

    python tests/bench/bench_warm.py [--to FILE] [--only PART …] [--days 7] [--seed 1] [--starts 9]
                                     [--day-s 60] [--kills 200] [--hangs 50]

Four parts, half an hour in all on two cores that do nothing else: `table` (policies on generated
traces, 2 min), `starts` (2 min), `day` (of `bench_pool`, under each policy, 10 min) and `kills` (of
`bench_kill_workers`, 15 min). With `--to` what each has found is kept in a file, and a part that is
in it already is not run again. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.origin.config import OriginConfig  # noqa: E402
from tailrace.origin.pool.policies.learned import HybridHistogram, PredictivePrewarm  # noqa: E402
from tailrace.origin.pool.policies.named_policy import named_policy  # noqa: E402
from tailrace.origin.pool.policies.policies import (  # noqa: E402
    BreakEven,
    FixedTtl,
    GreedyDual,
    KeepAlivePolicy,
    WarmPrices,
)
from tailrace.origin.pool.policies.simulate import (  # noqa: E402
    compare,
    keep_alive_optimum,
    sweep_ttls,
)
from tailrace.origin.pool.policies.trace import (  # noqa: E402
    ENDS,
    GENERATED,
    REGULAR,
    STEP_S,
    VISIT_S,
    ArrivalTrace,
    generated,
    idle_gaps,
)
from tailrace.origin.workers.load_profile import profile  # noqa: E402
from tests.bench.bench_kill_workers import measure  # noqa: E402
from tests.bench.bench_pool import POLICIES, days  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.origin.pool.policies.costs import hindsight_cost, prewarm_optimum  # noqa: E402

Found = dict[str, Any]
STREAMS, BATCH = 32, 190
COLD_COSTS = (60.0, 600.0)
DEFAULT_POLICY = OriginConfig().policy
HINDSIGHT = "best TTL per model in hindsight"
KNOWN = "who knows all rates"
MOST_VISITS = 8
"""Under way at once for one model; 0.09 are in the mean."""
GAPS, TTLS = 1_000_000, 20


def ratios(kind: str, days: float, seed: int, prices: WarmPrices) -> dict[str, float]:
    """Cost over the optimum: without a cap, and with one that holds half of the models."""
    trace = generated(kind, seed, days)
    gaps = idle_gaps(trace)
    policies: list[KeepAlivePolicy] = [
        *(FixedTtl(60.0), FixedTtl(300.0), FixedTtl(3600.0), BreakEven(prices)),
        *(HybridHistogram(), named_policy("hybrid-histogram-1s", prices)),
        *(named_policy(DEFAULT_POLICY, prices), PredictivePrewarm(prices)),
    ]
    outcomes, _ = compare(trace, policies, prices)
    found = {one.policy: one.over_optimum for one in outcomes}
    best = keep_alive_optimum(gaps, prices).cost_gpu_s
    found[HINDSIGHT] = hindsight_cost(gaps, prices) / best
    if kind == "bursty":
        found[KNOWN] = known_rates(trace, prices)
    found["clairvoyant prewarm"] = prewarm_optimum(gaps, prices) / best
    cap = len(trace.names) / 2
    capped: list[KeepAlivePolicy] = [
        *(GreedyDual(prices.cold_cost_gpu_s), BreakEven(prices)),
        named_policy(DEFAULT_POLICY, prices),
    ]
    outcomes, _ = compare(trace, capped, prices, cap=cap)
    found |= {f"{one.policy}, cap": one.over_optimum for one in outcomes}
    return found


def known_rates(trace: ArrivalTrace, prices: WarmPrices) -> float:
    """Return the cost over the optimum of a policy that knows how a bursty trace was drawn.

    No policy that does not see the future pays less in the mean. All that is hidden from this one
    is how many visits are under way, which the arrivals suggest. The chance of an early arrival
    falls while none comes, so the model is kept until a cold start is cheaper than waiting on;
    loading it ahead after that does not pay either.
    """
    visits = np.arange(MOST_VISITS + 1)
    paid = optimum = 0.0
    for model in range(len(trace.names)):
        mine = trace.model == model
        arrivals = trace.arrival_s[mine]
        ends = np.maximum.accumulate(arrivals + trace.duration_s[mine])
        chance = (visits == 0).astype(float)
        chances = np.empty((len(arrivals), len(visits)))
        for at, since_s in enumerate(np.diff(arrivals, prepend=0.0)):
            chance *= np.exp(-visits / STEP_S * since_s)
            goes_on, begins = chance * visits / STEP_S, np.roll(chance, 1) / VISIT_S
            chance = (1 - ENDS) * (goes_on + begins) + ENDS * np.roll(goes_on + begins, -1)
            chance /= chance.sum()
            chances[at] = chance
        gaps = np.append(arrivals[1:], 0.0) - ends
        idle = gaps > 0
        low, high = np.zeros(int(idle.sum())), np.full(int(idle.sum()), 100 * STEP_S)
        for _ in range(50):  # when the last arrival is so long ago, by halves
            middle = (low + high) / 2
            left = chances[idle] * np.exp(-np.outer(middle, visits / STEP_S))
            rate = left @ (visits / STEP_S) / left.sum(axis=1) + 1 / VISIT_S
            is_worth = rate * prices.cold_cost_gpu_s > 1
            low, high = np.where(is_worth, middle, low), np.where(is_worth, high, middle)
        keep_s = np.maximum(low - (ends - arrivals)[idle], 0.0)
        cold_s = prices.cold_cost_gpu_s
        paid += np.where(gaps[idle] <= keep_s, gaps[idle], keep_s + cold_s).sum()
        optimum += np.minimum(gaps[idle], cold_s).sum()
    return float(paid / optimum)


def gaps_per_s() -> float:
    """Return how many gaps per second go through all of the TTLs."""
    lengths = np.random.default_rng(1).lognormal(4.0, 2.0, GAPS)
    began = time.perf_counter()
    sweep_ttls(lengths, np.geomspace(1.0, 1e5, TTLS).tolist(), WarmPrices())
    return round(GAPS / (time.perf_counter() - began))


def cold_start(starts: int) -> Found:
    """Profile cold starts of a worker with the demo model."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(profile(OriginConfig(data=Path(folder)), starts))
    return {
        "cold_start_ms": round(found.cold_s * 1e3),
        "cold_start_over_floor": round(found.over_floor, 2),
        "attributed": round(found.cold.attributed, 4),
    }


def table(given: argparse.Namespace) -> Found:
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
    return {
        "default_cost_over_opt": round(max(found[DEFAULT_POLICY] for found in of_people), 3),
        "break_even_over_opt": round(max(found["break-even"] for found in of_people), 3),
        "hindsight_over_opt": round(max(found[HINDSIGHT] for found in of_people), 3),
        "known_rates_over_opt": round(columns["bursty", COLD_COSTS[0]][KNOWN], 3),
        "gaps_per_s": gaps_per_s(),
    }


def day(given: argparse.Namespace) -> Found:
    played = asyncio.run(days(POLICIES, given.day_s, given.seed, say))
    return {
        "sim_vs_real": round(max(one.off for one in played), 4),
        "planned_vs_real": round(max(one.planned_off for one in played), 4),
        "real_days": {one.policy: [one.real, one.recorded, one.planned] for one in played},
    }


def kills(given: argparse.Namespace) -> Found:
    return asyncio.run(measure(given.kills, given.hangs, STREAMS, BATCH, given.seed))


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "table": table,
    "starts": lambda given: cold_start(given.starts),
    "day": day,
    "kills": kills,
}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--day-s", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--hangs", type=int, default=50)
    given = parser.parse_args()
    found: dict[str, Found] = {}
    if given.to is not None and given.to.exists():
        found = json.loads(given.to.read_text())
    for name, part in PARTS.items():
        if name in found or name not in (given.only or PARTS):
            continue
        began = time.monotonic()
        said = part(given)
        spent_s = round(time.monotonic() - began)
        found[name] = said | {f"{name}_load": os.getloadavg()[0], f"{name}_s": spent_s}
        say(f"{name}: {found[name]}")
        if given.to is not None:
            given.to.write_text(json.dumps(found))
    print_line({key: value for part in found.values() for key, value in part.items()})


if __name__ == "__main__":
    main()
