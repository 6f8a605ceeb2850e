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
    """A request wants a model. Reported again, it is the same request.

    `begun` says that it is a stream already, which a draining model still serves.
    """

    model: str
    request: Hashable
    begun: bool = False


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is over, or waits no longer. An unknown one is over already."""

    model: str
    request: Hashable


@dataclass(frozen=True, slots=True)
class WorkerLoading:
    """The process of a worker has come to a stage of its start."""

    worker: int
    progress: LoadProgress


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has loaded its model.

    `load_s` is how long the next load of this kind is expected to take, in seconds; without it,
    that is the time since the load was ordered. `ready` is None where nothing is known of it.
    """

    worker: int
    ready: Ready | None = None
    load_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A ready worker has said nothing for too long."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A silent worker has said something."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerProved:
    """A worker has made something of a stream, so workers of its model live."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The process of a worker has ended, and was not told to; `reason` says of what."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process of a worker has ended as it was told to."""

    worker: int


@dataclass(frozen=True, slots=True)
class ModelHinted:
    """A model may soon be requested; an empty name means any of them."""

    model: str
    hint: Hint


@dataclass(frozen=True, slots=True)
class ModelPinned:
    """An operator pins a model, or unpins it."""

    model: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class PoliciesSet:
    """A policy for all models but those that have their own one; None leaves it as it is."""

    policy: KeepAlivePolicy | None
    own: Mapping[str, KeepAlivePolicy] | None = None


@dataclass(frozen=True, slots=True)
class Filled:
    """The origin begins: models are loaded in their order, as many as fit."""


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
