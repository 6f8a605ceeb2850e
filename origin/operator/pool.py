"""The warm pool as it is: the workers of an origin, what each has loaded, and how they started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from origin.generations.runs import Runs
from origin.metrics import CLASSES, Metrics
from origin.operator.live import state_of
from origin.workers.cold_starts import ColdStart
from origin.workers.worker_frame import Load
from origin.workers.worker_process import WorkerSlot

TOLD = ("model", "kind", "device", "fingerprint", "context", "load_ms")
"""Of what a worker says when it is ready."""

Document = dict[str, Any]


def pool_document(
    runs: Runs,
    metrics: Metrics,
    slots: Sequence[WorkerSlot],
    room: int,
    unix_ms: Callable[[float], int],
) -> Document:
    streams = Counter(one.slot.number for one in runs.table.by_id.values() if one.slot is not None)
    states = Counter(map(state_of, runs.table.by_id.values()))
    return {
        "now_ms": unix_ms(metrics.clock()),
        "ready": not runs.reasons,
        "reasons": list(runs.reasons),
        "room": room,
        "streams": runs.count,
        "states": states | {"paused": runs.paused_count},
        "workers": [
            {
                **_worker(slot, runs),
                "streams": streams[slot.number],
                "load": _load(metrics.load_of(slot.number)),
            }
            for slot in slots
        ],
        "starts": [_start(one, unix_ms) for one in runs.starts.starts],
    }


def _worker(slot: WorkerSlot, runs: Runs) -> Document:
    ready, starts = slot.ready, runs.starts
    return {
        "worker": slot.number,
        "pid": slot.pid,
        "state": _state(slot),
        "stage": None if ready is not None else starts.stage(slot.number),
        **{name: getattr(ready, name, None) for name in TOLD},
        "deaths": starts.deaths[slot.number],
        "fate": starts.fates.get(slot.number),
        "death": slot.death.value if slot.number in starts.fates else None,
        "circuit": slot.circuit.state.value,
        "reason": slot.circuit.reason,
    }


def _state(slot: WorkerSlot) -> str:
    if slot.ready is not None:
        return "silent" if slot.is_silent else "ready"
    return "down" if slot.pid is None else "loading"


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
        "fate": start.fate,
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
