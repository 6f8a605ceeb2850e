"""A look as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

Document = dict[str, Any]
ID_CHARS = 12


def shown(url: str, told: Document) -> Group:
    return Group(Text(_headline(url, told), style="bold"), _workers(told), _streams(told))


def _headline(url: str, told: Document) -> str:
    states = ", ".join(f"{count} {state}" for state, count in told["states"].items() if count)
    lines = [f"{url}   {told['live']} streams" + (f": {states}" if states else "")]
    edge = told["edge"]
    if edge is None:
        lines.append("the edge shows no metrics here (edge.metrics names a place for them)")
    else:
        down = [origin for origin, is_up in edge["origins"].items() if not is_up]
        lines.append(
            f"{_number(edge['connections'])} connections   "
            f"{_number(edge['requests_per_s'])} requests/s   "
            f"{_number(edge['frames_per_s'])} frames/s   "
            f"{_number(edge['errors_per_s'])} errors/s   "
            f"{_number(edge['streams'].get('stalled'))} stalled   "
            f"link to socket p99 <= {_number(edge['relay_p99_ms'])} ms"
            + (f"   DOWN: {', '.join(down)}" if down else "")
        )
    return "\n".join(lines)


def _workers(told: Document) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("origin", "worker", "state", "model", "device"):
        table.add_column(name)
    for name in ("run", "wait", "tok/s", "step ms", "KV", "deaths"):
        table.add_column(name, justify="right")
    for row in told["pool"]:
        if "error" in row:
            table.add_row(row["origin"], "", row["error"])
            continue
        used = row.get("kv_cache_used")
        table.add_row(
            row["origin"],
            str(row["worker"]),
            row["state"],
            row["model"] or "-",
            row["device"] or "-",
            _number(row.get("running")),
            _number(row.get("waiting")),
            _number(row.get("tokens_per_s")),
            _number(row.get("step_ms")),
            "-" if used is None else f"{used:.0%}",
            str(row["deaths"]),
        )
    return table


def _streams(told: Document) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("stream", "state", "model", "class", "tenant"):
        table.add_column(name)
    for name in ("tokens", "tok/s", "readers", "resumes", "takeovers"):
        table.add_column(name, justify="right")
    for row in told["streams"]:
        table.add_row(
            row["id"][:ID_CHARS],
            row["state"],
            row["model"],
            row["priority"],
            row["tenant"],
            str(row["tokens"]),
            _number(row["tokens_per_s"]),
            *(str(row[key]) for key in ("readers", "resumes", "takeovers")),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value % 1 else f"{value:,.0f}"
