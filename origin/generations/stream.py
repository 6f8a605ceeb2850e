"""One stream that this origin generates, or may: what it knows of it, and asks of the ledger.

Several origins may share the ledger, so what is known here may be out of date: the epoch
tells, and the ledger has the last word.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import sub
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from tailrace.ledger.errors import (
    Conflict,
    Damaged,
    NotFound,
    Overloaded,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.frame import FinishReason, Notice, StreamEnd, encode
from tailrace.ledger.interface import Append, Ledger, Record, Refusal, StreamKind
from tailrace.ledger.record_extra import RecordExtra, StreamLife, life_numbers
from tailrace.ledger.telemetry.traces import TraceContext, Traces
from tailrace.ledger.validation import path_of
from tailrace.origin.generations.poison_streams import Suspicion
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import History, read_history
from tailrace.origin.workers.worker_frame import Ready, Steer
from tailrace.origin.workers.worker_process import WorkerSlot

MAX_PENDING_STEERS = 16
"""Of one stream."""

MAX_TIMED_FRAMES = 4096
"""Frames of a stream whose times are kept, in four bytes each; of later ones they are not."""
MAX_ENDED = 512
"""Streams that are remembered when they have ended; the ledger has the rest."""

TEXT = "text"
"""The kind of workers that take Asks, not Runs."""
UNKNOWN_EPOCH = 0
"""Of a stream whose takeover got no answer: it may have come through."""

SHOWN_FINGERPRINT_CHARS = 16
NS_PER_MS = 1_000_000

log = structlog.get_logger("runs")


@dataclass(slots=True)
class Steering:
    """The Steer orders of one stream that are not known to be durable, in order.

    A worker takes them in order and says with each emission which of its ids came from which
    order; the log keeps that. So what is still pending when the stream is taken over is exactly
    what the next worker is to be sent.
    """

    _pending: deque[tuple[Steer, asyncio.Future[None]]] = field(default_factory=deque)
    _in_log: int | None = None  # durable, of the stream; None before it was first read

    @property
    def orders(self) -> list[Steer]:
        """What a worker that takes the stream over is to be sent."""
        return [order for order, _ in self._pending]

    def add(self, ids: Sequence[int]) -> tuple[Steer, asyncio.Future[None]]:
        """A new order, and what is done when it is durable; `Overloaded` where many wait."""
        if len(self._pending) >= MAX_PENDING_STEERS:
            raise Overloaded(f"{MAX_PENDING_STEERS} texts wait to be taken up by this stream")
        order = Steer(tuple(ids))
        taken = asyncio.get_running_loop().create_future()
        self._pending.append((order, taken))
        return order, taken

    def begin(self, found: int) -> None:
        """Note that a new run goes on after a log with `found` orders.

        An append whose answer was lost may have stored more than was confirmed.
        """
        if self._in_log is not None:
            self._settle(found - self._in_log)
        self._in_log = found

    def confirm(self, ids: int) -> None:
        """Note that an order's ids are durable, `ids` of them: fewer than it has if it was cut.

        Then the stream ends for want of room, and the order was not taken as a whole.
        """
        self._in_log = (self._in_log or 0) + 1
        if self._pending and len(self._pending[0][0].ids) == ids:
            self._settle(1)

    def fail(self, error: TailraceError) -> None:
        """Nothing that is pending will be taken."""
        while self._pending:
            _, taken = self._pending.popleft()
            if not taken.done():
                taken.set_exception(error)

    def _settle(self, count: int) -> None:
        for _ in range(min(count, len(self._pending))):
            _, taken = self._pending.popleft()
            if not taken.done():
                taken.set_result(None)


@dataclass(slots=True)
class StreamProgress:
    """How far a stream has come at this origin: what operators see of it, and no reader needs.

    Times are seconds of the metrics' clock; `revision` is raised whenever any of it changes.

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
    first_ms: int | None = None
    """Until its first frame was released that is no notice of ours, if that was made here."""
    _is_begun: bool = False

    def go_on(self, history: History, now_s: float) -> None:
        """Note that a worker begins with it, or goes on behind what is in its log."""
        if self.queue_ms is None:
            self.queue_ms = self._ms(now_s)
        self.tokens, self.next_index = len(history.ids), history.next_index
        self._is_begun = history.is_begun
        next_index = self.next_index
        if self.first_timed + len(self.frame_ms) != next_index:
            self.first_timed = next_index
            del self.frame_ms[:]

    def released(self, index: int, tokens: int, now_s: float) -> None:
        """The frame of this index is durable, and completes so many tokens."""
        self.tokens += tokens
        self.next_index = index + 1
        if not self._is_begun:
            self._is_begun, self.first_ms = True, self._ms(now_s)
        timed = len(self.frame_ms)
        if timed < MAX_TIMED_FRAMES and self.first_timed + timed == index:
            self.frame_ms.append(self._ms(now_s))

    def time_s(self, index: int) -> float | None:
        """When a frame was released here, as far as that is kept."""
        place = index - self.first_timed
        if not 0 <= place < len(self.frame_ms):
            return None
        return self.began_s + self.frame_ms[place] / 1000

    def life(self, takeovers: int, now_s: float, coming: int = 0) -> StreamLife:
        """Return what to keep if it ends now, and `coming` frames are released with its end."""
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


