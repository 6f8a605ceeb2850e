"""Events of an origin's models and workers, and the commands that their core returns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from tailrace.ledger.links.hints import Hint
from tailrace.origin.pool.policies.policies import KeepAlivePolicy
from tailrace.origin.pool.records import PoolRecord
from tailrace.origin.workers.worker_frame import LoadProgress, Ready

# ---- events ----


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request wants a model. A second event with the same `request` has no effect.

    `begun` is True for a stream that exists already: a draining model still serves it.
    """

    model: str
    request: Hashable
    begun: bool = False


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request has ended, or no longer waits. An unknown request is ignored."""

    model: str
    request: Hashable


@dataclass(frozen=True, slots=True)
class WorkerLoading:
    """The process of a worker has reached a stage of its start."""

    worker: int
    progress: LoadProgress


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has loaded its model.

    `load_s` is the expected duration of the next such load, in seconds; if it is None, the time
    since the load was ordered is used. `ready` is the worker's Ready frame, if there is one.
    """

    worker: int
    ready: Ready | None = None
    load_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A ready worker has sent no frame for too long."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A silent worker has sent a frame again."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerProved:
    """A worker has produced output, which shows that workers of its model can run."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The process of a worker has ended without being told to; `reason` says why, in words."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process of a worker has ended because it was told to."""

    worker: int


@dataclass(frozen=True, slots=True)
class ModelHinted:
    """A model may soon be requested; an empty name means any model."""

    model: str
    hint: Hint


@dataclass(frozen=True, slots=True)
class ModelPinned:
    """An operator pins a model, or unpins it."""

    model: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class PoliciesSet:
    """Use other policies: `policy` for all models except those that have one in `own`.

    None leaves the present value unchanged.
    """

    policy: KeepAlivePolicy | None
    own: Mapping[str, KeepAlivePolicy] | None = None


@dataclass(frozen=True, slots=True)
class Filled:
    """The origin has started: load models in the order of the settings, as many as fit."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `unix_offset_s` is Unix time minus the core's clock, if it has changed."""

    unix_offset_s: float | None = None


Event = (
    RequestArrived
    | RequestEnded
    | WorkerLoading
    | WorkerReady
    | WorkerSilent
    | WorkerHeard
    | WorkerProved
    | WorkerDied
    | WorkerExited
    | ModelHinted
    | ModelPinned
    | PoliciesSet
    | Filled
    | Tick
)

# ---- commands ----


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process for a worker; it reports WorkerReady or WorkerDied."""

    worker: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End the process of a worker, which reports WorkerExited when it is gone."""

    worker: int


@dataclass(frozen=True, slots=True)
class RecordHistory:
    """Add a record to the history, the log and the counters."""

    record: PoolRecord


Command = StartWorker | StopWorker | RecordHistory
