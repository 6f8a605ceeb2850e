"""`tailrace warm status | explain | apply | prewarm | pin`: the pools of running origins.

As in tailrace/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tailrace.commands.options import (
    LOCAL,
    ChartOption,
    ConfigOption,
    JsonOption,
    check_url,
    extra,
    key_headers,
)
from tailrace.commands.warm import HISTORY, history_of, show_table
from tailrace.ledger.errors import NotFound

Document = dict[str, Any]
EdgeOption = Annotated[
    str,
    typer.Option(
        "--edge",
        metavar="URL",
        help="Edge URL. The API key in TAILRACE_API_KEY needs the right `admin`.",
    ),
]
OriginOption = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Address of one origin. Default: all.")
]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL")]
TIMEOUT_S = 15.0


def status(
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days of history to show.")] = 1,
    chart: ChartOption = None,
    edge: EdgeOption = LOCAL,
    origin: OriginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show each model: tier, requests, cold starts, policy.

    --chart draws which worker had which model loaded, and when.
    """
    query = {"days": str(days)} | _of(origin)
    answers = _ask(edge, "warm", query)
    if chart is not None:
        _draw_residence(chart, _ask(edge, "warm/residence", query))
    if as_json:
        typer.echo(json.dumps({"origins": answers}))
        return
    for one in _answered(answers):
        title = f"{one['origin']}: {_kept(one)}"
        rows = [_status_row(model) for model in one["models"]]
        columns = ("model", "tier", "requests 1 h", f"{days} d", "cold starts", "load s", "policy")
        show_table(title, (*columns, "kept until"), rows)
        if one["shadow"]:
            typer.echo(f"shadow: {_features(one['shadow'])}")


def explain(
    model: ModelArgument,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Decisions and starts to show.")] = 5,
    chart: ChartOption = None,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Read this history file instead of asking an edge. `history` stands for the"
            " history file of the local origin.",
        ),
    ] = None,
    edge: EdgeOption = LOCAL,
    origin: OriginOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain the last decisions and starts of a model.

    --chart draws the stages of the last start, and the shortest time that each stage took.
    """
    if history is None:
        answers = _ask(edge, "warm/explain", {"model": model, "limit": str(limit)} | _of(origin))
    else:
        answers = [_from_history(history, config, model, limit)]
    if chart is not None:
        _draw_start(chart, [load for one in _answered(answers) for load in one["loads"]])
    if as_json:
        typer.echo(json.dumps({"origins": answers}))
        return
    for one in _answered(answers):
        _show_explained(one)


def apply(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="Name of the policy, as in `warm simulate`.")
    ],
    shadow: Annotated[
        bool,
        typer.Option(
            "--shadow",
            help="Only record what this policy would decide; `warm status` shows the result.",
        ),
    ] = False,
    edge: EdgeOption = LOCAL,
    origin: OriginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Use another policy until the origin restarts."""
    with extra("torch"):
        from tailrace.origin.pool.policies.named_policy import named_policy
        from tailrace.origin.pool.policies.policies import WarmPrices

    named_policy(policy, WarmPrices(), "POLICY")  # raises for an unknown name
    told = _change(edge, "apply", {"policy": policy, "shadow": shadow}, origin, as_json)
    for one in told:
        typer.echo(
            f"{one['origin']}: {policy} is the shadow policy now; it decides nothing"
            if shadow
            else f"{one['origin']}: {policy} decides now; a restart returns to the settings"
        )


