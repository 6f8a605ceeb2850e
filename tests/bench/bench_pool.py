"""A recorded day through the real pool under each policy, and what the simulator said of it.

    python tests/bench/bench_pool.py [--day-s 60] [--policy NAME …] [--seed 1]

Three models of the demo's size behind one origin, a cap that holds two, the origin's supervisor,
ledger, launcher and workers as they are; the pool's clock runs so fast that a day takes `--day-s`.
What is asked comes from a trace that is drawn: bursts, the hours of a day, and a clockwork. The
simulator plays two things with the very pool that served: the day as it was to be, with loads and
requests that take what they take in the mean (`planned`), and the requests as they came
(`recorded`). Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ledger.errors import Unavailable  # noqa: E402
from ledger.frame import Open, Sampling  # noqa: E402
from origin.config import DEMO_MODEL, LedgerConfig, OriginConfig, StreamsConfig  # noqa: E402
from origin.edges.peers import Way  # noqa: E402
from origin.model_table import ModelTable  # noqa: E402
from origin.objects import OriginObjects  # noqa: E402
from origin.open_ledger import open_ledger  # noqa: E402
from origin.pool.members import PoolMember  # noqa: E402
from origin.pool.records import (  # noqa: E402
    ArrivalRecord,
    PoolChoice,
    PoolDecision,
    PoolRecord,
    TierChange,
)
from origin.pool.replay import LEAVE_S, PoolCounts, replay_pool  # noqa: E402
from origin.pool.tiers import Tier  # noqa: E402
from origin.pool.warm_pool import WarmPool  # noqa: E402
from origin.serving.plan import planned  # noqa: E402
from origin.serving.served_model import ServedModels  # noqa: E402
from origin.start import _launcher, _slots  # noqa: E402
from origin.steady_clock import KeptClock  # noqa: E402
from origin.supervisor import Supervisor, _served  # noqa: E402
from origin.warm.generated import DAY_S, bursty, clockwork, diurnal  # noqa: E402
from origin.warm.named import named_policy  # noqa: E402
from origin.warm.prices import WarmPrices  # noqa: E402
from origin.warm.trace import ArrivalTrace  # noqa: E402

POLICIES = (
    *("adaptive-ttl", "ttl-300", "ttl-3600", "break-even"),
    *("hybrid-histogram", "greedy-dual", "predictive-prewarm"),
)
MODELS = ("bursty", "diurnal", "clockwork")
SIZE_MIB, CAP_MIB = 100, 250
COLD_COST_GPU_S = 900.0
TOKENS = 8
EACH = 90
"""Requests of a model in the day, about."""


def recorded_day(seed: int) -> ArrivalTrace:
    """Of each kind of model one, thinned to what a minute can hold."""
    rng = np.random.default_rng(seed)
    drawn = []
    for kind in (bursty, diurnal, clockwork):
        arrivals = kind(rng, 1.0)
        drawn.append(arrivals[rng.random(len(arrivals)) < EACH / len(arrivals)])
    counts = [len(arrivals) for arrivals in drawn]
    return ArrivalTrace.of(
        MODELS, np.repeat(np.arange(3), counts), np.concatenate(drawn), np.zeros(sum(counts))
    )


@dataclass(frozen=True)
class PlayedDay:
    """`real` and the two others count cold starts."""

    policy: str
    requests: int
    refused: int
    real: int
    recorded: int
    planned: int
    loads: int
    load_s: float
    service_s: float

    @property
    def off(self) -> float:
        """By what share the simulator was wrong of what it was told."""
        return abs(self.recorded - self.real) / self.real

    @property
    def planned_off(self) -> float:
        return abs(self.planned - self.real) / self.real


async def play(policy: str, trace: ArrivalTrace, day_s: float, folder: Path) -> PlayedDay:
    """The day, through an origin in this process."""
    pace = DAY_S / day_s
    config = OriginConfig(
        data=folder,
        link=f"unix://{folder}/link",
        cpu_memory_mib=CAP_MIB,
        cold_wait_s=3600,
        cold_cost_gpu_s=COLD_COST_GPU_S,
        policy=policy,
    )
    table = ModelTable(folder=DEMO_MODEL, kv_mib=16, memory_mib=SIZE_MIB)
    plans = planned(dict.fromkeys(trace.names, table), config)
    launcher = _launcher(config, [plan.config for plan in plans])
    slots = [
        slot
        for number, plan in enumerate(plans)
        for slot in _slots(plan.name, plan.config, launcher, number)
    ]
    for slot in slots:
        slot.rest()
    parts = [slot.keep() for slot in slots] + ([launcher.keep()] if launcher else [])
    running: list[asyncio.Task[Any]] = [asyncio.create_task(part) for part in parts]
    ledger_config = LedgerConfig()
    clock = KeptClock(folder)
    ledger = await open_ledger(ledger_config, folder, clock, None)
    objects = OriginObjects(
        ledger, StreamsConfig(), clock, way=Way("unix", config.link_credentials)
    )
    try:
        served = ServedModels(*(_served(plan, slots) for plan in plans))
        supervisor = Supervisor(config, ledger_config, ledger, objects, None, clock, served)
        began = time.monotonic()
        supervisor.keep_models(plans, served, lambda: (time.monotonic() - began) * pace, pace)
        records: list[PoolRecord] = []
        ended = asyncio.Event()
        keeper = supervisor._keeper
        assert keeper is not None
        tell = keeper.live._tell

        def keep(record: PoolRecord, of_shadow: bool) -> None:
            records.append(record)
            tell(record, of_shadow)
            if isinstance(record, ArrivalRecord):
                ended.set()

        keeper.live._tell = keep
        serving = asyncio.create_task(supervisor.serve(slots, running))
        return await _asked(policy, trace, pace, supervisor, serving, records, ended)
    finally:
        serving.cancel()
        for task in running:
            task.cancel()
        await asyncio.gather(serving, *running, return_exceptions=True)
        await objects.close()
        await ledger.close()


async def _asked(
    policy: str,
    trace: ArrivalTrace,
    pace: float,
    supervisor: Supervisor,
    serving: asyncio.Task[None],
    records: list[PoolRecord],
    ended: asyncio.Event,
) -> PlayedDay:
    """Every request at its time; then what the pool counted, beside the simulator."""
    keeper = supervisor._keeper
    assert keeper is not None
    # The models are there for the first time before the day begins, so that all are known.
    refused = 0

    async def ask(model: str) -> None:
        nonlocal refused
        request = Open(
            model=model,
            prompt="Once upon a time",
            max_tokens=TOKENS,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0, seed=1),
        )
        try:
            await supervisor._service.open(request)
        except Unavailable as error:
            print(f"{model} refused: {error}", file=sys.stderr)
            refused += 1

    async def quiet() -> None:
        while any(state.requests_now for state in keeper.pool.states()):
            ended.clear()
            await ended.wait()

    for model in trace.names:
        await ask(model)
    await quiet()
    before = PoolCounts.of(keeper.pool)
    first_record = len(records)
    begun_s = keeper.live.clock_s()
    asking: list[asyncio.Task[None]] = []
    for model, at_s in zip(trace.model.tolist(), trace.arrival_s.tolist(), strict=True):
        wait_s = (begun_s + at_s - keeper.live.clock_s()) / pace
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if serving.done():
            serving.result()
        asking.append(asyncio.create_task(ask(trace.names[model])))
    await asyncio.gather(*asking)
    await quiet()
    real = PoolCounts.of(keeper.pool)
    return _held_against(policy, trace, records, first_record, before, real, refused)


def _held_against(
    policy: str,
    trace: ArrivalTrace,
    records: list[PoolRecord],
    first: int,
    before: PoolCounts,
    real: PoolCounts,
    refused: int,
) -> PlayedDay:
    requests = [one for one in records if isinstance(one, ArrivalRecord)]
    loads = defaultdict(list)
    for one in records:
        if isinstance(one, TierChange) and one.took_s is not None:
            loads[one.model].append(one.took_s)
    every_load = [took_s for some in loads.values() for took_s in some]
    load_s = statistics.fmean(every_load)
    leave_s = _leave_s(records)
    service = [one.ended_s - one.arrived_s - one.waited_s for one in requests]
    seen = ArrivalTrace.of(
        trace.names,
        np.array([trace.names.index(one.model) for one in requests]),
        np.array([one.arrived_s for one in requests]),
        np.array(service),
    )
    took = {name: iter(some) for name, some in loads.items()}
    recorded = replay_pool(
        seen,
        _pool(policy, trace.names, load_s),
        lambda name: next(took[name], load_s),
        leave_s,
        origin_began_s=0.0,
    )
    # As the real one was, it has had each model once before the day begins.
    first_s = float(trace.arrival_s[0])
    warm_up = np.arange(3) * 2.0 * load_s
    shift = float(warm_up[-1]) + 2.0 * load_s - first_s
    whole = ArrivalTrace.of(
        trace.names,
        np.concatenate([np.arange(3), trace.model]),
        np.concatenate([warm_up, trace.arrival_s + shift]),
        np.full(len(trace) + 3, statistics.fmean(service)),
    )
    pool = _pool(policy, trace.names, load_s)
    expected = replay_pool(whole, pool, lambda name: load_s, leave_s, origin_began_s=0.0)
    return PlayedDay(
        policy=policy,
        requests=real.requests - before.requests,
        refused=refused,
        real=real.cold_starts,
        recorded=recorded.cold_starts,
        planned=expected.cold_starts,
        loads=real.loads,
        load_s=round(load_s, 1),
        service_s=round(statistics.fmean(service), 1),
    )


def _leave_s(records: list[PoolRecord]) -> float:
    """From the order until the room was free, in the mean: some ms, but of a clock that runs."""
    ordered: dict[str, float] = {}
    took: list[float] = []
    for one in records:
        if isinstance(one, PoolDecision) and one.choice is PoolChoice.EVICT:
            ordered[one.model] = one.at_s
        elif isinstance(one, TierChange) and one.tier <= Tier.HOST and one.model in ordered:
            took.append(one.at_s - ordered.pop(one.model))
    return statistics.fmean(took) if took else LEAVE_S


def _pool(policy: str, names: tuple[str, ...], load_s: float) -> WarmPool:
    prices = WarmPrices(COLD_COST_GPU_S)
    members = [PoolMember(name, SIZE_MIB, load_s=load_s) for name in names]
    cost = prices.cold_cost_gpu_s
    return WarmPool(members, named_policy(policy, prices), {"cpu": CAP_MIB}, cold_cost_gpu_s=cost)


async def days(
    policies: tuple[str, ...], day_s: float, seed: int, say: Callable[[str], None]
) -> list[PlayedDay]:
    played = []
    for policy in policies:
        with tempfile.TemporaryDirectory() as folder:
            one = await play(policy, recorded_day(seed), day_s, Path(folder))
        say(f"{one} off {one.off:.3f}, planned {one.planned_off:.3f}")
        played.append(one)
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--day-s", type=float, default=60.0)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    chosen = tuple(given.policy or POLICIES)
    told = asyncio.run(
        days(chosen, given.day_s, given.seed, lambda line: print(line, file=sys.stderr))
    )
    print(
        json.dumps(
            {
                "sim_vs_real": round(max(one.off for one in told), 4),
                "planned_vs_real": round(max(one.planned_off for one in told), 4),
                "load": os.getloadavg()[0],
                "days": [asdict(one) for one in told],
            }
        )
    )


if __name__ == "__main__":
    main()
