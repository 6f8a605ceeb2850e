"""Simulate the scheduler under a load, on a virtual clock: no model and no waiting.

    python tests/bench/simulate_scheduler.py
    python tests/bench/simulate_scheduler.py --load interactive=4,300,150 --load batch=1,4000,400 \
        --pages 4096 --running 32 --step-seconds 0.03 --cost 8,0.05,0.03

A load is a class, its runs per second, and the mean numbers of tokens in its prompts and answers;
runs arrive at random (Poisson), lengths are exponential. A step costs milliseconds: itself, each
row of decoding, each token of a prompt. It prints a table, and one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.kernels.shapes import PAGE_TOKENS  # noqa: E402
from tailrace.ledger.wire.schema import Priority  # noqa: E402
from tailrace.origin.scheduler.limits import Limits  # noqa: E402
from tests.bench.bench_ledger_work import percentile  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.origin.scheduler.scheduler_simulator import (  # noqa: E402
    VOCABULARY,
    Arrival,
    Cost,
    Outcome,
    Simulator,
)

MOST_STEPS = 1_000_000
LOADS = ("interactive=4,300,150", "standard=2,600,200", "batch=2,1500,300")


@dataclass(frozen=True)
class Load:
    """Runs per second of one class, and their mean numbers of tokens."""

    priority: Priority
    rate: float
    prompt: float
    tokens: float

    @staticmethod
    def parse(text: str) -> Load:
        """`interactive=4,300,150`; ValueError for anything else, as argparse wants it."""
        name, _, numbers = text.partition("=")
        rate, prompt, tokens = map(float, numbers.split(","))
        classes = {priority.word: priority for priority in Priority}
        if name not in classes or min(rate, prompt, tokens) <= 0:
            raise ValueError(text)
        return Load(classes[name], rate, prompt, tokens)


def milliseconds(text: str) -> Cost:
    step, row, prefill = (float(number) / 1000 for number in text.split(","))
    return Cost(step, row, prefill)


def arrivals(
    loads: Sequence[Load], seconds: float, common: float, most: int, random: Random
) -> list[Arrival]:
    """Draw runs of at most `most` tokens; the share `common` of prompts begin with the same ids."""
    stem = random.choices(range(VOCABULARY), k=most)
    runs = []
    for load in loads:
        at = random.expovariate(load.rate)
        while at < seconds:
            length = min(1 + round(random.expovariate(1 / load.prompt)), most // 2)
            tokens = min(1 + round(random.expovariate(1 / load.tokens)), most - length)
            own = random.choices(range(VOCABULARY), k=length)
            half = length // 2 if random.random() < common else 0
            runs.append(Arrival(at, load.priority, stem[:half] + own[half:], tokens, tokens))
            at += random.expovariate(load.rate)
    return runs


def milli(values: Sequence[float], part: float) -> float | None:
    return round(percentile(values, part) * 1000, 1) if values else None


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, float | int | None]:
    """Summarise the runs of one class: latencies in ms, throughput in tokens per second."""
    begun = [outcome for outcome in outcomes if outcome.times]
    first = [outcome.times[0] - outcome.arrival.at for outcome in begun]
    gaps = [b - a for outcome in begun for a, b in pairwise(outcome.times)]
    return {
        "runs": len(outcomes),
        "refused": sum(outcome.refused for outcome in outcomes),
        "preempted": sum(outcome.preempted for outcome in outcomes),
        "ttft_p50_ms": milli(first, 0.5),
        "ttft_p99_ms": milli(first, 0.99),
        "itl_p50_ms": milli(gaps, 0.5),
        "itl_p99_ms": milli(gaps, 0.99),
        "tokens_per_s": round(sum(len(outcome.times) for outcome in begun) / seconds, 1),
    }


def report(simulator: Simulator) -> dict[str, object]:
    load = simulator.scheduler.load()
    rows = {
        priority.word: figures(
            [o for o in simulator.outcomes if o.arrival.priority is priority], simulator.now
        )
        for priority in Priority
    }
    return {
        **{name: row for name, row in rows.items() if row["runs"]},
        "seconds": round(simulator.now, 1),
        "steps": len(simulator.plans),
        "step_p50_ms": milli(simulator.seconds, 0.5),
        "step_p99_ms": milli(simulator.seconds, 0.99),
        "batch_limit": load.batch_limit,
        "row_limit": load.row_limit,
        "turn_limit": load.turn_limit,
        "prompt_tokens": load.prompt_tokens,
        "reused_tokens": load.reused_tokens,
        "drafted": load.drafted,
        "accepted": load.accepted,
    }


def table(result: dict[str, object]) -> Table:
    heads = ("runs", "refused", "pre-\nempted", "TTFT ms\np50/p99", "ITL ms\np50/p99", "tokens/s")
    shown = Table("class", *heads, box=SIMPLE_HEAD)
    for name, row in result.items():
        if isinstance(row, dict):
            runs, refused, preempted, *latencies, rate = (
                "-" if value is None else f"{value:,.0f}" for value in row.values()
            )
            pairs = ["/".join(latencies[:2]), "/".join(latencies[2:])]
            shown.add_row(name, runs, refused, preempted, *pairs, rate)
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    defaults = Limits()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--load", action="append", type=Load.parse, metavar="CLASS=RATE,IN,OUT")
    parser.add_argument("--seconds", type=float, default=60, help="how long runs arrive")
    parser.add_argument("--pages", type=int, default=2048, help=f"of {PAGE_TOKENS} tokens")
    parser.add_argument("--running", type=int, default=defaults.running)
    parser.add_argument("--waiting", type=int, default=defaults.waiting)
    parser.add_argument("--step-seconds", type=float, default=defaults.step_seconds)
    parser.add_argument("--cost", type=milliseconds, default=Cost(), metavar="STEP,ROW,PREFILL")
    parser.add_argument("--common", type=float, default=0.3, help="share of prompts with a prefix")
    parser.add_argument("--guess", type=float, help="how often a guessed token is right")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(argv)
    loads = chosen.load or [Load.parse(text) for text in LOADS]
    limits = Limits(
        running=chosen.running, waiting=chosen.waiting, step_seconds=chosen.step_seconds
    )
    most = min(chosen.pages, 256) * PAGE_TOKENS
    runs = arrivals(loads, chosen.seconds, chosen.common, most, Random(chosen.seed))
    simulator = Simulator(runs, chosen.pages, limits, chosen.cost, guess=chosen.guess)
    simulator.run(MOST_STEPS)
    result = report(simulator)
    Console().print(table(result))
    print_line(result)


if __name__ == "__main__":
    main()
