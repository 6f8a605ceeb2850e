"""Queries of the history of a warm pool: its requests, loads and decisions."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from tailrace.ledger.errors import CallerError
from tailrace.origin.pool.history.schema import COLD, WARM, HistoryStore

if TYPE_CHECKING:
    from tailrace.origin.pool.policies.trace import ArrivalTrace

Document = dict[str, Any]
MAX_MODELS = 1_000
"""Maximum number of models in a summary."""


@dataclass(frozen=True)
class Lane:
    """A period in which a worker held a model in one tier.

    `until_ms` is None if the period has not ended.
    """

    origin: str
    worker: int
    model: str
    tier: str
    from_ms: int
    until_ms: int | None


async def arrivals(store: HistoryStore, since_ms: int = 0) -> ArrivalTrace:
    """Return the stored requests since a time; their times are relative to the first one."""
    # Imported here, because importing numpy takes a tenth of a second and an origin never needs it.
    import numpy as np

    from tailrace.origin.pool.policies.trace import ArrivalTrace

    rows = await store.rows(
        "SELECT at_ms, model, coalesce(took_ms, 0) FROM arrival WHERE at_ms >= $1 ORDER BY at_ms",
        since_ms,
    )
    if not rows:
        raise CallerError(
            "no request is recorded",
            field=store.name,
            hint="let an origin serve requests first, or choose an earlier time",
        )
    names: dict[str, int] = {}
    models = np.array([names.setdefault(model, len(names)) for _, model, _ in rows], np.int64)
    at_s = np.array([at for at, _, _ in rows], np.float64) / 1e3
    took_s = np.array([took for _, _, took in rows], np.float64) / 1e3
    return ArrivalTrace.of(tuple(names), models, at_s - at_s[0], np.maximum(took_s, 0.0))


async def lately(
    store: HistoryStore, origin: str, before_ms: int, limit: int
) -> list[tuple[str, int, int]]:
    """Return the last requests before a time, oldest first: model, arrival and end.

    If `origin` is not empty, only the requests of that origin are returned, because a shared store
    has the requests of several origins.
    """
    rows = await store.rows(
        """SELECT model, at_ms, at_ms + coalesce(took_ms, 0) FROM arrival
        WHERE at_ms < $1 AND ($2 = '' OR origin = $2) ORDER BY at_ms DESC LIMIT $3""",
        before_ms,
        origin,
        limit,
    )
    return [(model, begun, ended) for model, begun, ended in reversed(rows)]


async def models(store: HistoryStore, since_ms: int) -> list[Document]:
    """Return statistics of the requests of each model since a time, the most used first.

    `first_ms` is the mean time in ms to a request's first frame; None if no request is known to
    have got a frame.
    """
    rows = await store.rows(
        f"""SELECT model, count(*), sum(CASE WHEN found IN {WARM} THEN 0 ELSE 1 END), max(at_ms),
            avg(first_ms), coalesce(sum(took_ms), 0)
        FROM arrival WHERE at_ms >= $1 GROUP BY model ORDER BY 2 DESC, 1 LIMIT $2""",
        since_ms,
        MAX_MODELS,
    )
    keys = ("model", "arrivals", "cold", "last_ms", "first_ms", "took_ms")
    return [
        dict(
            zip(
                keys,
                (model, *(None if one is None else round(one) for one in figures)),
                strict=True,
            )
        )
        for model, *figures in rows
    ]


async def decisions(store: HistoryStore, model: str, limit: int) -> list[Document]:
    """Return the last decisions about a model, newest first."""
    rows = await store.rows(
        """SELECT at_ms, origin, policy, shadow, action, reason, features, until_ms, prewarm_ms
        FROM decision WHERE model = $1 ORDER BY at_ms DESC LIMIT $2""",
        model,
        limit,
    )
    keys = ("at_ms", "origin", "policy", "shadow", "action", "reason")
    more = ("features", "until_ms", "prewarm_ms")
    return [
        dict(zip((*keys, *more), row, strict=True))
        | {"shadow": bool(row[3]), "features": json.loads(row[6])}
        for row in rows
    ]


async def loads(store: HistoryStore, model: str, limit: int) -> list[Document]:
    """Return the last starts of a model's workers, stage by stage, newest first."""
    rows = await store.rows(
        """SELECT s.origin, s.worker, s.asked_ms, s.path, s.stage, s.begin_ms, s.ms, s.bytes,
            s.whole_ms
        FROM load_span s JOIN (
            SELECT origin, worker, asked_ms FROM load_span WHERE model = $1 AND place = 0
            ORDER BY asked_ms DESC LIMIT $2
        ) l ON s.origin = l.origin AND s.worker = l.worker AND s.asked_ms = l.asked_ms
        ORDER BY s.asked_ms DESC, s.origin, s.worker, s.place""",
        model,
        limit,
    )
    found: dict[tuple[str, int, int], Document] = {}
    for origin, worker, asked_ms, path, stage, begin_ms, ms, size, whole_ms in rows:
        load = found.setdefault(
            (origin, worker, asked_ms),
            {
                "origin": origin,
                "worker": worker,
                "asked_ms": asked_ms,
                "path": path,
                "ms": whole_ms,
                "stages": [],
            },
        )
        load["stages"].append({"stage": stage, "begin_ms": begin_ms, "ms": ms, "bytes": size})
    for load in found.values():
        spent = sum(one["ms"] for one in load["stages"])
        load["attributed"] = min(1.0, spent / load["ms"]) if load["ms"] else 1.0
    return list(found.values())


async def typical_load_s(store: HistoryStore, model: str | None = None) -> float | None:
    """Return the median duration of recent loads, of one model or of all; None without records."""
    given = "" if model is None else "AND model = $1"
    rows = await store.rows(
        f"SELECT whole_ms FROM load_span WHERE place = 0 {given} ORDER BY asked_ms DESC LIMIT 100",
        *(() if model is None else (model,)),
    )
    return median(ms for (ms,) in rows) / 1e3 if rows else None


async def residence(store: HistoryStore, since_ms: int) -> list[Lane]:
    """Return the periods in which workers held models in tiers above cold.

    Every period of an origin ends, at the latest, when that origin ends or is started again.
    """
    rows = await store.rows(
        "SELECT origin, worker, at_ms, model, tier FROM tier WHERE at_ms >= $1"
        " ORDER BY origin, at_ms",
        since_ms,
    )
    lanes: list[Lane] = []
    now: dict[tuple[str, int, str], Lane] = {}
    for origin, worker, at_ms, model, tier in rows:
        key = (origin, worker, model)
        over = [one for one in now if one == key or (not model and one[0] == origin)]
        lanes += (replace(now.pop(one), until_ms=at_ms) for one in over)
        if model and tier != COLD:
            now[key] = Lane(origin, worker, model, tier, at_ms, None)
    lanes += now.values()
    # If the pool has recorded a model as a whole, leave out the records of the model's single
    # workers, which the pool's records cover.
    pooled = {(lane.origin, lane.model) for lane in lanes if lane.worker < 0}
    told = [one for one in lanes if one.worker < 0 or (one.origin, one.model) not in pooled]
    return sorted(told, key=lambda lane: lane.from_ms)
