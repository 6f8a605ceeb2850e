"""`tailrace warm`: computes the cost of keep-alive policies from traces of requests.

As in tailrace/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.commands.options import (
    ChartOption,
    ConfigOption,
    JsonOption,
    command_group,
    extra,
    progress,
    tell,
    wide_console,
)
from tailrace.ledger.errors import CallerError

if TYPE_CHECKING:
    from tailrace.origin.pool.policies.trace import ArrivalTrace
    from tailrace.origin.workers.kernel_cache import KernelCache

warm_app = command_group("Inspect, simulate and change the warm pool of models.")
trace_app = command_group("Convert traces of arrivals.")
warm_app.add_typer(trace_app, name="trace")

TraceArgument = Annotated[
    str,
    typer.Argument(
        metavar="[TRACE]",
        help="Requests to simulate: a history file, a CSV of arrivals, a generated trace (bursty,"
        " diurnal, rare, mixed, clockwork), or `history`, the history file of the local origin.",
    ),
]
ColdCostOption = Annotated[float, typer.Option(help="Price of a cold start, in idle GPU-seconds.")]
LoadOption = Annotated[
    float | None,
    typer.Option(help="Seconds that a cold start takes. Default: the history's median, or 10."),
]
SeedOption = Annotated[int, typer.Option(help="Random seed.")]
DaysOption = Annotated[
    float,
    typer.Option(
        min=0.01, max=365, help="Days of the generated trace, or latest days of the history to use."
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Data folder of the origin.", file_okay=False),
]
POLICIES = (
    *("ttl-60", "ttl-300", "ttl-3600", "break-even", "hybrid-histogram", "hybrid-histogram-1s"),
    *("greedy-dual", "adaptive-ttl", "predictive-prewarm"),
)
HISTORY = "history"
SWEEP_TTLS = 20
SHORTEST_TTL_S = 1.0
LONGEST_TTL_S = 86_400.0


@warm_app.command()
def simulate(
    trace: TraceArgument = HISTORY,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"Policy: ttl-SECONDS, {', '.join(POLICIES[3:])}; repeatable."),
    ] = None,
    cold_cost: ColdCostOption = 60.0,
    load: LoadOption = None,
    memory: Annotated[
        float | None,
        typer.Option(help="Memory for all loaded models, in the unit of --size. Default: no cap."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL=SIZE", help="Size of a model; repeatable. Default: 1."),
    ] = None,
    seed: SeedOption = 0,
    days: DaysOption = 7.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare what keep-alive policies would have cost for the requests of a trace."""
    with extra("torch"):
        from tailrace.origin.pool.policies.named_policy import named_policy
        from tailrace.origin.pool.policies.policies import WarmPrices
        from tailrace.origin.pool.policies.simulate import compare

    arrivals, load = _trace(trace, seed, days, load, config)
    prices = WarmPrices(cold_cost, load)
    names = list(policy or (one for one in POLICIES if one != "greedy-dual" or memory is not None))
    chosen = [named_policy(one, prices, "--policy") for one in names]
    if memory is None and "greedy-dual" in names:
        raise CallerError("greedy-dual needs a cap on memory", field="--memory")
    sizes = _sizes(arrivals, size or [])
    with progress("gaps") as told:
        outcomes, method = compare(arrivals, chosen, prices, sizes=sizes, cap=memory, progress=told)
    if as_json:
        from dataclasses import asdict

        rows = [{**asdict(one), "cold_rate": one.cold_rate} for one in outcomes]
        typer.echo(json.dumps({"optimum": method, "policies": rows}))
        return
    show_table(
        f"cold start {cold_cost:g} GPU-s, load {load:g} s; optimum: {method}",
        ("policy", "cold %", "wasted GPU-s", "added latency s", "cost GPU-s", "cost/optimum"),
        [
            (
                one.policy,
                f"{one.cold_rate:.2%}",
                f"{one.wasted_gpu_s:,.0f}",
                f"{one.added_latency_s:,.0f}",
                f"{one.cost_gpu_s:,.0f}",
                f"{one.over_optimum:.3f}",
            )
            for one in outcomes
        ],
    )


