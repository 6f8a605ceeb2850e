"""Replays requests through a pool on a simulated clock; the shadow pool is such a replay."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from tailrace.origin.core.events import (
    Command,
    Event,
    Filled,
    RecordHistory,
    RequestArrived,
    RequestEnded,
    StartWorker,
    StopWorker,
    Tick,
    WorkerExited,
    WorkerReady,
)
from tailrace.origin.core.pool import ModelPool
from tailrace.origin.pool.records import KeepRecord

LEAVE_S = 0.1
"""Estimated seconds until an unloaded model's memory is free, used until an unload was measured."""
MOST_HELD = 100_000
"""Maximum number of running requests in a shadow pool; if there are more, the oldest counts as
ended."""

_ENDED, _EXITED, _LOADED = range(3)
"""Kinds of events, in the order in which events of the same time are handled; arrivals are handled
after them."""


class PoolReplay:
    """Feeds a pool with requests in the order of their arrival, and with the events that follow."""

    def __init__(
        self,
        pool: ModelPool,
        load_s: Callable[[str], float],
        leave_s: Callable[[str], float] = lambda model: LEAVE_S,
        keep: KeepRecord = lambda record: None,
    ) -> None:
        """Create a replay; `keep` gets every record of the pool."""
        self.pool = pool
        self.now = 0.0
        self._load_s, self._leave_s, self._keep = load_s, leave_s, keep
        self._events: list[tuple[float, int, int, Event]] = []
        self._waiting: dict[str, list[tuple[Hashable, float]]] = {}
        self._count = 0

    def start(self, now: float, *, fill: bool = False) -> None:
        """Begin at time `now`; with `fill`, load as many models as fit, as an origin does."""
        self.now = now
        self.happen(Filled() if fill else Tick())

    def request(self, model: str, at: float, service_s: float) -> None:
        """Replay a request that runs for `service_s` after its start."""
        self.advance(at)
        self._count += 1
        request = self._count
        if self.pool.of(model).is_ready:
            self._at(self.now + service_s, _ENDED, RequestEnded(model, request))
        else:
            self._waiting.setdefault(model, []).append((request, service_s))
        self.happen(RequestArrived(model, request))

    def advance(self, to: float) -> None:
        """Replay all events until the time `to`."""
        while True:
            first = self._events[0][0] if self._events else inf
            due = max(min(first, self.pool.wake_at()), self.now)
            if due > to or due == inf:
                break
            self.now = due
            self.happen(heappop(self._events)[3] if first <= due else Tick())
        if to != inf:
            self.now = to

    def happen(self, event: Event) -> None:
        """Pass an event to the pool, and schedule the events that follow."""
        self.carry_out(self.pool.handle(event, self.now))
        if isinstance(event, WorkerReady):
            model = self.pool.model_of(event.worker).name
            for request, service_s in self._waiting.pop(model, ()):
                self._at(self.now + service_s, _ENDED, RequestEnded(model, request))

    def carry_out(self, commands: list[Command]) -> None:
        """Simulate commands of the pool, such as StartWorker: schedule the resulting events."""
        for command in commands:
            match command:
                case StartWorker(worker):
                    took_s = self._load_s(self.pool.model_of(worker).name)
                    self._at(self.now + took_s, _LOADED, WorkerReady(worker))
                case StopWorker(worker):
                    took_s = self._leave_s(self.pool.model_of(worker).name)
                    self._at(self.now + took_s, _EXITED, WorkerExited(worker))
                case RecordHistory(record):
                    self._keep(record)

    def _at(self, time_s: float, kind: int, event: Event) -> None:
        self._count += 1
        heappush(self._events, (time_s, kind, self._count, event))


@dataclass(frozen=True)
class PoolCounts:
    """Totals of a pool; `cold_starts` includes the first one of each model."""

    requests: int
    cold_starts: int
    loads: int
    wasted_gpu_s: float

    @classmethod
    def of(cls, pool: ModelPool) -> PoolCounts:
        """Return the totals of a pool so far."""
        states = pool.models
        return cls(
            sum(one.request_count for one in states),
            sum(one.cold_starts for one in states),
            sum(one.loads for one in states),
            sum(one.wasted_gpu_s for one in states),
        )

    @property
    def cold_rate(self) -> float:
        return self.cold_starts / self.requests if self.requests else 0.0


class ShadowPool:
    """Runs another policy beside the serving one; its decisions are recorded, not carried out.

    In the shadow a request runs as long as in reality. The duration is known only after the
    request's end, so the shadow lags behind by the longest running request.
    """

    def __init__(self, replay: PoolReplay, now: float) -> None:
        self.replay = replay
        replay.start(now)
        self._open: OrderedDict[Hashable, _Shadowed] = OrderedDict()

    @property
    def counts(self) -> PoolCounts:
        return PoolCounts.of(self.replay.pool)

    def arrived(self, model: str, request: Hashable, now: float) -> None:
        self._open[request] = _Shadowed(model, now)
        if len(self._open) > MOST_HELD:
            first = next(iter(self._open))
            self.ended(first, now, now - self._open[first].arrived_s)

    def ended(self, request: Hashable, now: float, service_s: float) -> None:
        """Record that a request has ended, `service_s` after its start."""
        if request not in self._open:
            return
        self._open[request].service_s = service_s
        while self._open and (one := next(iter(self._open.values()))).service_s is not None:
            self._open.popitem(last=False)
            self.replay.request(one.model, one.arrived_s, one.service_s)
        if not self._open:
            self.replay.advance(now)


@dataclass(slots=True)
class _Shadowed:
    model: str
    arrived_s: float
    service_s: float | None = None
