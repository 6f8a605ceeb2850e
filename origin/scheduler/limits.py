"""Limits of the scheduler, some of which adapt to the measured duration of steps."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.origin.scheduler.plan import Plan

INCREASE_TOKENS = 8
DECREASE = 7 / 8
DECREASE_DIVISOR = 8
MEAN_GAIN = 1 / 8
AIM = 0.85
"""Share of `Limits.step_seconds` that is the target of the limits, since some steps take longer."""
STARTED_STEPS_PER_RAISE = 32
"""Number of consecutive steps within the target time after which one more run may be started.
The number is high, since a started run is decoded until it ends."""
CHUNK_STEPS_PER_RAISE = 8
"""Number of consecutive steps within the target time after which a step may have one more row of
decoding. The number is low, since less urgent runs can skip steps as soon as rows are too many."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed limits of the scheduler; settings give `running`, `waiting` and `step_seconds`."""

    running: int = 64
    """Maximum number of running runs, which are those that hold pages of the KV cache."""
    waiting: int = 1024
    """Maximum waiting runs of one class, not counting preempted runs."""
    step_tokens_least: int = 2 * PAGE_TOKENS
    """Minimum of the adaptive limit of tokens per step: enough for one page of a prompt, and for as
    many decoding rows as a page has tokens."""
    step_tokens_most: int = 64 * PAGE_TOKENS
    step_rows_least: int = 8
    """Minimum of the adaptive limit of rows per step."""
    step_seconds: float = 0.05
    """Target duration of a step in seconds: the time between two tokens of a decoding run."""
    replay_rows: int = PAGE_TOKENS
    """Maximum tokens per step that one continued run replays from the log."""
    draft_rows: int = 8
    """Maximum drafts (guessed tokens) for one run per step."""


class StepLimits:
    """Limits that adapt to the duration of steps, and rise only while they are reached.

    A decoding run takes one row (one token) of each step. There are three limits. The limit of
    tokens per step is lowered first, because the tokens of prompts can wait. Decoding rows cannot
    wait: the reader of a run that skips a step waits twice as long. So the second limit bounds the
    number of started runs, and other runs wait in their queues. A started run is decoded until it
    ends, and its rows get slower as it grows. So the third limit bounds the rows that a step has
    time for, and less urgent runs take turns within it. The third limit is kept separately for
    steps with chunks of prompts, which leave less time for rows.
    """

    def __init__(self, limits: Limits) -> None:
        self.small = False
        """True if a step takes no more tokens than the minimum, even if it has time for more."""
        self._running = limits.running
        self._target = target = limits.step_seconds * AIM
        self._tokens = BatchLimit(limits.step_tokens_least, limits.step_tokens_most, target)
        least = limits.step_rows_least
        most = max(limits.running + limits.replay_rows, least)
        self._started = RowLimit(least, most, target, STARTED_STEPS_PER_RAISE)
        self._in_time = {
            chunks: RowLimit(least, most, target, CHUNK_STEPS_PER_RAISE) for chunks in (False, True)
        }

    @property
    def tokens(self) -> int:
        """Maximum tokens of the next step, prompt and decode together."""
        return self._tokens.least if self.small else self._tokens.tokens

    @property
    def rows(self) -> int:
        """Maximum rows of decoding, including the rows of continued runs and of drafts."""
        return self._started.rows

    @property
    def started(self) -> int:
        """Maximum number of decoding runs; a less urgent run waits until there are fewer."""
        return min(self._started.rows, self._running)

    def rows_in_time(self, *, chunks: bool) -> int:
        """Return the number of rows that a step has time for, with or without chunks of prompts."""
        return self._in_time[chunks].rows

    def observe(self, plan: Plan, seconds: float, *, waiting: bool) -> None:
        """Adapt the limits to the duration of a step.

        waiting: True if some runs were not started.
        """
        if self._tokens.is_least or seconds <= self._target:
            chunks = any(work.prefill for work in plan.work)
            # If chunks of prompts displaced rows, the step's duration says nothing about the limit
            # of rows.
            if not (chunks and plan.skipped):
                wanted = plan.full or waiting
                self._started.observe(plan.rows, seconds, chunks=chunks, wanted=wanted)
            in_time = self._in_time[chunks]
            in_time.observe(plan.rows, seconds, chunks=chunks, wanted=plan.skipped)
        self._tokens.observe(plan.tokens, seconds, full=plan.full)


