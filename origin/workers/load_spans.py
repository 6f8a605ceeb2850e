"""Where the time of a worker's start goes: stages one after another, without gaps.

What `launch` beside this runs first begins the first one; so nothing heavy is imported here.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tailrace.ledger.wire.bare import Float64, Uint

FORKED, SPAWNED = "fork", "spawn"
"""How a worker's process began, and the stage of its start until it runs our code."""
COMPILE = "compile"
"""The stage whose progress is in kernels, and which a worker stays in for minutes, once."""
MAX_STARTS = 64
"""Starts that are remembered."""
MAX_SPANS = 32
"""Stages of one start; what follows counts as the last one."""


@dataclass(frozen=True, slots=True)
class LoadStage:
    """In seconds of CLOCK_MONOTONIC, which all processes of a machine share; `size` in bytes, if
    its time depends on one."""

    name: str
    begin_s: Float64
    end_s: Float64
    size: Uint = 0

    @property
    def ms(self) -> float:
        return round((self.end_s - self.begin_s) * 1e3, 1)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """One start, from being asked for until the worker was heard to be ready."""

    path: str
    asked_s: float
    ready_s: float
    stages: tuple[LoadStage, ...]

    @property
    def own_s(self) -> float:
        """Return how long it took without the launcher's imports, which only the first start
        waits for."""
        begun_s = (one.begin_s for one in self.stages if one.name in (FORKED, SPAWNED))
        return self.ready_s - next(begun_s, self.asked_s)

    @property
    def attributed(self) -> float:
        """How much of its time lies in a stage."""
        took = self.ready_s - self.asked_s
        return sum(stage.end_s - stage.begin_s for stage in self.stages) / took if took else 1.0


class LoadSpans:
    """`enter` ends one stage and begins the next."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._stages: list[LoadStage] = []

    def begin(self, name: str) -> None:
        """Forget what was: in a process that was forked, that is another one's."""
        self._stages.clear()
        self.enter(name)

    def enter(self, name: str, size: int = 0) -> None:
        """Nothing, while the stage has the same name."""
        if self._stages and self._stages[-1].name == name:
            return
        self.close()
        now = self._clock_s()
        self._stages.append(LoadStage(name, now, now, size))

    def close(self) -> tuple[LoadStage, ...]:
        """All of them, the last one up to now."""
        if self._stages:
            self._stages[-1] = replace(self._stages[-1], end_s=self._clock_s())
        return tuple(self._stages)


OF_THIS_PROCESS = LoadSpans()


@dataclass(slots=True)
class ColdStart:
    """One start of a worker; it is over when it is ready, or has a `fate`.

    `path` is how its process began; `size` of a span is in bytes, of those that read some.
    """

    slot: int
    begin_s: float
    spans: list[LoadStage] = field(default_factory=list)
    ready_s: float | None = None
    fate: str | None = None
    path: str | None = None

    def reach(self, now_s: float) -> None:
        """The stage that it is at goes on until now."""
        if self.spans:
            self.spans[-1] = replace(self.spans[-1], end_s=now_s)


class ColdStarts:
    """Told by the owner of the slots. While a worker starts, stages are known by when they were
    heard of; once it is ready, by its own account of them.
    """

    def __init__(self) -> None:
        self.starts: deque[ColdStart] = deque(maxlen=MAX_STARTS)
        self.deaths: Counter[int] = Counter()
        self.fates: dict[int, str] = {}
        self._now: dict[int, ColdStart] = {}

    def loading(self, slot: int, stage: str, now_s: float) -> None:
        start = self._of(slot, now_s)
        start.reach(now_s)
        is_new = not start.spans or start.spans[-1].name != stage
        if is_new and len(start.spans) < MAX_SPANS:
            start.spans.append(LoadStage(stage, now_s, now_s))

    def ready(self, slot: int, now_s: float, own: WorkerStart | None) -> None:
        start = self._of(slot, now_s)
        start.ready_s = now_s
        start.reach(now_s)
        del self._now[slot]
        if own is not None:
            start.begin_s, start.path, start.spans = own.asked_s, own.path, [*own.stages]

    def lost(self, slot: int, fate: str, now_s: float) -> None:
        """A worker is gone: one that was starting has this start to its name."""
        self.deaths[slot] += 1
        self.fates[slot] = fate
        start = self._now.pop(slot, None)
        if start is not None:
            start.fate = fate
            start.reach(now_s)

    def stage(self, slot: int) -> str | None:
        """What a worker that starts is at."""
        start = self._now.get(slot)
        return start.spans[-1].name if start is not None and start.spans else None

    def _of(self, slot: int, now_s: float) -> ColdStart:
        start = self._now.get(slot)
        if start is None:
            start = self._now[slot] = ColdStart(slot, now_s)
            self.starts.append(start)
        return start
