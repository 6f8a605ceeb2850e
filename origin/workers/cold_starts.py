"""How the workers of an origin have started and died: the spans of each start, for operators."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from origin.workers.load_spans import LoadStage, WorkerStart

MAX_STARTS = 64
"""Starts that are remembered."""
MAX_SPANS = 32
"""Stages of one start; what follows counts as the last one."""


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
            self.spans[-1] = self.spans[-1]._replace(end_s=now_s)


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