@dataclass(frozen=True, slots=True)
class Claim:
    """A stream that was just claimed for a worker: all that is in its log.

    `lost` says why that worker cannot go on with it, `refusal` why its notices were not stored.
    """

    history: History
    lost: str | None = None
    refusal: Refusal | None = None


@dataclass(slots=True, eq=False)
class GeneratedStream:
    """A stream that is generated or waits for it; `slot` and `run` while on a worker.

    `started` says that epoch 1 was handed out: the next worker must take over. `epoch` is the
    last one that is known here, and `claiming` is held while it changes. `standing` says whether
    a worker's death may be its doing. `new_engine` is the fingerprint to store with the next
    record, where another engine begins it than its stored recipe says.

    `read_s` is when somebody last read it, or it came here; `unread` says that it gives way to
    streams of its class that are read.

    `ordered`: the worker has its order to run. `asked_s` is when it was admitted here, if it
    was, and `released_s` when the last frame of its run was released (monotonic clock).
    """

    id: bytes
    recipe: Recipe
    started: bool
    epoch: int = 1
    run: int = 0
    slot: WorkerSlot | None = None
    cancelled: bool = False
    ordered: bool = False
    read_s: float = 0.0
    unread: bool = False
    asked_s: float | None = None
    released_s: float | None = None
    standing: Suspicion = field(default_factory=Suspicion)
    steering: Steering = field(default_factory=Steering)
    progress: StreamProgress = field(default_factory=StreamProgress)
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)
    new_engine: str | None = None
    _stored_engine: str = field(init=False)

    def __post_init__(self) -> None:
        self._stored_engine = self.recipe.fingerprint

    async def claim(self, ledger: Ledger, ready: Ready, turn: asyncio.Lock) -> Claim | None:
        """Become the stream's producer, for a worker, and log what its readers should know.

        Its log is read when it is its `turn`; one that was just created does not wait for that.

        None where nothing is left to do here: it has ended, retention took it, or another
        origin took it over while it waited.
        """
        history = History()
        try:
            info = await ledger.info(self.id)
            if self.started:
                if info.ended or self.epoch not in (info.epoch, UNKNOWN_EPOCH):
                    return None
                self.epoch = await ledger.take_over(self.id)
            if self.started or info.next_index:
                history = await read_history(ledger, self.id, turn)
            self.started = True
        except NotFound:
            return None
        if history.has_end:
            return None
        self.steering.begin(len(history.steered))
        self.new_engine = None
        if history.engine is not None:
            self.recipe = self.recipe.made_by(history.engine)
        elif not history.is_begun:
            self.recipe = self.recipe.made_by(ready.fingerprint)
            if ready.fingerprint != self._stored_engine:
                self.new_engine = ready.fingerprint
        if (lost := _cannot_continue(self.recipe, ready, history)) is not None:
            return Claim(history, lost)
        notices = self.recipe.first_notices(history.next_index)
        appends = []
        for notice in notices + _inexact(self.recipe, ready, history):
            record = Record(encode(notice), ())
            appends.append(Append(self.id, self.epoch, history.next_index, record))
            history.add(record)
        refused = await ledger.append(appends) if appends else []
        return Claim(history, refusal=refused[0] if refused else None)

    async def append_end(
        self,
        ledger: Ledger,
        reason: FinishReason,
        message: str | None,
        retryable: bool,
        turn: asyncio.Lock,
        now: float,
    ) -> Refusal | None:
        """Take it over and write its end, unless it has one; gives why that was refused.

        `now` is on the metrics' clock.
        """
        takeovers = self.epoch - 1
        self.epoch = await ledger.take_over(self.id)
        try:
            history = await read_history(ledger, self.id, turn)
        except Damaged:
            # What cannot be read cannot be counted: a frame is at least one token.
            index = tokens = (await ledger.info(self.id)).next_index
        else:
            if history.has_end:
                return None
            index, tokens = history.next_index, len(history.ids)
        end = StreamEnd(
            total_tokens=tokens,
            finish_reason=reason,
            index=index,
            prompt_tokens=len(self.recipe.prompt_ids),
            message=message,
            retryable=retryable,
        )
        extra = RecordExtra(life=life_numbers(self.progress.life(takeovers, now)))
        record = Record(encode(end), (), extra.pack())
        refused = await ledger.append([Append(self.id, self.epoch, index, record)])
        return refused[0] if refused else None

    @property
    def made(self) -> int:
        """Tokens so far; frames, where its workers know of no tokens."""
        progress = self.progress
        return progress.tokens if self.recipe.prompt_ids else progress.next_index

    def not_taken(self) -> Conflict:
        """What becomes of text that it was to be steered with, when it is over here."""
        fate = "was cancelled" if self.cancelled else "ended, or went to another origin,"
        return Conflict(
            f"the stream {fate} before it took up the text", hint="open a new stream with it"
        )


