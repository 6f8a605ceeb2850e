"""How the workers of an origin have started and died: the spans of each start, for operators."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from origin.workers.load_spans import WorkerStart

MAX_STARTS = 64
"""Starts that are remembered."""
MAX_SPANS = 32
"""Stages of one start; what follows counts as the last one."""
BEFORE_LOADING = "start"
"""The stage before a worker has named one: its process, and what it imports."""


@dataclass(slots=True)
class StartSpan:
    """One stage of a start, in seconds of the metrics' clock."""

    stage: str
    begin_s: float
    end_s: float
    size: int = 0


@dataclass(slots=True)
class ColdStart:
    """One start of a worker; it is over when it is ready, or has a `fate`.

    `path` is how its process began; `size` of a span is in bytes, of those that read some.
    """

    slot: int
    begin_s: float
    spans: list[StartSpan] = field(default_factory=list)
    ready_s: float | None = None
    fate: str | None = None
    path: str | None = None


class ColdStarts:
    """Told by the owner of the slots. While a worker starts, stages are known by when they were
    heard of; once it is ready, by its own account of them.

    Where it gives none, what it did before its first word is one span, that began as long ago
    as the worker says its loading took.
    """

    def __init__(self) -> None:
        self.starts: deque[ColdStart] = deque(maxlen=MAX_STARTS)
        self.deaths: Counter[int] = Counter()
        self.fates: dict[int, str] = {}
        self._now: dict[int, ColdStart] = {}

    def loading(self, slot: int, stage: str, now_s: float) -> None:
        start = self._of(slot, now_s)
        last = start.spans[-1] if start.spans else None
        if last is not None:
            last.end_s = now_s
        is_new = last is None or last.stage != stage
        if is_new and len(start.spans) < MAX_SPANS:
            start.spans.append(StartSpan(stage, now_s, now_s))

    def ready(self, slot: int, load_ms: int, now_s: float, own: WorkerStart | None = None) -> None:
        start = self._of(slot, now_s)
        start.ready_s = now_s
        del self._now[slot]
        if own is not None:
            start.begin_s, start.path = own.asked_s, own.path
            start.spans = [StartSpan(*stage) for stage in own.stages]
            return
        if start.spans:
            start.spans[-1].end_s = now_s
        start.begin_s = min(start.begin_s, now_s - load_ms / 1000)
        first_s = start.spans[0].begin_s if start.spans else now_s
        start.spans.insert(0, StartSpan(BEFORE_LOADING, start.begin_s, first_s))

    def lost(self, slot: int, fate: str, now_s: float) -> None:
        """A worker is gone: one that was starting has this start to its name."""
        self.deaths[slot] += 1
        self.fates[slot] = fate
        start = self._now.pop(slot, None)
        if start is not None:
            start.fate = fate
            if start.spans:
                start.spans[-1].end_s = now_s

    def stage(self, slot: int) -> str | None:
        """What a worker that starts is at."""
        start = self._now.get(slot)
        return start.spans[-1].stage if start is not None and start.spans else None

    def _of(self, slot: int, now_s: float) -> ColdStart:
        start = self._now.get(slot)
        if start is None:
            start = self._now[slot] = ColdStart(slot, now_s)
            self.starts.append(start)
        return start
