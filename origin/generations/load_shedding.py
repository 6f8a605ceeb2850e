"""What an origin does less of while it has too much to do, one rung after another.

Each rung keeps what those below it do. Streams that run go on on every rung. What drives it: how
long a stream that is not of class batch has waited for a worker to begin it, and the memory that is
left. How long steps take does not: the scheduler's limits follow that already, and where one row
is late, a ladder could not make it quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import structlog

from tailrace.ledger.errors import Overloaded
from tailrace.ledger.frame import Priority
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream import TEXT, GeneratedStream
from tailrace.origin.generations.table import StreamTable
from tailrace.origin.metrics import Metrics
from tailrace.origin.workers.worker_frame import Ease
from tailrace.origin.workers.worker_process import WorkerSlot

CLIMB_S = 5.0
"""Between two rungs up, while a reading is too high."""
DESCEND_S = 15.0
"""Between two rungs down, while all readings are low."""
WAIT_LOW = 1 / 3
"""Of the wait that is too long: below that it is low."""
FREE_MEMORY_HIGH, FREE_MEMORY_LOW = 0.10, 0.05
"""Share of memory that is left: above the one all is well, below the other it is too little."""
FREE_MEMORY_CRITICAL = 0.02
"""Below this the longest streams of class batch end, one at a time."""
SHORT_BATCH_TOKENS = 128
"""The most that a new stream of class batch generates from that rung on."""

OVERLOAD_RETRY_MS = 5_000
"""At least; those who are refused are told different times."""

log = structlog.get_logger("overload")


class Rung(IntEnum):
    """The word is in logs."""

    NORMAL = 0
    SMALL_STEPS = 1
    NO_GUESSES = 2
    SHORT_BATCH = 3
    NO_BATCH = 4
    NO_STANDARD = 5
    NOTHING_NEW = 6

    @property
    def word(self) -> str:
        return self.name.lower()


REFUSED_FROM = {
    Priority.BATCH: Rung.NO_BATCH,
    Priority.STANDARD: Rung.NO_STANDARD,
    Priority.INTERACTIVE: Rung.NOTHING_NEW,
}


@dataclass(frozen=True, slots=True)
class Readings:
    """`wait_s` of the stream that has waited longest; `free_memory` as a share of all of it."""

    wait_s: float
    free_memory: float


class Ladder:
    """`most_wait_s` is a wait that is too long. Every `now` is seconds of one clock."""

    def __init__(self, most_wait_s: float) -> None:
        self.rung = Rung.NORMAL
        self.reason = ""
        """What has driven it up last."""
        self._most_wait_s = most_wait_s
        self._changed = 0.0
        self._last_high = 0.0

    def look(self, readings: Readings, now: float) -> bool:
        """Note how things are; whether that leads to another rung."""
        reason = self._too_much(readings)
        if reason:
            self.reason, self._last_high = reason, now
            return now - self._changed >= CLIMB_S and self._step(+1, now)
        if not self._is_low(readings):
            self._last_high = now
            return False
        return now - max(self._changed, self._last_high) >= DESCEND_S and self._step(-1, now)

    def refuses(self, priority: Priority) -> bool:
        return self.rung >= REFUSED_FROM[priority]

    def is_critical(self, readings: Readings) -> bool:
        """Whether what runs has to make room for the rest."""
        return readings.free_memory < FREE_MEMORY_CRITICAL

    def _too_much(self, readings: Readings) -> str:
        if readings.free_memory < FREE_MEMORY_LOW:
            return f"{readings.free_memory:.1%} of memory is left"
        if readings.wait_s > self._most_wait_s:
            return f"a stream has waited {readings.wait_s:.0f} s to be begun"
        return ""

    def _is_low(self, readings: Readings) -> bool:
        is_quick = readings.wait_s <= self._most_wait_s * WAIT_LOW
        return is_quick and readings.free_memory >= FREE_MEMORY_HIGH

    def _step(self, by: int, now: float) -> bool:
        rung = Rung(min(max(self.rung + by, Rung.NORMAL), Rung.NOTHING_NEW))
        is_new = rung is not self.rung
        if is_new:
            self.rung, self._changed = rung, now
        return is_new


class Overload:
    """Owned by the runs; `look` is called now and then."""

    def __init__(
        self,
        table: StreamTable,
        metrics: Metrics,
        most_wait_s: float,
        is_up: Callable[[str], bool] = lambda model: True,
    ) -> None:
        """`is_up`: whether a model has a worker; who waits for one to load, waits for that."""
        self._is_up = is_up
        self.ladder = Ladder(most_wait_s)
        self._table = table
        metrics.overload.set_function(lambda: self.ladder.rung)

    def look(self, now: float, free_memory: float) -> GeneratedStream | None:
        """Climb or descend, as things are; gives a stream that is to end, if memory is critical."""
        readings = Readings(self._longest_wait_s(now), free_memory)
        before = self.ladder.rung
        if self.ladder.look(readings, now):
            rung = self.ladder.rung
            tell = log.warning if rung > before else log.info
            tell("overload.rung", rung=rung.word, was=before.word, reason=self.ladder.reason)
        return self._longest_batch() if self.ladder.is_critical(readings) else None

    def ease(self, slot: WorkerSlot) -> None:
        """Tell a worker what it does less of; those that answer in text have no steps."""
        if slot.ready is not None and slot.ready.kind != TEXT:
            rung = self.ladder.rung
            order = Ease(small_steps=rung >= Rung.SMALL_STEPS, guess=rung < Rung.NO_GUESSES)
            slot.send(order, 0)

    def admit(self, priority: Priority) -> None:
        """Raises `Overloaded` where new streams of a class are refused now."""
        if self.ladder.refuses(priority):
            raise Overloaded(
                f"too much to do for new {priority.word} streams: {self.ladder.reason}",
                min_retry_ms=OVERLOAD_RETRY_MS,
            )

    def shortened(self, recipe: Recipe) -> Recipe:
        """The recipe of a new stream; of class batch it may have to be a shorter one."""
        is_batch = recipe.priority == Priority.BATCH.word
        if self.ladder.rung < Rung.SHORT_BATCH or not is_batch:
            return recipe
        if recipe.max_tokens <= SHORT_BATCH_TOKENS:
            return recipe
        told = f"at most {SHORT_BATCH_TOKENS} tokens now, not {recipe.max_tokens}"
        notices = (*recipe.notices, ("shortened", f"{told}: {self.ladder.reason}"))
        return recipe.model_copy(update={"max_tokens": SHORT_BATCH_TOKENS, "notices": notices})

    def _longest_wait_s(self, now: float) -> float:
        """Until it is begun, of what somebody reads and is not of class batch."""
        since = (
            stream.asked_s
            for stream in self._table.by_id.values()
            if stream.asked_s is not None and stream.released_s is None
            if not (stream.standing.begun or stream.unread) and self._is_up(stream.recipe.model)
            if stream.recipe.priority != Priority.BATCH.word
        )
        return now - min(since, default=now)

    def _longest_batch(self) -> GeneratedStream | None:
        """The stream of class batch that has made most, of those that run."""
        running = (
            stream
            for stream in self._table.by_id.values()
            if stream.ordered and stream.recipe.priority == Priority.BATCH.word
        )
        return max(running, key=lambda stream: stream.progress.tokens, default=None)
