"""The core's record of a stream that is generated here, or waits for that: plain data.

Several origins may share the ledger, so a record may be out of date. The epoch shows it, and the
ledger has the last word.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import NamedTuple

from tailrace.ledger.errors import Conflict, Overloaded
from tailrace.ledger.frame import FinishReason
from tailrace.ledger.record_extra import StreamLife
from tailrace.origin.core.poison_streams import Suspicion
from tailrace.origin.core.states import StreamState
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import History
from tailrace.origin.workers.worker_frame import Steer

MAX_PENDING_STEERS = 16
"""Maximum number of texts that wait to be taken up by one stream."""
MAX_TIMED_FRAMES = 4096
"""Maximum number of frames of a stream whose times are kept, in four bytes each."""
UNKNOWN_EPOCH = 0
"""Epoch of a stream whose takeover got no answer: it may have happened."""

TEXT = "text"
"""The kind of workers that answer in text, and know of no tokens."""


@dataclass(slots=True)
class Steering:
    """The Steer orders of one stream that are not known to be durable, in order.

    A worker takes them in order and says with each emission which of its ids came from which
    order; the log keeps that. So what is pending when the stream is taken over is exactly what the
    next worker is to be sent. A `ticket` names an order to its caller. The methods return the
    tickets of orders that are durable now.
    """

    _pending: deque[tuple[Steer, int]] = field(default_factory=deque)
    _in_log: int | None = None
    """Number of orders of the stream that are durable; None before its log was read."""

    @property
    def orders(self) -> list[Steer]:
        """Return what a worker that takes the stream over is to be sent."""
        return [order for order, _ in self._pending]

    def add(self, ids: Sequence[int], ticket: int) -> Steer:
        """Return a new order for a worker; raises `Overloaded` if many wait."""
        if len(self._pending) >= MAX_PENDING_STEERS:
            raise Overloaded(f"{MAX_PENDING_STEERS} texts wait to be taken up by this stream")
        order = Steer(tuple(ids))
        self._pending.append((order, ticket))
        return order

    def begin(self, found: int) -> list[int]:
        """Note that a new run goes on after a log with `found` orders.

        An append whose answer was lost may have stored more than was confirmed.
        """
        before, self._in_log = self._in_log, found
        return [] if before is None else self._settle(found - before)

    def confirm(self, ids: int) -> list[int]:
        """Note that an order's ids are durable, `ids` of them: fewer than it has if it was cut.

        Then the stream ends for want of room, and the order was not taken as a whole.
        """
        self._in_log = (self._in_log or 0) + 1
        is_whole = bool(self._pending) and len(self._pending[0][0].ids) == ids
        return self._settle(1) if is_whole else []

    def drop(self) -> list[int]:
        """Forget what is pending, which will not be taken; return its tickets."""
        return self._settle(len(self._pending))

    def _settle(self, count: int) -> list[int]:
        return [self._pending.popleft()[1] for _ in range(min(count, len(self._pending)))]


@dataclass(slots=True)
class StreamProgress:
    """How far a stream has come at this origin, for operators; readers do not need it.

    Times are seconds of the core's clock, unless a name ends in `_ms`: those are ms since
    `began_s`, when the stream came here. `revision` is raised whenever something changes. `tokens`
    and `next_index` count from the stream's beginning, whoever made them. `frame_ms` are the times
    of frames from `first_timed` on.
    """

    began_s: float = 0.0
    tokens: int = 0
    next_index: int = 0
    resumes: int = 0
    revision: int = 0
    first_timed: int = 0
    frame_ms: array[int] = field(default_factory=lambda: array("I"))
    queue_ms: int | None = None
    """When a worker first had it."""
    first_ms: int | None = None
    """When its first frame was released that is not a notice of ours, if that was made here."""
    _is_begun: bool = False

    def go_on(self, history: History, now_s: float) -> None:
        """Note that a worker begins with it, or goes on after what is in its log."""
        if self.queue_ms is None:
            self.queue_ms = self._ms(now_s)
        self.tokens, self.next_index = len(history.ids), history.next_index
        self._is_begun = history.is_begun
        next_index = self.next_index
        if self.first_timed + len(self.frame_ms) != next_index:
            self.first_timed = next_index
            del self.frame_ms[:]

    def released(self, index: int, tokens: int, now_s: float) -> None:
        """Note that the frame of this index is durable, and completes so many tokens."""
        self.tokens += tokens
        self.next_index = index + 1
        if not self._is_begun:
            self._is_begun, self.first_ms = True, self._ms(now_s)
        timed = len(self.frame_ms)
        if timed < MAX_TIMED_FRAMES and self.first_timed + timed == index:
            self.frame_ms.append(self._ms(now_s))

    def time_s(self, index: int) -> float | None:
        """Return when a frame was released here, as far as that is kept."""
        place = index - self.first_timed
        if not 0 <= place < len(self.frame_ms):
            return None
        return self.began_s + self.frame_ms[place] / 1000

    def life(self, takeovers: int, now_s: float, coming: int = 0) -> StreamLife:
        """Return what to store if it ends now, with `coming` more frames in the same commit."""
        first_ms = self.first_ms
        if coming and not self._is_begun:
            first_ms = self._ms(now_s)
        coming = coming if len(self.frame_ms) < MAX_TIMED_FRAMES else 0
        times = [*self.frame_ms, *[self._ms(now_s)] * coming]
        gaps = sorted(map(sub, times[1:], times))
        return StreamLife(
            queue_ms=self.queue_ms,
            first_ms=first_ms,
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
    """Return the percentile by nearest rank; None for an empty list."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None


