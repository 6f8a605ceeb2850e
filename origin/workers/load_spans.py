"""Records the stages of a worker's start, which follow one another without gaps.

`bootstrap` begins the first stage before it imports the worker's program, so this module must be
quick to import.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tailrace.ledger.wire.bare import Float64, Uint

FORKED, SPAWNED = "fork", "spawn"
"""The two ways in which a worker's process is created. Each is also the name of the stage that
lasts until the new process runs its first line of our code."""
COMPILE = "compile"
"""Name of the stage that compiles kernels; a first start may stay in it for minutes."""
MAX_STARTS = 64
"""Maximum number of starts that are remembered for operators."""
MAX_SPANS = 32
"""Maximum number of stages of one start; the time of further stages is added to the last one."""


@dataclass(frozen=True, slots=True)
class LoadStage:
    """One stage, in seconds of CLOCK_MONOTONIC, which all processes of a machine share.

    `size` is the number of bytes that the stage processed, or 0 if its duration does not depend on
    a size.
    """

    name: str
    begin_s: Float64
    end_s: Float64
    size: Uint = 0

    @property
    def ms(self) -> float:
        return round((self.end_s - self.begin_s) * 1e3, 1)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The start of one worker, from the supervisor's decision until it has read Ready.

    `path` is FORKED or SPAWNED. Times are seconds of CLOCK_MONOTONIC.
    """

    path: str
    asked_s: float
    ready_s: float
    stages: tuple[LoadStage, ...]

    @property
    def own_s(self) -> float:
        """Return the duration in seconds, without the wait for a fork server that still starts."""
        begun_s = (one.begin_s for one in self.stages if one.name in (FORKED, SPAWNED))
        return self.ready_s - next(begun_s, self.asked_s)

    @property
    def attributed(self) -> float:
        """Share of the start's duration that belongs to some stage, from 0 to 1."""
        took = self.ready_s - self.asked_s
        return sum(stage.end_s - stage.begin_s for stage in self.stages) / took if took else 1.0


class LoadSpans:
    """Records the stages of one start: `enter` ends the current stage and begins the next one."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._stages: list[LoadStage] = []

    def begin(self, name: str) -> None:
        """Begin the first stage; stages that a fork inherited from its parent are dropped."""
        self._stages.clear()
        self.enter(name)

    def enter(self, name: str, size: int = 0) -> None:
        """End the current stage and begin the stage `name`; nothing happens if it is current."""
        if self._stages and self._stages[-1].name == name:
            return
        self.close()
        now = self._clock_s()
        self._stages.append(LoadStage(name, now, now, size))

    def close(self) -> tuple[LoadStage, ...]:
        """Return all stages; the last one ends now."""
        if self._stages:
            self._stages[-1] = replace(self._stages[-1], end_s=self._clock_s())
        return tuple(self._stages)


PROCESS_SPANS = LoadSpans()
"""The stages of this process's own start."""


@dataclass(slots=True)
class ColdStart:
    """One start of a worker, for operators.

    The start is in progress as long as `ready_s` and `exit_reason` are None. Times are seconds of
    one clock. `path` is FORKED or SPAWNED.
    """

    slot: int
    begin_s: float
    spans: list[LoadStage] = field(default_factory=list)
    ready_s: float | None = None
    exit_reason: str | None = None
    path: str | None = None

    def reach(self, now_s: float) -> None:
        """Extend the current stage to `now_s`."""
        if self.spans:
            self.spans[-1] = replace(self.spans[-1], end_s=now_s)


class ColdStarts:
    """Remembers the last starts of all slots, for operators.

    While a worker starts, a stage counts from the time when the supervisor reads the worker's
    report about that stage. Once the worker is ready, these times are replaced by those that the
    worker measured.
    """

    def __init__(self) -> None:
        self.starts: deque[ColdStart] = deque(maxlen=MAX_STARTS)
        self.deaths: Counter[int] = Counter()
        self.exit_reasons: dict[int, str] = {}
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

    def lost(self, slot: int, exit_reason: str, now_s: float) -> None:
        """Record that a worker has died; if it was starting, `exit_reason` ends its start."""
        self.deaths[slot] += 1
        self.exit_reasons[slot] = exit_reason
        start = self._now.pop(slot, None)
        if start is not None:
            start.exit_reason = exit_reason
            start.reach(now_s)

    def stage(self, slot: int) -> str | None:
        """Return the current stage of a starting worker, or None."""
        start = self._now.get(slot)
        return start.spans[-1].name if start is not None and start.spans else None

    def _of(self, slot: int, now_s: float) -> ColdStart:
        start = self._now.get(slot)
        if start is None:
            start = self._now[slot] = ColdStart(slot, now_s)
            self.starts.append(start)
        return start
