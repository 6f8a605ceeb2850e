"""The core's record of a stream that is generated here or waits for a worker: plain data.

Several origins may share the ledger, so a record may be out of date. If another origin has taken
the stream, the ledger has a newer epoch and refuses appends under the old one.
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
from tailrace.origin.core.frame_tokens import FrameTokens
from tailrace.origin.core.poison_streams import Suspicion
from tailrace.origin.core.states import StreamState
from tailrace.origin.core.time_spent import TimeSpent
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import History
from tailrace.origin.workers.worker_frame import StageTime, Steer

MAX_PENDING_STEERS = 16
"""Maximum number of Steer orders of one stream that are not durable yet."""
MAX_TIMED_FRAMES = 4096
"""Maximum number of frames of a stream whose release times are kept, in four bytes each."""
UNKNOWN_EPOCH = 0
"""Epoch of a stream whose takeover the ledger did not answer, so that it may have happened."""

TEXT = "text"
"""The kind of workers that produce text, not tokens: custom producers and upstream servers."""


@dataclass(slots=True)
class Steering:
    """The Steer orders of one stream that are not known to be durable, in order.

    A worker takes the orders one after another. The worker's emissions state which ids came from
    which order, and the log stores this. So when the stream moves to another worker, exactly the
    pending orders are sent to that worker. A `ticket` identifies an order to its caller. Methods
    that return tickets return those of the orders that are no longer pending.
    """

    _pending: deque[tuple[Steer, int]] = field(default_factory=deque)
    _in_log: int | None = None
    """Number of orders that are durable in the stream's log; None before the log was read."""
    _inserts: bool = False
    """True until the text that a branch begins with is durable; the log stores that text like a
    Steer order."""

    @property
    def orders(self) -> list[Steer]:
        """Return the pending orders, to send them to the next worker of the stream."""
        return [order for order, _ in self._pending]

    def add(self, ids: Sequence[int], ticket: int) -> Steer:
        """Return a new order for a worker; raises `Overloaded` if too many are pending."""
        if len(self._pending) >= MAX_PENDING_STEERS:
            raise Overloaded(
                f"{MAX_PENDING_STEERS} texts of Steer orders already wait for this stream"
            )
        order = Steer(tuple(ids))
        self._pending.append((order, ticket))
        return order

    def begin(self, found: int, *, inserts: bool = False) -> list[int]:
        """Note that a new run continues after a log that holds `found` orders of the stream.

        The log may hold more orders than were confirmed, if the answer to an append was lost. With
        `inserts` the run first inserts the text of a branch.
        """
        before, self._in_log = self._in_log, found
        durable = 0 if before is None else found - before
        if self._inserts and durable:
            durable -= 1
        self._inserts = inserts
        return self._settle(durable)

    def confirm(self, ids: int) -> list[int]:
        """Note that `ids` token ids of the oldest pending Steer order are durable.

        If the order has more ids than that, it was cut because the stream reached its limit of
        tokens: the stream ends, and the order does not count as taken.
        """
        self._in_log = (self._in_log or 0) + 1
        if self._inserts:
            self._inserts = False
            return []
        is_whole = bool(self._pending) and len(self._pending[0][0].ids) == ids
        return self._settle(1) if is_whole else []

    def drop(self) -> list[int]:
        """Forget the pending Steer orders of a stream that no longer runs at this origin.

        Return their tickets, the numbers that `add` got for the requests that wait for them.
        """
        return self._settle(len(self._pending))

    def _settle(self, count: int) -> list[int]:
        return [self._pending.popleft()[1] for _ in range(min(count, len(self._pending)))]


