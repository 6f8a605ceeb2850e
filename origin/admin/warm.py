"""The warm pool for operators: its state, its history, and orders to change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf, isfinite

from pydantic import BaseModel, ConfigDict, Field

from tailrace.ledger.errors import Conflict, NotFound, Unavailable
from tailrace.origin.admin.query import Document, Query, parse_body, require
from tailrace.origin.admin.streams import state_of
from tailrace.origin.core.model import ServedModel
from tailrace.origin.core.states import WorkerState
from tailrace.origin.generations.runs import Runs
from tailrace.origin.gpu.meter import GpuReading
from tailrace.origin.metrics import CLASSES, Metrics
from tailrace.origin.pool.history import queries
from tailrace.origin.pool.history.recorder import HistoryRecorder
from tailrace.origin.pool.history.schema import COLD, DAY_MS, HOT, HOUR_MS, HistoryStore
from tailrace.origin.serving.live_pool import LivePool
from tailrace.origin.serving.model_host import ModelHost
from tailrace.origin.serving.plan import GPU
from tailrace.origin.workers.load_spans import ColdStart
from tailrace.origin.workers.worker_frame import Load
from tailrace.origin.workers.worker_process import WorkerSlot

TOLD_OF_READY = ("model", "kind", "device", "fingerprint", "context", "load_ms")
"""Fields of a worker's Ready frame that are shown."""
DEFAULT_TOLD = 10
MAX_TOLD = 200
"""Maximum number of decisions, and of loads, that an explanation of a model lists."""
MAX_DAYS = 3650
MAX_LANES = 2_000
MAX_NAME = 512


def pool_document(
    runs: Runs,
    metrics: Metrics,
    slots: Sequence[WorkerSlot],
    room: int,
    unix_ms: Callable[[float], int],
) -> Document:
    streams = Counter(one.worker for one in runs.table.by_id.values() if one.worker is not None)
    states = Counter(map(state_of, runs.table.by_id.values()))
    return {
        "now_ms": unix_ms(metrics.clock()),
        "ready": not runs.models.reasons,
        "reasons": list(runs.models.reasons),
        "room": room,
        "streams": runs.table.count,
        "states": states | {"paused": runs.paused_count},
        "workers": [
            {
                **_worker(slot, runs),
                "streams": streams[slot.number],
                "gpu": _gpu(slot, metrics.gpu_of(slot.number)),
                "load": _load(metrics.load_of(slot.number)),
            }
            for slot in slots
        ],
        "starts": [_start(one, unix_ms) for one in runs.starts.starts],
        "slo": [
            {
                "priority": priority,
                "model": model,
                "promised_ms": round(metrics.slo.promised_s[priority] * 1000),
                "streams": count.streams,
                "missed": count.missed,
            }
            for (priority, model), count in metrics.slo.counts.items()
        ],
    }


def _worker(slot: WorkerSlot, runs: Runs) -> Document:
    ready, starts = slot.ready, runs.starts
    circuit = runs.models.core.model_of(slot.number).circuit
    return {
        "worker": slot.number,
        "pid": slot.pid,
        "state": _state(slot, runs.models),
        "stage": None if ready is not None else starts.stage(slot.number),
        **{name: getattr(ready, name, None) for name in TOLD_OF_READY},
        "deaths": starts.deaths[slot.number],
        "exit_reason": starts.exit_reasons.get(slot.number),
        "exit_kind": slot.exit_kind.value if slot.number in starts.exit_reasons else None,
        "circuit": circuit.state.value,
        "reason": circuit.reason,
    }


def _state(slot: WorkerSlot, models: ModelHost) -> str:
    if slot.ready is not None:
        return "silent" if models.worker(slot).state is WorkerState.SILENT else "ready"
    return "down" if slot.pid is None else "loading"


def _gpu(slot: WorkerSlot, reading: GpuReading | None) -> Document | None:
    """Return the figures of a worker's GPU; None for a worker that runs on the CPU."""
    if reading is None or (slot.ready is not None and not slot.ready.device.startswith(GPU)):
        return None
    return asdict(reading)


def _load(load: Load | None) -> Document | None:
    if load is None:
        return None
    told = asdict(load)
    for field in ("waiting", "running"):
        told[field] = dict(zip(CLASSES, told[field], strict=False))
    return told


def _start(start: ColdStart, unix_ms: Callable[[float], int]) -> Document:
    return {
        "worker": start.slot,
        "begin_ms": unix_ms(start.begin_s),
        "ready_ms": None if start.ready_s is None else unix_ms(start.ready_s),
        "exit_reason": start.exit_reason,
        "path": start.path,
        "spans": [
            {
                "stage": span.name,
                "begin_ms": unix_ms(span.begin_s),
                "end_ms": unix_ms(span.end_s),
                "bytes": span.size,
            }
            for span in start.spans
        ],
    }