def prewarm(
    model: ModelArgument,
    edge: EdgeOption = LOCAL,
    origin: OriginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a model now, before a request needs it."""
    for one in _change(edge, "prewarm", {"model": model}, origin, as_json):
        typer.echo(f"{one['origin']}: {model} is loaded, or will be as soon as there is room")


def pin(
    model: ModelArgument,
    off: Annotated[
        bool,
        typer.Option("--off", help="Unpin the model: its policy decides again."),
    ] = False,
    edge: EdgeOption = LOCAL,
    origin: OriginOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a model loaded, also after a restart of the origin, until `--off`."""
    for one in _change(edge, "pin", {"model": model, "pinned": not off}, origin, as_json):
        typer.echo(f"{one['origin']}: {model} is {'left to its policy' if off else 'pinned'}")


LIVE_COMMANDS = (status, explain, apply, prewarm, pin)


# ---- asking ----


def _ask(
    edge: str, asked: str, query: dict[str, str], body: Document | None = None
) -> list[Document]:
    """Return the answer of each origin, which may be an error.

    Raises the error of the edge, if the edge itself refuses the request or if all origins have
    failed.
    """
    check_url(edge, "--edge")
    import httpx

    from tailrace.client import http_error, unreachable

    url = f"{edge.rstrip('/')}/v1/admin/{asked}"
    try:
        with httpx.Client(headers=key_headers(), timeout=TIMEOUT_S) as http:
            method = "GET" if body is None else "POST"
            answer = http.request(method, url, params=query, json=body)
    except httpx.TransportError as error:
        raise unreachable(edge, error) from None
    if answer.status_code != 200:
        raise http_error(answer.status_code, answer.headers, answer.content)
    origins: list[Document] = answer.json()["origins"]
    return origins


def _change(
    edge: str, act: str, body: Document, origin: str | None, as_json: bool
) -> list[Document]:
    """Send a change to the origins; return the answers of the origins that made the change.

    With `as_json`, print all answers and return none of them.
    """
    answers = _ask(edge, f"warm/{act}", _of(origin), body)
    if as_json:
        typer.echo(json.dumps({"origins": answers}))
        return []
    return list(_answered(answers))


def _answered(answers: list[Document]) -> Iterator[Document]:
    """Yield the answers without an error, and print the errors of the other origins."""
    for one in answers:
        if "error" in one:
            typer.echo(f"{one['origin']}: {one['error']['message']}", err=True)
        else:
            yield one


def _of(origin: str | None) -> dict[str, str]:
    return {} if origin is None else {"origin": origin}


def _from_history(history: str, config: Path | None, model: str, limit: int) -> Document:
    import asyncio

    with extra("torch"):
        from tailrace.origin.admin.warm import explained
        from tailrace.origin.pool.history.recorder import reading

    async def look() -> Document:
        store = await reading(history_of(config) if history == HISTORY else history)
        try:
            return await explained(store, model, round(time.time() * 1e3), limit)
        finally:
            await store.close()

    return {"origin": history} | asyncio.run(look())


# ---- showing ----


def _kept(one: Document) -> str:
    """Return a line about an origin's history: entries written and lost, or why there is none."""
    if one["problem"]:
        return f"no history: {one['problem']}"
    lost = f", {one['dropped']:,} lost" if one["dropped"] else ""
    return f"{one['written']:,} entries written since it started{lost}"


def _status_row(model: Document) -> tuple[str, ...]:
    asked, cold = model["arrivals"], model["cold"]
    policy = "pinned" if model.get("pinned") else model.get("policy", "–")
    until = model.get("keep_until_ms")
    return (
        model["model"],
        model.get("tier", "–"),
        f"{model['arrivals_hour']:,}",
        f"{asked:,}",
        f"{cold:,} ({cold / asked:.1%})" if asked else "–",
        "–" if model["load_s"] is None else f"{model['load_s']:.2f}",
        policy,
        "–" if until is None else _clock(until),
    )


def _show_explained(one: Document) -> None:
    now, lately = one.get("now"), one["lately"]
    if now:
        pinned = "pinned" if now["pinned"] else f"{now['policy']} decides"
        typer.echo(f"{one['model']} at {one['origin']} is {now['tier']}; {pinned}")
    if lately:
        first_ms = lately["first_ms"]
        typer.echo(
            f"{lately['arrivals']:,} requests in a day, {lately['cold']:,} of them cold starts"
            + ("" if first_ms is None else f"; {first_ms:,} ms until the first frame on average")
        )
    rows = [
        (
            _clock(told["at_ms"]),
            told["policy"] + (" (shadow)" if told["shadow"] else ""),
            told["action"],
            told["reason"],
            _features(told["features"]),
            "–" if told["until_ms"] is None else _clock(told["until_ms"]),
        )
        for told in one["decisions"]
    ]
    columns = ("at", "policy", "decision", "reason", "features", "until")
    if rows:
        show_table("decisions, the latest first", columns, rows)
    else:
        typer.echo("no policy has decided about it")
    for load in one["loads"]:
        stages = [
            (stage["stage"], f"{stage['ms']:,.1f}", f"{stage['bytes']:,}" if stage["bytes"] else "")
            for stage in load["stages"]
        ]
        title = (
            f"start of worker {load['worker']} at {_clock(load['asked_ms'])}: {load['ms']:,.0f} ms"
            f" by {load['path']}, {load['attributed']:.1%} of it in a stage"
        )
        show_table(title, ("stage", "ms", "bytes"), stages)


def _features(features: Document) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in features.items()
    )


def _clock(at_ms: int) -> str:
    return time.strftime("%d %b %H:%M:%S", time.localtime(at_ms / 1e3))


def _draw_residence(chart: Path, answers: Sequence[Document]) -> None:
    with extra("plots"):
        from tailrace.origin.pool.policies.charts import draw_residency

    found = [(one["now_ms"], lane) for one in _answered(list(answers)) for lane in one["residence"]]
    if not found:
        raise NotFound("the history has no record of loaded models", field="--chart")
    zero_ms = min(lane["from_ms"] for _, lane in found)
    lanes = [
        (
            _lane_name(lane),
            str(lane["tier"]),
            (lane["from_ms"] - zero_ms) / 1e3,
            ((lane["until_ms"] or now_ms) - zero_ms) / 1e3,
        )
        for now_ms, lane in found
    ]
    draw_residency(chart, lanes)


def _lane_name(lane: Document) -> str:
    of = "" if lane["worker"] < 0 else f" · worker {lane['worker']}"
    return f"{lane['model']} · {lane['origin']}{of}"


def _draw_start(chart: Path, loads: Sequence[Document]) -> None:
    """Draw the stages of the last start, each with its shortest time in all listed starts."""
    with extra("plots"):
        from tailrace.origin.pool.policies.charts import draw_waterfall

    if not loads:
        raise NotFound("no start of this model is recorded", field="--chart")
    floors: dict[str, float] = {}
    for load in loads:
        for stage in load["stages"]:
            floors[stage["stage"]] = min(floors.get(stage["stage"], stage["ms"]), stage["ms"])
    last = loads[0]["stages"]
    draw_waterfall(chart, [(one["stage"], one["ms"], floors[one["stage"]]) for one in last])