class BatchLimit:
    """An AIMD limit (Chiu, Jain 1989) of tokens per step, for a target of `seconds` per step.

    A step within the target time that used the whole limit raises the limit by INCREASE_TOKENS, or
    doubles it if the step lasted less than half of the target. A step beyond the target time lowers
    the limit to DECREASE times the tokens of the step, but at most by half. This needs no model of
    the machine's speed: a line fitted to (rows, prompt tokens, seconds) is undetermined while all
    steps look alike, which is the normal case, and is wrong for long sequences, whose cost is not
    linear.

    The limit never falls below `least`: on a machine where even steps of `least` tokens exceed the
    target, steps stay too long.
    """

    def __init__(self, least: int, most: int, seconds: float) -> None:
        self.least = least
        self._most = most
        self._seconds = seconds
        self.tokens = least
        """Maximum tokens of the next step."""

    @property
    def is_least(self) -> bool:
        return self.tokens == self.least

    def observe(self, tokens: int, seconds: float, *, full: bool) -> None:
        """Adapt to a step of `tokens` that took `seconds`.

        full: True if the limit excluded some work from the step.
        """
        if seconds > self._seconds:
            lower = max(int(min(tokens, self.tokens) * DECREASE), self.tokens // 2)
            self.tokens = max(self.least, lower)
        elif full:
            quick = seconds * 2 < self._seconds
            more = self.tokens * 2 if quick else self.tokens + INCREASE_TOKENS
            self.tokens = min(self._most, more)


class RowLimit:
    """An AIMD limit like `BatchLimit`, of rows instead of tokens.

    It starts at `least` and is raised by one row after `steps_per_raise` consecutive steps within
    the target time, or quickly while steps last less than half of the target. After the limit was
    lowered, steps may have more rows than it allows until enough runs have ended; these steps do
    not lower it again.

    Fewer rows are not always faster. If even a step with hardly any row exceeds the target (its
    time is spent on reading the weights), fewer rows would not help, and the limit rises
    nevertheless.
    """

    def __init__(self, least: int, most: int, seconds: float, steps_per_raise: int) -> None:
        self._least = least
        self._most = most
        self._seconds = seconds
        self._steps_per_raise = steps_per_raise
        # Mean seconds of the smallest steps (at most `least` rows). The key is True for steps with
        # chunks of prompts.
        self._alone: dict[bool, float] = {}
        self._in_time = 0
        self.rows = least
        """Maximum rows of a step."""

    def observe(self, rows: int, seconds: float, *, chunks: bool, wanted: bool) -> None:
        """Adapt to a step of `rows` rows, with or without `chunks` of prompts, that took `seconds`.

        wanted: True if the step would have had more rows without the limit.
        """
        if rows <= self._least:
            mean = self._alone.setdefault(chunks, seconds)
            self._alone[chunks] = mean + (seconds - mean) * MEAN_GAIN
        hopeless = self._alone.get(chunks, 0.0) > self._seconds
        if seconds > self._seconds and not hopeless:
            self._in_time = 0
            if rows <= self.rows:
                lower = rows - max(rows // DECREASE_DIVISOR, 1)
                self.rows = min(self.rows, max(self._least, lower))
        elif wanted and rows >= self.rows:
            self._rise(quickly=hopeless or seconds * 2 < self._seconds)

    def _rise(self, *, quickly: bool) -> None:
        self._in_time += 1
        if quickly or self._in_time >= self._steps_per_raise:
            self._in_time = 0
            more = max(self.rows // DECREASE_DIVISOR, 1) if quickly else 1
            self.rows = min(self._most, self.rows + more)
