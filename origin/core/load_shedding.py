"""Load shedding: an overloaded origin reduces its work, one level after another.

Each level includes the measures of the levels below it; running streams continue at every level.
Two readings determine the level: the longest time that a stream, except those of class batch, has
waited for a worker to begin it, and the free memory. The duration of engine steps does not: the
scheduler's limits already adapt to it, and if even a step with one row is late, no level helps.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tailrace.ledger.errors import Overloaded
from tailrace.ledger.frame import Priority
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.workers.worker_frame import SetShedding

RISE_S = 5.0
"""Minimum seconds between two increases of the level, which need a reading that is too high."""
FALL_S = 15.0
"""Minimum seconds between two decreases of the level, during which all readings were low."""
WAIT_LOW = 1 / 3
"""Share of the maximum wait up to which a wait counts as low."""
FREE_MEMORY_HIGH, FREE_MEMORY_LOW = 0.10, 0.05
"""Shares of free memory: FREE_MEMORY_HIGH or more is enough, less than FREE_MEMORY_LOW too little.
"""
FREE_MEMORY_CRITICAL = 0.02
"""Share of free memory below which the longest streams of class batch end, one at a time."""
SHORT_BATCH_TOKENS = 128
"""Maximum number of tokens of a new stream of class batch, from level SHORT_BATCH on."""

OVERLOAD_RETRY_MS = 5_000
"""Minimum time in ms after which a refused request may be sent again."""


class LoadLevel(IntEnum):
    """A level of load shedding; `word` is its name in logs."""

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
    Priority.BATCH: LoadLevel.NO_BATCH,
    Priority.STANDARD: LoadLevel.NO_STANDARD,
    Priority.INTERACTIVE: LoadLevel.NOTHING_NEW,
}
"""The level from which new streams of a class are refused."""


class Readings(NamedTuple):
    """The load now: `wait_s` is the longest wait of a stream, `free_memory` a share from 0 to 1."""

    wait_s: float
    free_memory: float


class LoadShedding:
    """The load shedding level of one origin. A wait of more than `most_wait_s` is too long.

    Times are seconds of the core's clock.
    """

    def __init__(self, most_wait_s: float) -> None:
        self.level = LoadLevel.NORMAL
        self.reason = ""
        """The last reading that was too high, in words."""
        self._most_wait_s = most_wait_s
        self._changed_s = 0.0
        self._last_high_s = 0.0

    def look(self, readings: Readings, now: float) -> bool:
        """Adapt the level to the current load; return True if the level has changed."""
        reason = self._too_much(readings)
        if reason:
            self.reason, self._last_high_s = reason, now
            return now - self._changed_s >= RISE_S and self._step(+1, now)
        if not self._is_low(readings):
            self._last_high_s = now
            return False
        return now - max(self._changed_s, self._last_high_s) >= FALL_S and self._step(-1, now)

    def admit(self, priority: Priority) -> None:
        """Raise `Overloaded` if new streams of a class are refused now."""
        if self.refuses(priority):
            raise Overloaded(
                f"new {priority.word} streams are refused for now: {self.reason}",
                min_retry_ms=OVERLOAD_RETRY_MS,
            )

    def refuses(self, priority: Priority) -> bool:
        """Return True if new streams of a class are refused now."""
        return self.level >= REFUSED_FROM[priority]

    def is_critical(self, readings: Readings) -> bool:
        """Return True if memory is so short that the longest running batch stream must end."""
        return readings.free_memory < FREE_MEMORY_CRITICAL

    def shortened(self, recipe: Recipe) -> Recipe:
        """Return the recipe to use for a new stream; a stream of class batch may be shortened."""
        is_batch = recipe.priority == Priority.BATCH.word
        if self.level < LoadLevel.SHORT_BATCH or not is_batch:
            return recipe
        if recipe.max_tokens <= SHORT_BATCH_TOKENS:
            return recipe
        told = f"at most {SHORT_BATCH_TOKENS} tokens now, not {recipe.max_tokens}"
        notices = (*recipe.notices, ("shortened", f"{told}: {self.reason}"))
        return recipe.model_copy(update={"max_tokens": SHORT_BATCH_TOKENS, "notices": notices})

    @property
    def worker_mode(self) -> SetShedding:
        """Return the order that sets the load shedding of a worker of kind `tokens`."""
        small_steps = self.level >= LoadLevel.SMALL_STEPS
        return SetShedding(small_steps=small_steps, guess=self.level < LoadLevel.NO_GUESSES)

    def _too_much(self, readings: Readings) -> str:
        if readings.free_memory < FREE_MEMORY_LOW:
            return f"{readings.free_memory:.1%} of memory is left"
        if readings.wait_s > self._most_wait_s:
            return f"a stream has waited {readings.wait_s:.0f} s for a worker to start it"
        return ""

    def _is_low(self, readings: Readings) -> bool:
        is_quick = readings.wait_s <= self._most_wait_s * WAIT_LOW
        return is_quick and readings.free_memory >= FREE_MEMORY_HIGH

    def _step(self, by: int, now: float) -> bool:
        level = LoadLevel(min(max(self.level + by, LoadLevel.NORMAL), LoadLevel.NOTHING_NEW))
        is_new = level is not self.level
        if is_new:
            self.level, self._changed_s = level, now
        return is_new
