"""Run a recorded day through the real pool under each policy, and compare with the simulator.

    python tests/bench/bench_pool.py [--day-s 60] [--policy NAME …] [--seed 1]

Three models of the demo's size behind one origin, a cap that holds two, the origin's supervisor,
ledger, fork server and workers as they are; the pool's clock is so fast that a day takes `--day-s`.
What is asked comes from a trace that is drawn: bursts, the hours of a day, and a clockwork. The
simulator plays two things with the very pool that served: the day as it was to be, with loads and
requests that take what they take in the mean (`planned`), and the requests as they came
(`recorded`). Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.errors import Unavailable  # noqa: E402
from tailrace.ledger.frame import Open, Sampling  # noqa: E402
from tailrace.ledger.process.lifecycle import Stop  # noqa: E402
from tailrace.origin.checkpoint.prompt import PromptReader  # noqa: E402
from tailrace.origin.config import DEMO_MODEL, LedgerConfig, OriginConfig, StreamsConfig  # noqa: E402
from tailrace.origin.core.pool import ModelPool  # noqa: E402
from tailrace.origin.generations.service import Service  # noqa: E402
from tailrace.origin.objects.object_host import OriginObjects  # noqa: E402
from tailrace.origin.open_ledger import open_ledger  # noqa: E402
from tailrace.origin.pool.members import PoolMember  # noqa: E402
from tailrace.origin.pool.model_table import ModelTable  # noqa: E402
from tailrace.origin.pool.policies.named_policy import named_policy  # noqa: E402
from tailrace.origin.pool.policies.policies import LOAD_S, WarmPrices  # noqa: E402
from tailrace.origin.pool.policies.trace import (  # noqa: E402
    DAY_S,
    ArrivalTrace,
    bursty,
    clockwork,
    diurnal,
)
from tailrace.origin.pool.records import (  # noqa: E402
    ArrivalRecord,
    PoolChoice,
    PoolDecision,
    PoolRecord,
    TierChange,
)
from tailrace.origin.pool.replay import LEAVE_S, PoolCounts, PoolReplay  # noqa: E402
from tailrace.origin.pool.tiers import Tier  # noqa: E402
from tailrace.origin.serving.model_host import ModelHost  # noqa: E402
from tailrace.origin.serving.plan import first_load_s, planned  # noqa: E402
from tailrace.origin.start import fork_server_of, slots_of  # noqa: E402
from tailrace.origin.steady_clock import KeptClock  # noqa: E402
from tailrace.origin.supervisor import Supervisor  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.origin.pool.policies.costs import play_trace  # noqa: E402

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
    """Return arrivals for one model of each kind, thinned to what a minute can hold."""
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
        """Return the share by which the simulator was wrong about its measured inputs."""
        return abs(self.recorded - self.real) / self.real

    @property
    def planned_off(self) -> float:
        return abs(self.planned - self.real) / self.real


Took = list[tuple[float, float]]
"""When something began in the real pool's time, and how long it took."""


