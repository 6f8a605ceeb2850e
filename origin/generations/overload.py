"""The ladder of an origin: what it reads, and what its rungs do to streams and workers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import structlog

from ledger.backoff import spread_ms
from ledger.errors import Overloaded
from ledger.frame import Priority
from origin.generations.ladder import SHORT_BATCH_TOKENS, Ladder, Readings, Rung
from origin.generations.recipe import Recipe
from origin.generations.stream import TEXT, GeneratedStream
from origin.generations.table import StreamTable
from origin.metrics import Metrics
from origin.workers.worker_frame import Ease
from origin.workers.worker_process import WorkerSlot

OVERLOAD_RETRY_MS = 5_000
"""At least; those who are refused are told different times."""

log = structlog.get_logger("overload")


class Overload:
    """Owned by the runs; `look` is called now and then."""

    def __init__(
        self,
        table: StreamTable,
        metrics: Metrics,
        random: Random,
        most_wait_s: float,
        is_up: Callable[[str], bool] = lambda model: True,
    ) -> None:
        """`is_up`: whether a model has a worker; who waits for one to load, waits for that."""
        self._is_up = is_up
        self.ladder = Ladder(most_wait_s)
        self._table = table
        self._random = random
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
                retry_after_ms=spread_ms(OVERLOAD_RETRY_MS, self._random),
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