@warm_app.command()
def frontier(
    trace: TraceArgument = HISTORY,
    cold_cost: ColdCostOption = 60.0,
    load: LoadOption = None,
    here: Annotated[
        float | None, typer.Option(help="Your current TTL in seconds, marked in the output.")
    ] = None,
    chart: ChartOption = None,
    seed: SeedOption = 0,
    days: DaysOption = 7.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show cold starts and cost for TTLs from 1 s to 1 day.

    The simulation has no memory cap.
    """
    with extra("torch"):
        import numpy as np

        from tailrace.origin.pool.policies.policies import WarmPrices
        from tailrace.origin.pool.policies.simulate import keep_alive_optimum, sweep_ttls
        from tailrace.origin.pool.policies.trace import idle_gaps

    if here is not None and not here >= 0:
        raise CallerError("must be zero or more seconds", field="--here")
    arrivals, load = _trace(trace, seed, days, load, config)
    prices = WarmPrices(cold_cost, load)
    gaps = idle_gaps(arrivals)
    if not len(gaps):
        raise CallerError(
            "has no idle time between two requests for one model, so no TTL makes a difference",
            field="trace",
        )
    ttls = np.geomspace(SHORTEST_TTL_S, LONGEST_TTL_S, SWEEP_TTLS).tolist()
    ttls = sorted({*ttls, cold_cost, *([] if here is None else [here])})
    sweep = sweep_ttls(gaps.length_s, ttls, prices)
    optimum = keep_alive_optimum(gaps, prices).cost_gpu_s
    columns = (sweep.ttl_s, sweep.cold_starts, sweep.wasted_gpu_s, sweep.cost_gpu_s / optimum)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    if chart is not None:
        with extra("plots"):
            from tailrace.origin.pool.policies.charts import draw_frontier
        draw_frontier(chart, gaps, sweep, optimum, here)
    if as_json:
        keys = ("ttl_s", "cold_starts", "wasted_gpu_s", "over_optimum")
        listed = [dict(zip(keys, row, strict=True)) for row in rows]
        typer.echo(json.dumps({"optimum_gpu_s": optimum, "gaps": len(gaps), "ttls": listed}))
        return
    shown = [
        (
            f"{ttl:,.0f}{mark}",
            f"{cold:,.0f}",
            f"{waste:,.0f}",
            f"{over:.3f}",
        )
        for ttl, cold, waste, over in rows
        for mark in [" ← here" if ttl == here else ""]
    ]
    title = f"{len(gaps):,} gaps; a cold start is worth {cold_cost:g} GPU-s"
    show_table(title, ("TTL s", "cold starts", "wasted GPU-s", "cost/optimum"), shown)


@trace_app.command("import")
def import_(
    form: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="Format of FILE: azure, burstgpt, mooncake or servegen."
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False)],
    to: Annotated[
        Path,
        typer.Option(
            "--to", metavar="FILE", help="Output file, a CSV of arrivals.", dir_okay=False
        ),
    ],
    prefill: Annotated[
        float, typer.Option(min=0.001, help="Prompt tokens per second, to compute durations.")
    ] = 5000.0,
    decode: Annotated[
        float, typer.Option(min=0.001, help="Generated tokens per second, to compute durations.")
    ] = 50.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Convert a public trace for `simulate` and `frontier`."""
    with extra("torch"):
        from tailrace.origin.pool.policies.trace import TokenSpeeds, import_trace, write_trace

    speeds = TokenSpeeds(prefill, decode)
    with progress("requests") as told:
        arrivals = import_trace(form, file, speeds=speeds, seed=seed, progress=told)
    try:
        write_trace(arrivals, to)
    except OSError as error:
        raise CallerError(f"cannot be written: {error.strerror}", field=str(to)) from error
    said = {"requests": len(arrivals), "models": list(arrivals.names), "file": str(to)}
    text = f"{len(arrivals)} requests to {len(arrivals.names)} models are in {to}"
    tell(said, text, as_json=as_json)


@warm_app.command("export-cache")
def export_cache(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False)],
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export compiled kernels for machines with the same GPU and software."""
    cache = _kernel_cache(config, data)
    with progress("files") as told:
        count = cache.export(file, told)
    size = file.stat().st_size
    said = {"kernels": count, "bytes": size, "fingerprint": cache.mark, "file": str(file)}
    tell(said, f"{count} compiled kernels are in {file}, {size:,} bytes", as_json=as_json)


@warm_app.command("import-cache")
def import_cache(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False)],
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import compiled kernels, so that an origin that starts later need not compile them.

    Kernels that were compiled for other software or another GPU are left out.
    """
    cache = _kernel_cache(config, data)
    with progress("files") as told:
        count = cache.take_in(file, told)
    text = f"{count} compiled kernels that were not there are in {cache.folder}"
    tell({"kernels": count, "fingerprint": cache.mark}, text, as_json=as_json)


def _kernel_cache(config: Path | None, data: Path | None) -> KernelCache:
    with extra("torch"):
        from tailrace.origin.config import OriginConfig
        from tailrace.origin.workers.kernel_cache import KernelCache

    return KernelCache(OriginConfig.load(config, data=data).data)


def _trace(
    name: str, seed: int, days: float, load_s: float | None, config: Path | None
) -> tuple[ArrivalTrace, float]:
    """Return the arrivals, and the duration of a cold start in seconds.

    The duration is `load_s` if given, else the median of the history, else a default.
    """
    from tailrace.origin.pool.history.sqlite_file import is_sqlite
    from tailrace.origin.pool.policies.policies import LOAD_S
    from tailrace.origin.pool.policies.trace import GENERATED, generated, import_trace

    default_s = LOAD_S if load_s is None else load_s
    if name in GENERATED:
        return generated(name, seed, days), default_s
    if name == HISTORY or is_sqlite(Path(name)):
        import asyncio

        from tailrace.origin.admin.simulation import recorded

        place = history_of(config) if name == HISTORY else name
        with progress("history") as told:
            told(0)
            arrivals, measured_s = asyncio.run(recorded(place, days))
        return arrivals, measured_s or default_s if load_s is None else load_s
    with progress("requests") as told:
        return import_trace("tailrace", Path(name), progress=told), default_s


def history_of(config: Path | None) -> str:
    """Return the path or database URL of the history, from the settings."""
    from tailrace.origin.config import LedgerConfig, OriginConfig
    from tailrace.origin.pool.history.recorder import history_place

    return history_place(LedgerConfig.load(config), OriginConfig.load(config).data)


def _sizes(arrivals: ArrivalTrace, given: list[str]) -> dict[str, float]:
    sizes = dict.fromkeys(arrivals.names, 1.0)
    seen: set[str] = set()
    for one in given:
        model, _, size = one.rpartition("=")
        if model not in sizes or model in seen:
            why = "is named twice" if model in seen else "is not in the trace"
            raise CallerError(f"{model!r} {why}", field="--size")
        seen.add(model)
        try:
            sizes[model] = float(size)
        except ValueError:
            raise CallerError(f"{size!r} is not a number", field="--size") from None
        if not 0 < sizes[model] < float("inf"):
            raise CallerError(f"{size} is not a finite number above zero", field="--size")
    return sizes


def show_table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    wide_console().print(table)