@dataclass(slots=True)
class StreamProgress:
    """How far a stream has come at this origin, for operators; readers do not need it.

    Names that end in `_s` are seconds of the core's clock. Names that end in `_ms` are ms since
    `began_s`, when this origin made its record of the stream. `revision` increases with every
    change. `tokens` and `next_index` count from the stream's beginning, also across origins.
    `frame_ms` has the release times of the frames from index `first_timed` on.
    """

    began_s: float = 0.0
    tokens: int = 0
    next_index: int = 0
    resumes: int = 0
    revision: int = 0
    first_timed: int = 0
    frame_ms: array[int] = field(default_factory=lambda: array("I"))
    frame_tokens: FrameTokens = field(default_factory=FrameTokens)
    queue_ms: int | None = None
    """Time in ms from `began_s` until a worker was first ordered to generate the stream."""
    first_ms: int | None = None
    """Time in ms from `began_s` until the stream's first frame that is no notice was released; None
    if it was not released at this origin."""
    stages: tuple[StageTime, ...] = ()
    """Times of the stages of a pipeline in its last run, as the worker has reported them."""
    time: TimeSpent = field(default_factory=TimeSpent)
    _is_begun: bool = False

    def go_on(self, history: History, now_s: float) -> None:
        """Note that a worker is told to start the stream, or to continue it after its log."""
        if self.queue_ms is None:
            self.queue_ms = self._ms(now_s)
        self.tokens, self.next_index = len(history.ids), history.next_index
        self.frame_tokens = history.frame_tokens
        self._is_begun = history.is_begun
        next_index = self.next_index
        if self.first_timed + len(self.frame_ms) != next_index:
            self.first_timed = next_index
            del self.frame_ms[:]

    def released(self, index: int, tokens: int, now_s: float, revision: int) -> None:
        """Note that the frame at `index`, with `tokens` tokens, is durable and was released.

        `revision` is the new number of the changes of all streams; see `StreamTable.revision`.
        """
        self.tokens += tokens
        if tokens != self.frame_tokens.latest:
            self.frame_tokens.add(index, tokens)
        self.next_index, self.revision = index + 1, revision
        if not self._is_begun:
            self._is_begun, self.first_ms = True, self._ms(now_s)
            self.time.begun(now_s)
        timed = len(self.frame_ms)
        if timed < MAX_TIMED_FRAMES and self.first_timed + timed == index:
            self.frame_ms.append(int((now_s - self.began_s) * 1000))

    def time_spent(self, now_s: float) -> dict[str, object]:
        """Return where the time went so far: seconds by part, and `stages` for a pipeline."""
        parts: dict[str, object] = {**self.time.parts(now_s)}
        if self.stages:
            parts["stages"] = {one.stage: one.busy_us / 1e6 for one in self.stages}
        return parts

    def time_s(self, index: int) -> float | None:
        """Return when a frame was released here, by the core's clock; None if that is not kept."""
        place = index - self.first_timed
        if not 0 <= place < len(self.frame_ms):
            return None
        return self.began_s + self.frame_ms[place] / 1000

    def life(self, takeovers: int, now_s: float, coming: int = 0) -> StreamLife:
        """Return the statistics to store if the stream ends now.

        `coming` is the number of frames that are stored in the same commit as the end.
        """
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
    """The contents of the end that this origin has to write for a stream without a worker."""

    reason: FinishReason
    message: str | None = None
    retryable: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """A stream that is generated here or waits for a worker. Only the core changes it.

    Times are seconds of the core's clock.

    Attributes:
        has_producer: True once the stream has had a producer, so it must be taken over.
        epoch: The last epoch that is known here.
        worker: The worker that the stream is on, if any.
        run: Number of the stream's last run; run numbers are never used twice.
        is_cancelled: True once an order to cancel the stream was accepted. The order is carried
            out whatever happens.
        read_s: When a client last read the stream; before the first read, when the stream came to
            this origin.
        unread: True if no client reads the stream, so that read streams of its class come first.
        asked_s: When this origin admitted the stream as a new one; None if it did not.
        released_s: When the last frame was released here.
        new_engine: The fingerprint to store with the next record, if the engine that begins the
            stream is not the one in its stored recipe.
        is_retried: True once a failed run of the stream was retried, here or at another origin.
            The next failure ends the stream.
        failure: The message of the failed run that was retried here, for the readers' Notice.
        failed_on: The worker of that run, which gets the stream again only if no other one can.
        timed_ms: The Unix time in ms that was last stored with a record of the stream, or 0 (see
            `frame_times`).
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
    is_retried: bool = False
    failure: str | None = None
    failed_on: int | None = None
    timed_ms: int = 0
    is_delivered: bool = False
    """True if the usage that is stored with a worker's end counts all tokens as delivered."""
    place: int = 0
    """Position among the waiting streams of the same class; the lowest is first."""
    end: PendingEnd = PendingEnd(FinishReason.FAILED)
    """The end that is being written, in the state ENDING."""
    end_tries: int = 0
    """Number of attempts to write the current `end`."""
    end_nth: int = 0
    """Number of attempts to write any end of the stream; only the last one's answer counts."""
    _stored_engine: str = field(init=False)

    def __post_init__(self) -> None:
        self._stored_engine = self.recipe.fingerprint

    @property
    def made(self) -> int:
        """Return the number of the stream's tokens, or of its frames if it has no tokens."""
        progress = self.progress
        return progress.tokens if self.recipe.prompt_ids else progress.next_index

    @property
    def used(self) -> int:
        """Return the number of tokens of the prompt and of the output so far."""
        return len(self.recipe.prompt_ids) + self.progress.tokens

    def use_engine(self, fingerprint: str, history: History) -> None:
        """Set the engine in the recipe: the engine that began the stream, else the current one."""
        self.new_engine = None
        if history.engine is not None:
            self.recipe = self.recipe.made_by(history.engine)
        elif not history.is_begun:
            self.recipe = self.recipe.made_by(fingerprint)
            if fingerprint != self._stored_engine:
                self.new_engine = fingerprint

    def not_taken(self) -> Conflict:
        """Return the error for Steer orders that were pending when the stream ended or left."""
        fate = "was cancelled" if self.is_cancelled else "ended, or went to another origin,"
        return Conflict(
            f"the stream {fate} before the text was inserted",
            hint="send the text in the prompt of a new stream",
        )