class EndedStream(NamedTuple):
    """The summary of a stream that has ended here."""

    id: bytes
    tenant: str
    model: str
    priority: str
    epoch: int
    tokens: int
    progress: StreamProgress
    reason: FinishReason
    ended_s: float


@dataclass(frozen=True, slots=True)
class PendingEnd:
    """The end that this origin is to write for a stream, because no worker can."""

    reason: FinishReason
    message: str | None = None
    retryable: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """A stream that is generated here or waits for that. The core changes it; others read it.

    `has_producer` says that an epoch was handed out: the next worker has to take it over. `epoch`
    is the last one that is known here. `worker` and `run` are set while it is on a worker; a run
    number is never used twice. `is_cancelled` says that an order to cancel it was accepted, which
    is carried out whatever happens.

    `read_s` is when somebody last read it, or it came here; `unread` says that it gives way to
    streams of its class that are read. `asked_s` is when it was admitted here, if it was, and
    `released_s` when the last frame of its run was released. Times are seconds of the core's clock.

    `new_engine` is the fingerprint to store with the next record, if another engine begins it than
    its stored recipe says.
    """

    id: bytes
    recipe: Recipe
    state: StreamState
    has_producer: bool
    epoch: int = 1
    worker: int | None = None
    run: int = 0
    is_cancelled: bool = False
    read_s: float = 0.0
    unread: bool = False
    asked_s: float | None = None
    released_s: float | None = None
    standing: Suspicion = field(default_factory=Suspicion)
    steering: Steering = field(default_factory=Steering)
    progress: StreamProgress = field(default_factory=StreamProgress)
    new_engine: str | None = None
    place: int = 0
    """Its place in the queue of waiting streams; the lowest one is first."""
    end: PendingEnd = PendingEnd(FinishReason.FAILED)
    """The end that is being written, in the state ENDING."""
    end_tries: int = 0
    """How often this end was tried in a row."""
    end_nth: int = 0
    """How often any end of it was tried; answers to earlier tries come too late."""
    _stored_engine: str = field(init=False)

    def __post_init__(self) -> None:
        self._stored_engine = self.recipe.fingerprint

    @property
    def made(self) -> int:
        """Return the number of its tokens; of its frames if its workers know of no tokens."""
        progress = self.progress
        return progress.tokens if self.recipe.prompt_ids else progress.next_index

    def use_engine(self, fingerprint: str, history: History) -> None:
        """Note which engine makes it: the one that began it, or else the one that goes on."""
        self.new_engine = None
        if history.engine is not None:
            self.recipe = self.recipe.made_by(history.engine)
        elif not history.is_begun:
            self.recipe = self.recipe.made_by(fingerprint)
            if fingerprint != self._stored_engine:
                self.new_engine = fingerprint

    def not_taken(self) -> Conflict:
        """Return the error for text that it was to be steered with, now that it is over here."""
        fate = "was cancelled" if self.is_cancelled else "ended, or went to another origin,"
        return Conflict(
            f"the stream {fate} before it took up the text", hint="open a new stream with it"
        )