class PoolListener:
    """Reports of the real pool: load and unload times, and how late its timer was."""

    def __init__(self) -> None:
        self.records: list[PoolRecord] = []
        self.loads: dict[str, Took] = defaultdict(list)
        self.leaves: dict[str, Took] = defaultdict(list)
        self.late: Took = []
        self.told = asyncio.Event()
        self._left_s: dict[str, float] = {}
        self._due: dict[str, tuple[float | None, ...]] = {}

    def hear(self, record: PoolRecord) -> None:
        self.records.append(record)
        self.told.set()
        match record:
            case TierChange(took_s=float(took_s)):
                self.loads[record.model].append((record.at_s - took_s, took_s))
            case PoolDecision():
                self._decided(record)
            case TierChange(tier=tier) if tier <= Tier.HOST and record.model in self._left_s:
                left_s = self._left_s.pop(record.model)
                self.leaves[record.model].append((left_s, record.at_s - left_s))

    def _decided(self, told: PoolDecision) -> None:
        """Note how late the timer acted on the decision about the last idle time."""
        leave_s, again_s, until_s = self._due.get(told.model, (None, None, None))
        match told.choice:
            case PoolChoice.KEEP:
                until_s = told.prewarm_until_s
                self._due[told.model] = told.keep_until_s, told.prewarm_at_s, until_s
            case PoolChoice.PREWARM | PoolChoice.DECLINE:
                self._late(again_s, told.at_s)
                self._due[told.model] = until_s, None, None
            case PoolChoice.EVICT:
                self._left_s[told.model] = told.at_s
                if told.reason.endswith("its keep-alive time is over"):
                    self._late(leave_s, told.at_s)
            case PoolChoice.DRAIN:
                self._late(told.at_s - told.features["late_s"], told.at_s)

    def _late(self, due_s: float | None, now: float) -> None:
        if due_s is not None and due_s < now:
            self.late.append((due_s, now - due_s))

    @property
    def begun_s(self) -> float:
        """When the origin began: it loads what fits."""
        return next(one.at_s for one in self.records if isinstance(one, PoolDecision))

    @property
    def requests(self) -> list[ArrivalRecord]:
        return [one for one in self.records if isinstance(one, ArrivalRecord)]

    def mean_load_s(self) -> float:
        return statistics.fmean(took_s for some in self.loads.values() for _, took_s in some)


async def play(policy: str, trace: ArrivalTrace, day_s: float, folder: Path) -> PlayedDay:
    """Return the day, through an origin in this process."""
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
    fork_server = fork_server_of(config, [plan.config for plan in plans])
    slots = [
        slot
        for number, plan in enumerate(plans)
        for slot in slots_of(plan.name, plan.config, fork_server, number)
    ]
    parts = [slot.keep() for slot in slots] + ([fork_server.keep()] if fork_server else [])
    running: list[asyncio.Task[Any]] = [asyncio.create_task(part) for part in parts]
    ledger_config = LedgerConfig()
    clock = KeptClock(folder)
    ledger = await open_ledger(ledger_config, folder, clock, None)
    objects = OriginObjects(ledger, StreamsConfig(), clock)
    try:
        began = time.monotonic()
        supervisor = Supervisor(
            config,
            ledger_config,
            ledger,
            objects,
            clock,
            slots=slots,
            readers={plan.name: PromptReader(plan.config.model) for plan in plans},
            plans=plans,
            clock_s=lambda: (time.monotonic() - began) * pace,
            pace=pace,
        )
        models = supervisor.models
        heard = PoolListener()
        models.live.tell = lambda record, of_shadow: heard.hear(record)
        serving = asyncio.create_task(supervisor.serve(tuple(running), Stop()))
        running.append(serving)
        return await _asked(policy, trace, supervisor.service, models, serving, heard, pace)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await objects.close()
        await ledger.close()


async def _asked(
    policy: str,
    trace: ArrivalTrace,
    service: Service,
    models: ModelHost,
    serving: asyncio.Task[None],
    heard: PoolListener,
    pace: float,
) -> PlayedDay:
    """Return every request at its time; then what the pool counted, beside the simulator."""
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
            await service.open(request)
        except Unavailable as error:
            print(f"{model} refused: {error}", file=sys.stderr)
            refused += 1

    async def until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            heard.told.clear()
            await heard.told.wait()

    def is_quiet() -> bool:
        return not any(model.requests for model in models.core.models)

    # The models are there for the first time before the day begins, so that all are known.
    await until(lambda: bool(heard.records))
    for model in trace.names:
        await ask(model)
    await until(is_quiet)
    begun_s = models.live.clock_s()
    asking: list[asyncio.Task[None]] = []
    for model, at_s in zip(trace.model.tolist(), trace.arrival_s.tolist(), strict=True):
        wait_s = (begun_s + at_s - models.live.clock_s()) / pace
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if serving.done():
            serving.result()
        asking.append(asyncio.create_task(ask(trace.names[model])))
    await asyncio.gather(*asking)
    await until(is_quiet)
    return _held_against(policy, trace, heard, PoolCounts.of(models.core), refused)


