"""Simulates policies of the warm pool over a trace, in a process of its own.

`python -m tailrace.origin.admin.simulation` reads a request from standard input and answers on
standard output, as JSON. The simulation has a process of its own, because it computes for seconds,
in which the origin must continue to send tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from tailrace.ledger.errors import CallerError, Overloaded, TailraceError, Unavailable
from tailrace.ledger.process.lifecycle import import_environment
from tailrace.origin.admin.query import Document, parse_body

HISTORY = "history"
SIMULATION_TIMEOUT_S = 60.0
"""Timeout of a simulation in seconds."""
MAX_GAPS = 200_000
"""Maximum number of idle gaps (times between two requests for a model) in a simulated trace. Some
policies run Python code for each gap, so a longer trace would take too long."""
MAX_POLICIES = 12
SWEEP_TTLS = 40
SHORTEST_TTL_S, LONGEST_TTL_S = 1.0, 86_400.0
NICENESS = 10
TOLD = (
    *("policy", "cold_starts", "cold_rate", "wasted_gpu_s", "added_latency_s", "cost_gpu_s"),
    "over_optimum",
)
TOLD_OF_TTL = ("ttl_s", "cold_starts", "wasted_gpu_s")

if TYPE_CHECKING:
    from tailrace.origin.pool.policies.trace import ArrivalTrace

PolicyName = Annotated[str, Field(max_length=40)]


class SimulationRequest(BaseModel):
    """A request for a simulation.

    `trace` is `history`, for the requests that this origin has recorded, or the name of a generated
    trace. If `csv` is given, it is the trace instead, with columns model,arrival_s,duration_s.
    `days` is the length of a generated trace, or the number of past days of the history to use.
    """

    model_config = ConfigDict(extra="forbid")

    trace: str = Field("mixed", max_length=40)
    csv: str | None = None
    days: float = Field(2.0, gt=0, le=30)
    seed: int = Field(1, ge=0)
    cold_cost_gpu_s: float = Field(60.0, gt=0, le=1e6)
    load_s: float | None = Field(None, gt=0, le=1e6)
    policies: tuple[PolicyName, ...] = Field(
        ("ttl-60", "ttl-300", "ttl-3600", "break-even", "hybrid-histogram", "adaptive-ttl"),
        max_length=MAX_POLICIES,
    )


async def simulate(body: bytes, turn: asyncio.Lock, history: str | None = None) -> Document:
    """Return the cost of each requested policy, and of fixed TTLs. Raises CallerError.

    `history` is the file or database URL of this origin's history, if it has one. A simulation
    occupies a processor core, so only one may run at a time. It holds the lock `turn`; a request
    that finds the lock held is refused.
    """
    request = parse_body(SimulationRequest, body)
    if request.trace == HISTORY and request.csv is None and history is None:
        raise CallerError(
            "this origin has no history", field="trace", hint="set ledger.history_days above 0"
        )
    told = json.dumps({"request": request.model_dump(), "history": history})
    if turn.locked():
        raise Overloaded("another simulation is under way", min_retry_ms=2_000)
    async with turn:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tailrace.origin.admin.simulation"),
            env={**import_environment(), "OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(SIMULATION_TIMEOUT_S):
                said, _ = await process.communicate(told.encode())
        except TimeoutError:
            raise Unavailable(
                f"the simulation took longer than {SIMULATION_TIMEOUT_S:g} s"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode != 0:
        raise Unavailable("the simulation has failed; the origin's log has the details")
    document: Document = json.loads(said)
    if "refused" in document:
        raise CallerError(**document["refused"])
    return document


# ---- in the process of its own ----


async def recorded(history: str, days: float) -> tuple[ArrivalTrace, float | None]:
    """Return the requests of the last `days` in a history, and the typical load time in seconds."""
    import time

    from tailrace.origin.pool.history import queries
    from tailrace.origin.pool.history.recorder import reading
    from tailrace.origin.pool.history.schema import DAY_MS

    store = await reading(history)
    try:
        since_ms = int(time.time() * 1e3 - days * DAY_MS)
        return await queries.arrivals(store, since_ms), await queries.typical_load_s(store)
    finally:
        await store.close()


def simulated(request: SimulationRequest, history: str | None) -> Document:
    import numpy as np

    from tailrace.origin.pool.policies.named_policy import named_policy
    from tailrace.origin.pool.policies.policies import LOAD_S, WarmPrices
    from tailrace.origin.pool.policies.simulate import compare, keep_alive_optimum, sweep_ttls
    from tailrace.origin.pool.policies.trace import generated, idle_gaps, import_trace

    measured_s, own = None, None
    if history is not None and request.trace == HISTORY and request.csv is None:
        own, measured_s = asyncio.run(recorded(history, request.days))
    prices = WarmPrices(request.cold_cost_gpu_s, request.load_s or measured_s or LOAD_S)
    policies = [named_policy(name, prices, "policies") for name in request.policies]
    if any(policy.name == "greedy-dual" for policy in policies):
        raise CallerError(
            "greedy-dual cannot be simulated here, because it needs a memory cap", field="policies"
        )
    if own is not None:
        trace = own
    elif request.csv is None:
        trace = generated(request.trace, request.seed, request.days)
    else:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".csv") as file:
            file.write(request.csv)
            file.flush()
            try:
                trace = import_trace("tailrace", Path(file.name))
            except CallerError as error:
                where = (error.field or "").replace(file.name, "csv")
                raise CallerError(error.message, field=where, hint=error.hint) from None
    gaps = idle_gaps(trace)
    if len(gaps) > MAX_GAPS:
        raise CallerError(
            f"the trace has {len(gaps)} idle gaps, the limit is {MAX_GAPS}",
            field="trace",
            hint="the command tailrace warm simulate has no limit",
        )
    outcomes, _ = compare(trace, policies, prices)
    ttls = np.geomspace(SHORTEST_TTL_S, LONGEST_TTL_S, SWEEP_TTLS)
    sweep = sweep_ttls(gaps.length_s, sorted({*ttls.tolist(), request.cold_cost_gpu_s}), prices)
    rows = (sweep.ttl_s, sweep.cold_starts + gaps.first_starts, sweep.wasted_gpu_s)
    optimum = keep_alive_optimum(gaps, prices).cost_gpu_s
    return {
        "requests": len(trace),
        "models": list(trace.names),
        "gaps": len(gaps),
        "optimum_gpu_s": optimum,
        "load_s": prices.load_s,
        "policies": [{name: getattr(one, name) for name in TOLD} for one in outcomes],
        "ttls": [dict(zip(TOLD_OF_TTL, row, strict=True)) for row in np.stack(rows, 1).tolist()],
    }


def main() -> None:
    os.nice(NICENESS)
    try:
        told = json.load(sys.stdin)
        document = simulated(SimulationRequest.model_validate(told["request"]), told["history"])
    except TailraceError as error:
        refused = {"message": error.message, "field": error.field, "hint": error.hint}
        document = {"refused": refused}
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main()
