"""How far a stream has come at this origin: what operators see of it, and no reader needs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import NamedTuple

from ledger.frame import FinishReason
from ledger.life import StreamLife

MAX_TIMED_FRAMES = 4096
"""Frames of a stream whose times are kept, in four bytes each; of later ones they are not."""
MAX_ENDED = 512
"""Streams that are remembered when they have ended; the ledger has the rest."""


@dataclass(slots=True)
class StreamProgress:
    """Times are seconds of the metrics' clock; `revision` is raised whenever any of it changes.

    `tokens` and `next_index` count from the stream's beginning, whoever made them. `frame_ms` are
    the times of frames from `first_timed` on, since `began_s`, which is when it came here.
    """

    began_s: float = 0.0
    tokens: int = 0
    next_index: int = 0
    resumes: int = 0
    revision: int = 0
    first_timed: int = 0
    frame_ms: array[int] = field(default_factory=lambda: array("I"))
    queue_ms: int | None = None  # until a worker had it

    def go_on(self, tokens: int, next_index: int, now_s: float) -> None:
        """A worker begins, or goes on, behind so much of it."""
        if self.queue_ms is None:
            self.queue_ms = self._ms(now_s)
        self.tokens, self.next_index = tokens, next_index
        if self.first_timed + len(self.frame_ms) != next_index:
            self.first_timed = next_index
            del self.frame_ms[:]

    def released(self, index: int, tokens: int, now_s: float) -> None:
        """The frame of this index is durable, and completes so many tokens."""
        self.tokens += tokens
        self.next_index = index + 1
        timed = len(self.frame_ms)
        if timed < MAX_TIMED_FRAMES and self.first_timed + timed == index:
            self.frame_ms.append(self._ms(now_s))

    def time_s(self, index: int) -> float | None:
        """When a frame was released here, as far as that is kept."""
        place = index - self.first_timed
        if not 0 <= place < len(self.frame_ms):
            return None
        return self.began_s + self.frame_ms[place] / 1000

    @property
    def first_ms(self) -> int | None:
        """Until its first frame, if that was made here."""
        return self.frame_ms[0] if self.frame_ms and self.first_timed == 0 else None

    def life(self, takeovers: int, now_s: float, coming: int = 0) -> StreamLife:
        """What is kept of it when it ends now, and so many frames are released with its end."""
        coming = coming if len(self.frame_ms) < MAX_TIMED_FRAMES else 0
        times = [*self.frame_ms, *[self._ms(now_s)] * coming]
        gaps = sorted(map(sub, times[1:], times))
        return StreamLife(
            queue_ms=self.queue_ms,
            first_ms=times[0] if times and self.first_timed == 0 else None,
            whole_ms=self._ms(now_s),
            gap_p50_ms=_percentile(gaps, 50),
            gap_p95_ms=_percentile(gaps, 95),
            gap_p99_ms=_percentile(gaps, 99),
            resumes=self.resumes,
            takeovers=takeovers,
        )

    def _ms(self, now_s: float) -> int:
        return max(0, int((now_s - self.began_s) * 1000))


def _percentile(ordered: Sequence[int], percent: int) -> int | None:
    """The nearest rank; None of nothing."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None


class EndedStream(NamedTuple):
    """What is remembered of a stream that has ended here."""

    id: bytes
    tenant: str
    model: str
    priority: str
    epoch: int
    tokens: int
    progress: StreamProgress
    reason: FinishReason
    ended_s: float