def _held_against(
    policy: str, trace: ArrivalTrace, heard: PoolListener, real: PoolCounts, refused: int
) -> PlayedDay:
    load_s = heard.mean_load_s()
    service = [one.ended_s - one.arrived_s - one.waited_s for one in heard.requests]
    service_s = statistics.fmean(service)
    # Like the real pool, it has loaded each model once before the day begins.
    count = len(trace.names)
    warm_up = np.arange(count) * 2.0 * load_s
    shift = float(warm_up[-1]) + 2.0 * load_s - float(trace.arrival_s[0])
    whole = ArrivalTrace.of(
        trace.names,
        np.concatenate([np.arange(count), trace.model]),
        np.concatenate([warm_up, trace.arrival_s + shift]),
        np.full(len(trace) + count, service_s),
    )
    planned = PoolReplay(_pool(policy, trace.names, load_s), lambda model: load_s)
    return PlayedDay(
        policy=policy,
        requests=len(trace),
        refused=refused,
        real=real.cold_starts,
        recorded=_simulated(recorded(policy, trace.names, heard), seen(trace.names, heard)),
        planned=_simulated(planned, whole),
        loads=real.loads,
        load_s=round(load_s, 1),
        service_s=round(service_s, 1),
    )


def seen(names: tuple[str, ...], heard: PoolListener) -> ArrivalTrace:
    """Return the requests as they came, and as long as each took once it was taken."""
    requests = heard.requests
    return ArrivalTrace.of(
        names,
        np.array([names.index(one.model) for one in requests]),
        np.array([one.arrived_s for one in requests]),
        np.array([one.ended_s - one.arrived_s - one.waited_s for one in requests]),
    )


class LatePool(ModelPool):
    """A simulated pool whose timer is as late as the real one's was."""

    late: Sequence[tuple[float, float]] = ()

    def wake_at(self) -> float:
        due_s = super().wake_at()
        return due_s + nearest(self.late, due_s, 0.0)


def nearest(took: Sequence[tuple[float, float]], at_s: float, otherwise_s: float) -> float:
    """Return the duration measured closest in time, under the same load of the machine."""
    return min(took, key=lambda one: abs(one[0] - at_s), default=(at_s, otherwise_s))[1]


def recorded(policy: str, names: tuple[str, ...], heard: PoolListener) -> PoolReplay:
    pool = _pool(policy, names, first_load_s(OriginConfig()))
    pool.late = heard.late
    replay = PoolReplay(
        pool,
        lambda model: nearest(heard.loads[model], replay.now, LOAD_S),
        lambda model: nearest(heard.leaves[model], replay.now, LEAVE_S),
    )
    replay.now = heard.begun_s
    return replay


def _simulated(replay: PoolReplay, trace: ArrivalTrace) -> int:
    """Cold starts, of an origin that begins at the replay's time."""
    replay.start(replay.now, fill=True)
    play_trace(replay, trace)
    return PoolCounts.of(replay.pool).cold_starts


def _pool(policy: str, names: tuple[str, ...], load_s: float) -> LatePool:
    prices = WarmPrices(COLD_COST_GPU_S)
    members = [PoolMember(name, SIZE_MIB, load_s=load_s) for name in names]
    cost = prices.cold_cost_gpu_s
    return LatePool(members, named_policy(policy, prices), {"cpu": CAP_MIB}, cold_cost_gpu_s=cost)


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
    print_line(
        {
            "sim_vs_real": round(max(one.off for one in told), 4),
            "planned_vs_real": round(max(one.planned_off for one in told), 4),
            "days": [asdict(one) for one in told],
        }
    )


if __name__ == "__main__":
    main()