class WantedModel(BaseModel):
    """Body of a request that names one model, for example to load it now."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(max_length=MAX_NAME)


class WantedPin(WantedModel):
    """Body of a request to pin or unpin a model."""

    pinned: bool = True


class WantedPolicy(BaseModel):
    """Body of a request to use a policy, or to run it in the shadow pool."""

    model_config = ConfigDict(extra="forbid")

    policy: str = Field(max_length=MAX_NAME)
    shadow: bool = False


class WarmHandler:
    """Admin handler of the warm pool.

    `pool` is None in an origin of a single model, which stays loaded.
    """

    def __init__(self, recorder: HistoryRecorder, models: ModelHost, pool: LivePool | None) -> None:
        self._recorder = recorder
        self._models = models
        self._pool = pool

    async def answer(self, asked: str, query: Query, method: str, body: bytes) -> Document:
        if asked in ("", "explain", "residence"):
            require(method, "GET")
            return await self._told(asked, query)
        require(method, "POST")
        query.done()
        return await self._changed(asked, body)

    async def _told(self, asked: str, query: Query) -> Document:
        if asked == "explain":
            return await self._explain(query)
        days = query.number("days", 1, MAX_DAYS, least=1)
        query.done()
        now_ms = self._recorder.now_ms()
        if asked == "residence":
            lanes = await queries.residence(self._store(), now_ms - days * DAY_MS)
            told = [asdict(lane) for lane in lanes[-MAX_LANES:]]
            return {"now_ms": now_ms, "days": days, "residence": told}
        return await self._summary(now_ms, days)

    async def _summary(self, now_ms: int, days: int) -> Document:
        """Return the state of each model and its numbers of requests, for `tailrace warm`."""
        served = self._served(now_ms)
        store = self._recorder.store
        lately: dict[str, Document] = {}
        hourly: dict[str, Document] = {}
        if store is not None:
            lately = await _by_model(store, now_ms - days * DAY_MS)
            hourly = await _by_model(store, now_ms - HOUR_MS)
        models = []
        for name in sorted({*served, *lately}):
            load_s = None if store is None else await queries.typical_load_s(store, name)
            models.append(
                {
                    "model": name,
                    "arrivals_hour": hourly[name]["arrivals"] if name in hourly else 0,
                    **lately.get(name, {"arrivals": 0, "cold": 0, "last_ms": None}),
                    "load_s": load_s,
                    **served.get(name, {}),
                }
            )
        return {
            "now_ms": now_ms,
            "days": days,
            **self._recorder.described(),
            "pool": self._pool is not None,
            "shadow": None if self._pool is None else self._pool.shadow(),
            "models": models,
        }

    def _served(self, now_ms: int) -> dict[str, Document]:
        """Return the state of each served model, by name."""
        if self._pool is not None:
            return {one.name: self._state(one, now_ms) for one in self._pool.pool.models}
        return {
            one.ready.model: {"tier": HOT if one.is_up else COLD, "pinned": True}
            for one in self._models.core.models
            if one.ready is not None
        }

    def _state(self, state: ServedModel, now_ms: int) -> Document:
        assert self._pool is not None
        clock_s = self._pool.clock_s()

        def unix_ms(at_s: float) -> int | None:
            return round(now_ms + (at_s - clock_s) * 1e3) if isfinite(at_s) else None

        return {
            "residence": state.state.value,
            "tier": state.tier.word,
            "requests_now": len(state.requests),
            "pinned": state.is_pinned,
            "policy": state.policy.name,
            "keep_until_ms": unix_ms(state.keep_until_s if state.is_idle else inf),
            "prewarm_ms": unix_ms(state.prewarm_at_s),
            "prices_s": {tier.word: price for tier, price in state.prices_s.items()},
            "cold_starts": state.cold_starts,
            "loads": state.loads,
            "requests": state.request_count,
            "wasted_gpu_s": state.wasted_gpu_s,
        }

    async def _explain(self, query: Query) -> Document:
        model = query.text("model")
        limit = query.number("limit", DEFAULT_TOLD, MAX_TOLD, least=1)
        query.done()
        store = self._store()
        now_ms = self._recorder.now_ms()
        told = await explained(store, model, now_ms, limit)
        told["now"] = self._served(now_ms).get(model)
        return told

    async def _changed(self, asked: str, body: bytes) -> Document:
        if asked not in ("apply", "prewarm", "pin"):
            raise NotFound(f"there is no admin route {f'warm/{asked}'!r}")
        if self._pool is None:
            raise Conflict(
                "this origin has no warm pool: its single model always stays loaded",
                hint="a section [models.NAME] in tailrace.toml for each model makes a pool",
            )
        if asked == "apply":
            policy = parse_body(WantedPolicy, body)
            await self._pool.apply(policy.policy, shadow=policy.shadow)
            return {"policy": policy.policy, "shadow": policy.shadow}
        if asked == "pin":
            pin = parse_body(WantedPin, body)
            await self._pool.pin(pin.model, pinned=pin.pinned)
            return {"model": pin.model, "pinned": pin.pinned}
        wanted = parse_body(WantedModel, body)
        self._pool.prewarm(wanted.model)
        return {"model": wanted.model, "prewarm": True}

    def _store(self) -> HistoryStore:
        if self._recorder.store is None:
            why = self._recorder.problem or "it is not open yet"
            raise Unavailable(f"this origin has no history: {why}")
        return self._recorder.store


async def explained(store: HistoryStore, model: str, now_ms: int, limit: int) -> Document:
    """Return the recorded history of a model; raises NotFound if nothing is recorded."""
    lately = await _by_model(store, now_ms - DAY_MS)
    decisions = await queries.decisions(store, model, limit)
    loads = await queries.loads(store, model, limit)
    if model not in lately and not decisions and not loads:
        known = ", ".join(row["model"] for row in await queries.models(store, 0)) or "none"
        raise NotFound(
            f"nothing is recorded of a model {model!r}",
            field="model",
            hint=f"recorded models: {known}",
        )
    return {
        "now_ms": now_ms,
        "model": model,
        "history": store.name,
        "lately": lately.get(model),
        "decisions": decisions,
        "loads": loads,
    }


async def _by_model(store: HistoryStore, since_ms: int) -> dict[str, Document]:
    return {row["model"]: row for row in await queries.models(store, since_ms)}
