"""What a step may take, so that it lasts about as long as it should."""

from __future__ import annotations

from origin.scheduler.batch_limit import BatchLimit
from origin.scheduler.limits import Limits
from origin.scheduler.plan import Plan
from origin.scheduler.row_limit import RowLimit

AIM = 0.85
"""Of the time that a step may take: what the limits aim at is passed now and then."""
START_PATIENCE = 32
"""Steps in time before a run more is decoded: it stays until it ends."""
TURN_PATIENCE = 8
"""Steps in time before a step has a row more for those that take turns: that is soon undone."""


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
        return self._tokens.tokens

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
