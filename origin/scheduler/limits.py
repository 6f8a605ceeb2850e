"""What bounds the scheduler, and what a step may take, so that it lasts as long as it should."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.origin.scheduler.plan import Plan

INCREASE_TOKENS = 8
DECREASE = 7 / 8
DECREASE_DIVISOR = 8
MEAN_GAIN = 1 / 8
AIM = 0.85
"""Of the time that a step may take: what the limits aim at is passed now and then."""
START_PATIENCE = 32
"""Steps in time before a run more is decoded: it stays until it ends."""
TURN_PATIENCE = 8
"""Steps in time before a step has a row more for those that take turns: that is soon undone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings bound the first of them, and how long a step should take."""

    running: int = 64
    """Runs that hold pages."""
    waiting: int = 1024
    """Runs of one class that wait; preempted ones come on top."""
    step_tokens_least: int = 2 * PAGE_TOKENS
    """The step's limit of tokens adapts, but not below this: a chunk and some rows."""
    step_tokens_most: int = 64 * PAGE_TOKENS
    step_rows_least: int = 8
    """The step's limit of rows adapts, but not below this."""
    step_seconds: float = 0.05
    """How long a step should take: what a decoding run waits for its next token."""
    replay_rows: int = PAGE_TOKENS
    """Known tokens of one continued run in one step."""
    draft_rows: int = 8
    """Guesses for one run in one step."""


class StepLimits:
    """Three limits that learn from how long steps lasted, and rise only where they bind.

    Tokens of prompts can wait, so they are made fewer first. The row of a decoding run cannot, or
    its reader waits twice as long; so there is a limit of rows for which runs are started, and
    the others wait in their queues. What was started is decoded until it ends, while its rows
    take longer and longer; so there is another one, of the rows that a step has time for, where
    less urgent runs can take turns. That one is kept apart for steps with chunks of prompts,
    which leave less time for rows.
    """

    def __init__(self, limits: Limits) -> None:
        self.small = False
        """Whether a step takes no more than the least, whatever there is time for."""
        self._running = limits.running
        self._target = target = limits.step_seconds * AIM
        self._tokens = BatchLimit(limits.step_tokens_least, limits.step_tokens_most, target)
        least = limits.step_rows_least
        most = max(limits.running + limits.replay_rows, least)
        self._started = RowLimit(least, most, target, START_PATIENCE)
        self._in_time = {
            chunks: RowLimit(least, most, target, TURN_PATIENCE) for chunks in (False, True)
        }

    @property
    def tokens(self) -> int:
        """What the next step may take in all."""
        return self._tokens.least if self.small else self._tokens.tokens

    @property
    def rows(self) -> int:
        """Of decoding, those of continued runs and guesses among them."""
        return self._started.rows

    @property
    def started(self) -> int:
        """So many runs are decoded; a less urgent one than these waits."""
        return min(self._started.rows, self._running)

    def rows_in_time(self, *, chunks: bool) -> int:
        """Rows that a step has time for, beside chunks of prompts or without any."""
        return self._in_time[chunks].rows

    def observe(self, plan: Plan, seconds: float, *, waiting: bool) -> None:
        """The plan took so long; `waiting`: there are runs that were not started."""
        if self._tokens.is_least or seconds <= self._target:
            chunks = any(work.prefill for work in plan.work)
            if not (chunks and plan.skipped):  # rows made way for the chunks already
                wanted = plan.full or waiting
                self._started.observe(plan.rows, seconds, chunks=chunks, wanted=wanted)
            in_time = self._in_time[chunks]
            in_time.observe(plan.rows, seconds, chunks=chunks, wanted=plan.skipped)
        self._tokens.observe(plan.tokens, seconds, full=plan.full)


class BatchLimit:
    """Additive increase, multiplicative decrease (Chiu, Jain 1989), towards `seconds` a step.

    A step that took all it was allowed and was in time raises the limit by INCREASE_TOKENS, or
    doubles it while steps last less than half of the target; a step that was late lowers it to
    DECREASE of what that step took, but at most by half. This needs no model of the machine: a
    line fitted to (rows, prompt tokens, seconds) is not determined while all steps look alike,
    which is the normal case, and is wrong where long sequences make the cost a curve.

    It never falls below `least`: on a machine where even that is late, work goes on and is late.
    """

    def __init__(self, least: int, most: int, seconds: float) -> None:
        self.least = least
        self._most = most
        self._seconds = seconds
        self.tokens = least
        """What the next step may take."""

    @property
    def is_least(self) -> bool:
        return self.tokens == self.least

    def observe(self, tokens: int, seconds: float, *, full: bool) -> None:
        """A step of `tokens` took so long; `full`: the limit left something out."""
        if seconds > self._seconds:
            lower = max(int(min(tokens, self.tokens) * DECREASE), self.tokens // 2)
            self.tokens = max(self.least, lower)
        elif full:
            quick = seconds * 2 < self._seconds
            more = self.tokens * 2 if quick else self.tokens + INCREASE_TOKENS
            self.tokens = min(self._most, more)


class RowLimit:
    """Additive increase, multiplicative decrease, as of `BatchLimit`, in rows instead of tokens.

    It is raised by a row after `patience` steps in time, one after the other, and quickly only
    while steps last less than half of the target; it begins with the `least`. Where a lowered limit
    comes about only as runs end, it is not lowered again before.

    Fewer rows are not always quicker. Where a step with hardly a row in it is late already (its
    time is that of reading the weights), there would only be fewer of them: it rises then, too.
    """

    def __init__(self, least: int, most: int, seconds: float, patience: int) -> None:
        self._least = least
        self._most = most
        self._seconds = seconds
        self._patience = patience
        self._alone: dict[bool, float] = {}  # mean seconds with `least` rows or fewer, by `chunks`
        self._in_time = 0
        self.rows = least
        """How many a step may have now."""

    def observe(self, rows: int, seconds: float, *, chunks: bool, wanted: bool) -> None:
        """A step of so many rows, and with or without `chunks` of prompts, took so long.

        `wanted`: there would have been more if they were let in.
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
        if quickly or self._in_time >= self._patience:
            self._in_time = 0
            more = max(self.rows // DECREASE_DIVISOR, 1) if quickly else 1
            self.rows = min(self._most, self.rows + more)
