"""`tailrace bench`: measures latencies of a server under load, as its clients see them.

As in tailrace/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tailrace.commands.options import (
    ChartOption,
    JsonOption,
    api_key,
    check_url,
    command_group,
    extra,
    progress,
)
from tailrace.ledger.errors import CallerError

bench_app = command_group("Measure a server under load.")
APIS = ("native", "chat", "completions")
EXIT_SLOWER = 3
FORMAT = 1
"""Version of the format of a result's JSON; only results of the same version can be compared."""


@bench_app.callback()
def bench() -> None:
    """Keep `serve` a subcommand: without a callback, typer would drop a single command's name."""


@bench_app.command()
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of the server, without /v1.")],
    api: Annotated[
        str,
        typer.Option(
            help="native (Tailrace's own API; allows --cuts), or chat or completions (OpenAI's)."
        ),
    ] = "native",
    model: Annotated[str, typer.Option(help="Name of the model at the server.")] = "demo",
    rate: Annotated[
        float, typer.Option(min=0.01, help="Requests per second, at random times (Poisson).")
    ] = 4.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration in seconds.")] = 30.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Send requests at the times in this file from `tailrace warm trace import`.",
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Play the trace this many times faster.")
    ] = 1.0,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words in each prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of each answer.")] = 64,
    cuts: Annotated[
        int,
        typer.Option(min=0, help="Cut the connection this many times in each answer; native only."),
    ] = 0,
    goal_ttft: Annotated[
        float,
        typer.Option(help="A good request's first token arrives within this time, in ms."),
    ] = 1000.0,
    goal_itl: Annotated[
        float,
        typer.Option(help="A good request's median gap between tokens is at most this, in ms."),
    ] = 100.0,
    timeout: Annotated[
        float, typer.Option(min=1, help="Timeout of a request, in seconds.")
    ] = 120.0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")
    ] = None,
    chart: ChartOption = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.json",
            help="Compare with an earlier result. Exit status 3 if something is slower.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Tolerated slowdown, as a fraction: 0.1 is 10 %.")
    ] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Measure latencies and throughput of a server under load.

    Requests are sent at a fixed rate, or at the times of a trace. The API key in the environment
    variable TAILRACE_API_KEY is sent if it is set.
    """
    from tailrace.load.drive import Demand, drive, poisson
    from tailrace.load.samples import Goal, compare, report

    if api not in APIS:
        hint = "use one of " + ", ".join(APIS)
        raise CallerError(f"unknown API {api!r}", field="--api", hint=hint)
    check_url(url, "URL")
    if cuts and api != "native":
        raise CallerError("only native streams can be cut and resumed", field="--cuts")
    old = None if against is None else _read(against)
    due = poisson(rate, seconds, seed) if trace is None else _times(trace, speed, seconds)
    if not due:
        raise CallerError("no request is due within this time", field="--seconds")
    load = Demand(url, api, model, prompt_words, max_tokens, cuts, seed, timeout)  # type: ignore[arg-type]
    with progress(f"of {len(due)} requests") as show:
        samples = asyncio.run(drive(load, due, show, api_key()))
    asked = asdict(load) | {
        "rate_per_s": rate if trace is None else None,
        "trace": None if trace is None else trace.name,
    }
    run: dict[str, Any] = {
        "format": FORMAT,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": asked,
        **report(samples, Goal(goal_ttft, goal_itl)),
    }
    verdicts = None if old is None else compare(old, run, tolerance)
    if out is not None:
        out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    if chart is not None:
        with extra("plots"):
            from tailrace.load.chart import draw
        draw(chart, {"this run": run} if old is None else {"before": old, "now": run})
    if as_json:
        told = {name: value for name, value in run.items() if name != "requests"}
        shown = None if verdicts is None else [verdict._asdict() for verdict in verdicts]
        typer.echo(json.dumps(told | {"verdicts": shown}))
    else:
        _print_run(run)
        for verdict in verdicts or ():
            _print_verdict(verdict)
    if any(verdict.word == "slower" for verdict in verdicts or ()):
        raise typer.Exit(EXIT_SLOWER)
    if run["requests_failed"] == run["requests_sent"]:
        raise typer.Exit(1)


def _times(path: Path, speed: float, seconds: float) -> list[float]:
    with extra("torch"):
        from tailrace.origin.pool.policies.trace import import_trace
    arrivals = import_trace("tailrace", path).arrival_s
    first = float(arrivals[0]) if len(arrivals) else 0.0
    times = ((float(at) - first) / speed for at in arrivals)
    return [at for at in times if at < seconds]


def _read(path: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = run["format"] == FORMAT and isinstance(run["requests"], list)
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{path} is not a result of bench serve --out: {error}"
        raise CallerError(message, field="--against") from None
    if not known:
        message = f"{path} is a result of another version of Tailrace, in another format"
        raise CallerError(message, field="--against")
    return run


def _print_run(run: dict[str, Any]) -> None:
    sent, failed = run["requests_sent"], run["requests_failed"]
    typer.echo(f"{sent} requests in {run['seconds']:.1f} s, {failed} failed {run['errors'] or ''}")
    typer.echo(f"{'ms':10} {'p50':>9} {'p95':>9} {'p99':>9} {'mean':>9} {'max':>9}")
    for name in ("ttft", "itl", "jitter", "resume"):
        found = run[f"{name}_ms"]
        if found is not None:
            cells = (f"{found[key]:9.2f}" for key in ("p50", "p95", "p99", "mean", "max"))
            typer.echo(f"{name:10} {' '.join(cells)}")
    goal = run["goal"]
    typer.echo(
        f"{run['tokens_per_s']:.1f} tokens/s; {run['good_share']:.1%} of the requests, "
        f"{run['goodput_per_s']:.2f} a second, with a first token within {goal['first_ms']:g} ms "
        f"and a median gap within {goal['gap_ms']:g} ms"
    )


def _print_verdict(verdict: Any) -> None:
    if verdict.ratio is None or verdict.low is None:
        typer.echo(f"{verdict.figure:10} {verdict.word:8} {verdict.old} -> {verdict.new}")
        return
    typer.echo(
        f"{verdict.figure:10} {verdict.word:8} {verdict.old:.2f} -> {verdict.new:.2f}, "
        f"x{verdict.ratio:.2f} ({verdict.low:.2f} to {verdict.high:.2f})"
    )
