"""How far a stream has come at this origin: what operators see of it, and no reader needs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from ledger.frame import FinishReason

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

    def go_on(self, tokens: int, next_index: int) -> None:
        """A worker begins, or goes on, behind so much of it."""
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
            self.frame_ms.append(int((now_s - self.began_s) * 1000))

    def time_s(self, index: int) -> float | None:
        """When a frame was released here, as far as that is kept."""
        place = index - self.first_timed
        if not 0 <= place < len(self.frame_ms):
            return None
        return self.began_s + self.frame_ms[place] / 1000


class EndedStream(NamedTuple):
    """What is remembered of a stream that has ended here."""

    id: bytes
    tenant: str
    model: str
    priority: str
    epoch: int
    progress: StreamProgress
    reason: FinishReason
    ended_s: float
