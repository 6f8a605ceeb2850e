"""The core's records of a model, of its workers, and of a request for it: plain data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf

from tailrace.ledger.flow.circuit_breaker import CircuitState
from tailrace.ledger.links.hints import Hint
from tailrace.origin.core.states import UP, ModelState, WorkerState
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.policies import KeepAlivePolicy
from tailrace.origin.pool.tiers import Tier
from tailrace.origin.workers.liveness import SILENT_S, Circuit
from tailrace.origin.workers.load_spans import COMPILE
from tailrace.origin.workers.worker_frame import LoadProgress, Ready

HINT_WINDOW_S = 30.0
"""A hint says that a model may soon be requested. It was right if a request comes within this many
seconds. A model that was loaded because of a hint also stays loaded for this long after the
expected end of its load."""
PRIOR_RIGHT, PRIOR_SEEN = 1.0, 2.0
"""Initial counts of right hints and of all hints: half of the hints are expected to be right."""

TURN_S = 15.0
"""Seconds that requests wait for memory that busy models hold, before a busy model is drained. The
model that has been ready longest is chosen, if it has been ready for at least this long and at
least as long as its load took."""


@dataclass(slots=True)
class HintRecord:
    """How often one kind of hint was right for one model.

    Hints within HINT_WINDOW_S of one another count once.
    """

    seen: float = PRIOR_SEEN
    right: float = PRIOR_RIGHT
    last_s: float | None = None

    def came(self, now: float) -> None:
        """Count a hint."""
        if self.last_s is None or now - self.last_s > HINT_WINDOW_S:
            self.seen += 1
            self.last_s = now

    def requested(self, now: float) -> None:
        """Note a request; the last hint counts as right if it came at most HINT_WINDOW_S before."""
        if self.last_s is not None and now - self.last_s <= HINT_WINDOW_S:
            self.right += 1
        self.last_s = None

    @property
    def share(self) -> float:
        """Return the share of hints that were right."""
        return self.right / self.seen


@dataclass(slots=True)
class ModelRequest:
    """A request for a model; `tier` is the model's tier on arrival.

    `taken_s` is the time from which the model could serve the request; None while the request
    waits.
    """

    arrived_s: float
    tier: Tier
    taken_s: float | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """One worker of a model. Its number is unique in the origin and is also that of its slot.

    `since_s` is when its state last changed, in seconds of the core's clock. `ready` is the Ready
    frame of its process; None while no process of it has loaded the model.
    """

    number: int
    model: str
    state: WorkerState = WorkerState.RESTING
    since_s: float = 0.0
    ready: Ready | None = None

    @property
    def is_up(self) -> bool:
        """Return True if the worker has loaded its model, whether it is silent or not."""
        return self.state in UP


@dataclass(slots=True, eq=False)
class ServedModel:
    """A model, loaded or not. The core changes it; others read it.

    `ready` is the last Ready frame of a worker, though no worker may be up now. `deaths` counts the
    workers that died since a worker became ready, and `last_exit` is the reason of the last death.
    `prices_s` is the duration of a load, by the tier from which the load began. `wasted_gpu_s` is
    how long the model was loaded without a request. Times are seconds of the core's clock.
    """

    member: PoolMember
    policy: KeepAlivePolicy
    load_s: float
    is_pinned: bool
    circuit: Circuit
    workers: list[Worker] = field(default_factory=list)
    state: ModelState = ModelState.AWAY
    tier: Tier = Tier.COLD
    requests: dict[Hashable, ModelRequest] = field(default_factory=dict)
    """All requests for the model, served or waiting; they are counted nowhere else."""

    ready: Ready | None = None
    loading: LoadProgress | None = None
    deaths: int = 0
    last_exit: str = ""

    ended_s: float | None = None
    """When the model's last request ended; None while there are requests, and before the first
    one."""
    keep_until_s: float = 0.0
    prewarm_at_s: float = inf
    prewarm_until_s: float = inf
    retry_at_s: float = 0.0
    """The model is not loaded before this time, because none of its workers could start."""
    queued_s: float = 0.0
    ready_s: float = 0.0
    loading_s: float = 0.0
    loading_from: Tier = Tier.COLD
    reason: str = ""
    prices_s: dict[Tier, float] = field(default_factory=dict)
    hints: dict[Hint, HintRecord] = field(default_factory=dict)
    cold_starts: int = 0
    request_count: int = 0
    loads: int = 0
    idle_from_s: float | None = None
    """The time since which the model is ready without requests; None while it has requests or is
    not ready."""
    wasted_gpu_s: float = 0.0

    @property
    def name(self) -> str:
        """Return the model's name, which is empty if the settings do not give it."""
        return self.member.name

    @property
    def shown_name(self) -> str:
        """Return the name that requests use for the model; empty until a worker reports it."""
        return self.name or (self.ready.model if self.ready is not None else "")

    @property
    def is_ready(self) -> bool:
        """Return True if the model takes new requests at once."""
        return self.state is ModelState.READY

    @property
    def is_idle(self) -> bool:
        """Return True if the model is ready and has no request."""
        return self.state is ModelState.READY and not self.requests

    @property
    def is_up(self) -> bool:
        """Return True if a worker has loaded the model, even if that worker is silent now."""
        return any(worker.is_up for worker in self.workers)

    @property
    def waiting(self) -> list[ModelRequest]:
        """Return the requests that wait until the model can serve them."""
        return [one for one in self.requests.values() if one.taken_s is None]

    @property
    def turn_ends_s(self) -> float:
        """Return the time from which the model may be drained to free memory for another one."""
        return self.ready_s + max(TURN_S, self.load_s)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why no worker of the model answers now; empty if one does, or can be started."""
        if self.is_up:
            is_heard = any(worker.state is WorkerState.READY for worker in self.workers)
            return () if is_heard else (f"all workers are silent for over {SILENT_S:.0f} s",)
        again = f"; {self.deaths} died before, the last: {self.last_exit}" if self.deaths else ""
        if self.circuit.reason:
            return (f"{self.circuit.reason}{again}",)
        is_at_rest = all(worker.state is WorkerState.RESTING for worker in self.workers)
        if is_at_rest and self.ready is not None:
            return ()
        if self.loading is None:
            return (f"starting a worker{again}",)
        stage, done, total = self.loading.stage, self.loading.done, self.loading.total
        if stage == COMPILE:
            return (f"compiling {done} of {total} kernels{again}",)
        how_far = f" {done}/{total}" if total else ""
        return (f"loading: {stage}{how_far}{again}",)

    @property
    def trouble(self) -> str:
        """Return why the circuit breaker lets no worker start; empty if one is up or may start."""
        if self.is_up or not self.circuit.reason:
            return ""
        return f"{self.circuit.reason}; the last: {self.last_exit}"

    @property
    def never_starts(self) -> bool:
        """Return True if the model was never loaded and its circuit breaker is open."""
        return self.ready is None and self.circuit.state is CircuitState.OPEN

    def count_idling(self, now: float, *, idle: bool) -> None:
        """Note that the model is ready without requests from now on, or no longer is."""
        if self.idle_from_s is not None:
            self.wasted_gpu_s += now - self.idle_from_s
        self.idle_from_s = now if idle else None