async def find(ledger: Ledger, stream: bytes) -> GeneratedStream | None:
    """A generation that has not ended, as the ledger knows it; None where there is none."""
    try:
        info = await ledger.info(stream)
    except NotFound:
        return None
    except Damaged as error:  # not even its epoch can be believed: it is left as it is
        log.error("stream.damaged", stream=stream.hex(), error=error.message)
        return None
    if info.ended or info.kind is not StreamKind.GENERATION:
        return None
    try:
        recipe = Recipe.model_validate_json(info.recipe)
    except ValidationError as error:
        # Another version's, and left to an origin of that one. What it says stays out of the log.
        fields = [path_of(finding["loc"]) for finding in error.errors()]
        log.error("stream.unreadable", stream=stream.hex(), fields=fields)
        return None
    return GeneratedStream(stream, recipe, started=True, epoch=info.epoch)


def log_refusal(refusal: Refusal) -> None:
    log.warning(
        "append.refused",
        stream=refusal.append.stream.hex(),
        index=refusal.append.index,
        error=str(refusal.error),
    )


async def tell_first(ledger: Ledger, stream: bytes, recipe: Recipe) -> None:
    """Log what its readers are to be told before anything else, while a new stream waits."""
    appends = [
        Append(stream, 1, notice.index, Record(encode(notice), ()))
        for notice in recipe.first_notices(0)
    ]
    try:
        for refusal in await ledger.append(appends) if appends else ():
            log_refusal(refusal)
    except Unavailable as error:  # whoever claims the stream logs them
        log.warning("stream.not_told", stream=stream.hex(), error=str(error))


def _cannot_continue(recipe: Recipe, ready: Ready, history: History) -> str | None:
    """Why this worker cannot go on with what a lost one has begun."""
    if recipe.model != ready.model:
        return f"this origin serves {ready.model!r} now, not {recipe.model!r}"
    if (ready.kind == TEXT) != (not recipe.prompt_ids):
        return f"{ready.model!r} is now served by workers of another kind"
    if ready.kind == TEXT:
        return None
    # The same engine has the same vocabulary, which is not held against a million ids again.
    is_other = recipe.fingerprint != ready.fingerprint
    if is_other and max(chain(recipe.prompt_ids, history.ids)) >= ready.vocab:
        return f"{ready.model!r} has another vocabulary now"
    if len(recipe.prompt_ids) >= ready.context:
        return f"{ready.model!r} has a shorter context now"
    return None


def _inexact(recipe: Recipe, ready: Ready, history: History) -> list[Notice]:
    """What is to be logged where the continuation is not the one of the uninterrupted run.

    Workers of kind `text` know better what another version of theirs means, and say so themselves.
    """
    if not history.is_begun or recipe.fingerprint == ready.fingerprint or ready.kind == TEXT:
        return []
    before, now = (
        text[:SHOWN_FINGERPRINT_CHARS] for text in (recipe.fingerprint, ready.fingerprint)
    )
    notice = Notice(
        "inexact",
        f"another engine goes on ({now}, on {ready.device}) than the one that began ({before}): "
        "the text may differ from that of an uninterrupted run",
        history.next_index,
    )
    said = {(notice.code, notice.message) for notice in history.notices}
    return [] if (notice.code, notice.message) in said else [notice]


def record_span(
    traces: Traces, stream: GeneratedStream, reason: FinishReason, now_s: float
) -> None:
    """The span of its trace, made when it ends, so that a token costs nothing.

    Names are OpenTelemetry's for generative models; frames are sampled, the first one, the second,
    the fourth and so on. `now_s` is on the metrics' clock, as the times of its progress.
    """
    recipe, progress = stream.recipe, stream.progress
    life = progress.life(stream.epoch - 1, now_s)
    begun_ns = time.time_ns() - (life.whole_ms or 0) * NS_PER_MS
    operation = "chat" if recipe.messages else "text_completion"
    span = traces.begin(
        f"{operation} {recipe.model}",
        None if recipe.trace is None else TraceContext.parse(recipe.trace),
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tailrace",
            "gen_ai.request.model": recipe.model,
            "gen_ai.request.max_tokens": recipe.max_tokens,
            "gen_ai.usage.input_tokens": len(recipe.prompt_ids),
            "gen_ai.usage.output_tokens": progress.tokens,
            "tailrace.stream.id": stream.id.hex(),
            "tailrace.takeovers": life.takeovers or 0,
            "tailrace.resumes": progress.resumes,
        },
        start_ns=begun_ns,
    )
    span.set_attribute("gen_ai.response.finish_reasons", [reason.word])
    if reason in (FinishReason.FAILED, FinishReason.ORIGIN_LOST):
        span.set_attribute("error.type", reason.word)
    if life.queue_ms is not None:
        span.add_event("scheduled", timestamp=begun_ns + life.queue_ms * NS_PER_MS)
    nth = 1
    while nth <= len(progress.frame_ms):
        index, at_ms = progress.first_timed + nth - 1, progress.frame_ms[nth - 1]
        span.add_event("frame", {"tailrace.index": index}, begun_ns + at_ms * NS_PER_MS)
        nth *= 2
    span.end()
