"""`tailrace top`: reads an edge and its origins, and computes rates between two readings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tailrace.client import http_error

Document = dict[str, Any]
Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Maps the name of each metric to its samples: labels and value."""
TIMEOUT_S = 10.0
RELAY = "tailrace_edge_relay_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Look:
    """One reading of an edge. `metrics` is None if the edge does not serve /metrics to us."""

    at_s: float
    streams: Document
    pool: Document
    metrics: Samples | None

    def total(self, name: str) -> float | None:
        if self.metrics is None:
            return None
        return sum(value for _, value in self.metrics.get(name, ()))


async def look(http: httpx.AsyncClient, rows: int) -> Look:
    """Read streams, pool and metrics of the edge. Raises TailraceError if it refuses a request."""
    asked = {"sort": "tokens", "order": "desc", "limit": str(rows)}
    streams, pool, metrics = await asyncio.gather(
        http.get("/v1/admin/streams", params=asked),
        http.get("/v1/admin/pool"),
        http.get("/metrics"),
    )
    for answer in (streams, pool):
        if answer.status_code != 200:
            raise http_error(answer.status_code, answer.headers, answer.content)
    at_s = asyncio.get_running_loop().time()
    found = samples(metrics.text) if metrics.status_code == 200 else None
    return Look(at_s, streams.json(), pool.json(), found)


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def document(before: Look, now: Look) -> Document:
    """Return everything to show, in the form of `--json`.

    Rates are computed over the time between the two readings.
    """
    seconds = max(1e-6, now.at_s - before.at_s)
    tokens = {row["id"]: row["tokens"] for row in before.streams["streams"]}
    return {
        "edge": None if now.metrics is None else _edge(before, now, seconds),
        "live": now.streams["live"],
        "paused": now.streams["paused"],
        "states": now.streams["states"],
        "streams": [
            {**row, "tokens_per_s": _rate(tokens.get(row["id"]), row["tokens"], seconds)}
            for row in now.streams["streams"]
        ],
        "pool": _pool(before.pool, now.pool, seconds),
        "slo": _slo(before.pool, now.pool),
    }


def _edge(before: Look, now: Look, seconds: float) -> Document:
    def rate(name: str) -> float | None:
        return _rate(before.total(name), now.total(name), seconds)

    found = now.metrics or {}
    open_streams: dict[str, float] = {}
    for labels, count in found.get("tailrace_edge_streams", ()):
        open_streams[labels["state"]] = open_streams.get(labels["state"], 0) + count
    return {
        "connections": now.total("tailrace_edge_connections"),
        "streams": open_streams,
        "requests_per_s": rate("tailrace_edge_requests_total"),
        "errors_per_s": rate("tailrace_edge_errors_total"),
        "frames_per_s": rate("tailrace_edge_frames_total"),
        "resumes": now.total("tailrace_edge_resumes_total"),
        "stalls": now.total("tailrace_edge_stalls_total"),
        "relay_p99_ms": _quantile_ms(before, now, 0.99),
        "origins": {
            labels["origin"]: bool(up) for labels, up in found.get("tailrace_edge_origin_up", ())
        },
    }


def _pool(before: Document, now: Document, seconds: float) -> list[Document]:
    was = {
        (origin["origin"], worker["worker"], worker["pid"]): worker["load"]
        for origin in before["origins"]
        for worker in origin.get("workers", ())
    }
    told = []
    for origin in now["origins"]:
        for worker in origin.get("workers", ()):
            load = worker["load"]
            earlier = was.get((origin["origin"], worker["worker"], worker["pid"]))
            row = {key: worker[key] for key in ("worker", "state", "model", "device", "streams")}
            row |= {"origin": origin["origin"], "deaths": worker["deaths"]}
            row["gpu"] = worker.get("gpu")  # older origins do not send this field
            if load is not None:
                pages = load["pages"]
                row["running"] = sum(load["running"].values())
                row["waiting"] = sum(load["waiting"].values())
                row["step_ms"] = load["step_us"] / 1000
                row["kv_cache_used"] = 1 - load["pages_free"] / pages if pages else None
                row["tokens_per_s"] = _rate(earlier and earlier["tokens"], load["tokens"], seconds)
            told.append(row)
        if "error" in origin:
            told.append({"origin": origin["origin"], "error": origin["error"]["message"]})
    return told


def _slo(before: Document, now: Document) -> list[Document]:
    """Return how many streams missed their promised time, by priority class, model and promise.

    The promise is the objective for the time to the first token. `streams` and `missed` are sums
    over the origins, each counted since the origin's start. `lately` has both numbers for the time
    between the two readings. The rows with the largest share of missed promises come first.
    """
    was = _slo_sums(before)
    rows: list[Document] = []
    for (priority, model, promised_ms), (streams, missed) in _slo_sums(now).items():
        earlier = was.get((priority, model, promised_ms), (0, 0))
        rows.append(
            {
                "priority": priority,
                "model": model,
                "promised_ms": promised_ms,
                "streams": streams,
                "missed": missed,
                "missed_ratio": round(missed / streams, 4) if streams else None,
                "lately": {
                    "streams": max(0, streams - earlier[0]),
                    "missed": max(0, missed - earlier[1]),
                },
            }
        )
    return sorted(rows, key=lambda row: row["missed_ratio"] or 0.0, reverse=True)


