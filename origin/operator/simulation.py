"""Policies of the warm pool over a trace, in a process of its own: tokens do not wait for it.

`python -m origin.operator.simulation` reads a request from standard input and answers on standard
output, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ledger.errors import CallerError, Overloaded, TailraceError, Unavailable

PATIENCE_S = 60.0
"""What a simulation may take."""
MAX_GAPS = 200_000
"""Idle gaps of a trace that policies are asked about one by one."""
MAX_POLICIES = 12
SWEEP_TTLS = 40
SHORTEST_TTL_S, LONGEST_TTL_S = 1.0, 86_400.0
NICENESS = 10

Document = dict[str, Any]
PolicyName = Annotated[str, Field(max_length=40)]


class SimulationRequest(BaseModel):
    """`trace` names a generated one, or `csv` has one: model,arrival_s,duration_s."""

    model_config = ConfigDict(extra="forbid")

    trace: str = Field("mixed", max_length=40)
    csv: str | None = None
    days: float = Field(2.0, gt=0, le=30)
    seed: int = Field(1, ge=0)
    cold_cost_gpu_s: float = Field(60.0, gt=0, le=1e6)
    load_s: float = Field(10.0, gt=0, le=1e6)
    policies: tuple[PolicyName, ...] = Field(
        ("ttl-60", "ttl-300", "ttl-3600", "break-even", "hybrid-histogram", "adaptive-ttl"),
        max_length=MAX_POLICIES,
    )


async def simulate(body: bytes, turn: asyncio.Lock) -> Document:
    """What each policy would have cost, and every TTL; CallerError for what cannot be asked.

    It takes a core, so one has its `turn` and others are refused.
    """
    request = _parsed(body)
    if turn.locked():
        raise Overloaded("another simulation is under way", retry_after_ms=2000)
    async with turn:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "origin.operator.simulation"),
            env={**os.environ, "PYTHONPATH": _path(), "OMP_NUM_THREADS": "1"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                said, _ = await process.communicate(request.model_dump_json().encode())
        except TimeoutError:
            raise Unavailable(f"the simulation took over {PATIENCE_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode != 0:
        raise Unavailable("the simulation has failed; the origin's log says more")
    document: Document = json.loads(said)
    if "refused" in document:
        raise CallerError(**document["refused"])
    return document


def _parsed(body: bytes) -> SimulationRequest:
    try:
        return SimulationRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise CallerError(first["msg"], field=field) from None


def _path() -> str:
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


# ---- in the process of its own ----


def simulated(request: SimulationRequest) -> Document:
    import numpy as np

    from origin.warm.generated import generated
    from origin.warm.importers import import_trace
    from origin.warm.named import named_policy
    from origin.warm.optimum import keep_alive_optimum
    from origin.warm.prices import WarmPrices
    from origin.warm.simulate import compare, sweep_ttls
    from origin.warm.trace import idle_gaps

    prices = WarmPrices(request.cold_cost_gpu_s, request.load_s)
    policies = [named_policy(name, prices, "policies") for name in request.policies]
    if any(policy.name == "greedy-dual" for policy in policies):
        raise CallerError("greedy-dual needs a cap, which cannot be given here", field="policies")
    if request.csv is None:
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
            f"{len(gaps)} idle gaps",
            field="trace",
            hint=f"at most {MAX_GAPS} here; tailrace warm simulate takes any number",
        )
    outcomes, _ = compare(trace, policies, prices)
    ttls = np.geomspace(SHORTEST_TTL_S, LONGEST_TTL_S, SWEEP_TTLS)
    sweep = sweep_ttls(gaps.length_s, sorted({*ttls.tolist(), request.cold_cost_gpu_s}), prices)
    optimum = keep_alive_optimum(gaps, prices).cost_gpu_s
    return {
        "requests": len(trace),
        "models": list(trace.names),
        "gaps": len(gaps),
        "optimum_gpu_s": optimum,
        "policies": [
            {
                "policy": one.policy,
                "cold_starts": one.cold_starts,
                "cold_rate": one.cold_rate,
                "wasted_gpu_s": one.wasted_gpu_s,
                "added_latency_s": one.added_latency_s,
                "cost_gpu_s": one.cost_gpu_s,
                "over_optimum": one.over_optimum,
            }
            for one in outcomes
        ],
        "ttls": [
            {"ttl_s": ttl, "cold_starts": cold + gaps.first_starts, "wasted_gpu_s": wasted}
            for ttl, cold, wasted in zip(
                sweep.ttl_s.tolist(),
                sweep.cold_starts.tolist(),
                sweep.wasted_gpu_s.tolist(),
                strict=True,
            )
        ],
    }


def main() -> None:
    os.nice(NICENESS)
    try:
        document = simulated(_parsed(sys.stdin.buffer.read()))
    except TailraceError as error:
        refused = {"message": error.message, "field": error.field, "hint": error.hint}
        document = {"refused": refused}
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main()
