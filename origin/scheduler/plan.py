"""What one step of the engine is to do: the scheduler's answer, the model's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Drafts = Callable[[Sequence[tuple[int, int]]], Sequence[Sequence[int]]]
"""drafts([(run, most), …]): for each the ids, at most so many, that come next by its guess."""


class Work(NamedTuple):
    """Consecutive tokens of one run, to be pushed through the model in one step."""

    run: int
    start: int
    """Position of the first of `ids`; what lies before it is in `pages`."""
    ids: Sequence[int]
    """Known tokens, then `drafts` guessed ones."""
    pages: Sequence[int]
    """The run's block table, covering start + len(ids) positions. Valid until `Scheduler.done`."""
    prefill: bool
    """Chunks of the prompt, which begin at multiples of PAGE_TOKENS, or rows of decoding."""
    drafts: int
    """How many of the last `ids` are guesses."""
    draws: bool
    """All known tokens are cached after this: draw from the last known one's row, and from each
    guess's row while the guesses before it turn out right."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. At most one Work for each run; `preempted` runs wait again, without pages."""

    work: tuple[Work, ...] = ()
    preempted: tuple[int, ...] = ()
    full: bool = False
    """The limit on the step's tokens left something out."""
    skipped: bool = False
    """Runs of less urgent classes stood still, so that the most urgent ones are in time."""

    @property
    def rows(self) -> int:
        return rows_of(self.work)

    @property
    def tokens(self) -> int:
        return sum(len(work.ids) for work in self.work)


def rows_of(works: Iterable[Work]) -> int:
    """Rows of decoding, and one for each run that will have one when its prompt is cached."""
    return sum(1 if work.prefill else len(work.ids) for work in works)