def _slo_sums(pool: Document) -> dict[tuple[str, str, int], tuple[int, int]]:
    """Return the numbers of streams and of missed promises by class, model and promised time."""
    sums: dict[tuple[str, str, int], tuple[int, int]] = {}
    for origin in pool["origins"]:
        for row in origin.get("slo", ()):  # older origins do not send this field
            key = row["priority"], row["model"], row["promised_ms"]
            streams, missed = sums.get(key, (0, 0))
            sums[key] = streams + row["streams"], missed + row["missed"]
    return sums


def _rate(before: float | None, now: float | None, seconds: float) -> float | None:
    """Return a counter's rate per second; None without an earlier value or after a reset."""
    if before is None or now is None or now < before:
        return None
    return round((now - before) / seconds, 2)


def _quantile_ms(before: Look, now: Look, quantile: float) -> float | None:
    """Return the upper bound in ms of the histogram bucket with the quantile; None if unknown."""
    was = dict(_buckets(before))
    grown = [(bound, value - was.get(bound, 0.0)) for bound, value in _buckets(now)]
    total = grown[-1][1] if grown else 0.0
    for bound, count in grown:  # each bucket's count includes those of all smaller buckets
        if total and count >= quantile * total:
            return round(bound * 1000, 3) if bound != float("inf") else None
    return None


def _buckets(one: Look) -> list[tuple[float, float]]:
    found = (one.metrics or {}).get(RELAY, ())
    return sorted((float(labels["le"]), value) for labels, value in found)


ID_CHARS = 12
LEAST_S = 0.001
"""Minimum of the seconds that a stream spent in some place to be shown there."""
GIB = 1 << 30


def shown(url: str, told: Document) -> Group:
    promises = [_promises(told)] if told["slo"] else []
    headline = Text(_headline(url, told), style="bold")
    return Group(headline, _workers(told), *promises, _streams(told))


def _headline(url: str, told: Document) -> str:
    states = ", ".join(f"{count} {state}" for state, count in told["states"].items() if count)
    lines = [f"{url}   {told['live']} streams" + (f": {states}" if states else "")]
    edge = told["edge"]
    if edge is None:
        lines.append("the edge serves no metrics at this address (see the setting edge.metrics)")
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


def _table(words: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(*words, box=None, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _workers(told: Document) -> Table:
    words = ("origin", "worker", "state", "model", "device")
    table = _table(words, ("GPU", "util", "GiB", "run", "wait", "tok/s", "step ms", "KV", "deaths"))
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
            *_gpu(row["gpu"]),
            _number(row.get("running")),
            _number(row.get("waiting")),
            _number(row.get("tokens_per_s")),
            _number(row.get("step_ms")),
            "-" if used is None else f"{used:.0%}",
            str(row["deaths"]),
        )
    return table


def _promises(told: Document) -> Table:
    columns = ("promised ms", "streams", "missed", "share", "missed now")
    table = _table(("class", "model"), columns)
    for row in told["slo"]:
        table.add_row(
            row["priority"],
            row["model"],
            _number(row["promised_ms"]),
            _number(row["streams"]),
            _number(row["missed"]),
            "-" if row["missed_ratio"] is None else f"{row['missed_ratio']:.1%}",
            _number(row["lately"]["missed"]),
        )
    return table


def _gpu(gpu: Document | None) -> tuple[str, str, str]:
    """Return a GPU's name, utilisation and used memory as text, with "-" for unknown values."""
    if gpu is None:
        return "-", "-", "-"
    utilisation, used, total = (
        gpu[key] for key in ("utilisation", "memory_used_bytes", "memory_bytes")
    )
    return (
        gpu["gpu"][:ID_CHARS],
        "-" if utilisation is None else f"{utilisation:.0%}",
        "-" if used is None else f"{used / GIB:.1f}/{total / GIB:.0f}",
    )


def _streams(told: Document) -> Table:
    words = ("stream", "state", "model", "class", "tenant")
    table = _table(words, ("tokens", "tok/s", "readers", "resumes", "takeovers"))
    table.add_column("seconds in")
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
            _spent(row.get("time", {})),  # older origins do not send this field
        )
    return table


def _spent(time: Document) -> str:
    """Return where the time of a stream went, as text of one line."""
    seconds = {name: value for name, value in time.items() if name != "stages"}
    seconds |= time.get("stages", {})
    return ", ".join(f"{name} {value:.2g}" for name, value in seconds.items() if value >= LEAST_S)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value % 1 else f"{value:,.0f}"
