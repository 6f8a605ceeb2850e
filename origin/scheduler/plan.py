"""The plan of one engine step, and the runs that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.pages import page_key

Drafts = Callable[[Sequence[tuple[int, int]]], Sequence[Sequence[int]]]
"""Function that takes a list of (run, maximum number) and returns the drafts, guessed ids, of each
run."""


class Work(NamedTuple):
    """Consecutive tokens of one run that one step pushes through the model."""

    run: int
    start: int
    """Position of the first of `ids`; earlier positions are in `pages`."""
    ids: Sequence[int]
    """Known tokens, followed by drafts (guessed tokens), whose number is `drafts`."""
    pages: Sequence[int]
    """The run's block table, covering start + len(ids) positions. Valid until `Scheduler.done`."""
    prefill: bool
    """True for chunks of the prompt, which begin at multiples of PAGE_TOKENS; False for rows of
    decoding."""
    drafts: int
    """Number of drafts at the end of `ids`."""
    draws: bool
    """True if the KV cache has all known tokens after this step. Then the step draws a token from
    the logits at the last known token, and one from the logits at each draft, up to the first wrong
    draft."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, with at most one Work per run; `preempted` runs lost their pages and wait again."""

    work: tuple[Work, ...] = ()
    preempted: tuple[int, ...] = ()
    full: bool = False
    """True if the limit of tokens excluded some work."""
    skipped: bool = False
    """True if runs of less urgent classes skipped the step, so that the most urgent ones are on
    time."""

    @property
    def rows(self) -> int:
        return rows_of(self.work)

    @property
    def tokens(self) -> int:
        return sum(len(work.ids) for work in self.work)


def rows_of(works: Iterable[Work]) -> int:
    """Return the number of rows of a step.

    A Work for decoding has one row for each of its tokens, and a Work for prefill counts as one.
    """
    return sum(1 if work.prefill else len(work.ids) for work in works)


def pages_for(tokens: int) -> int:
    """Return the number of pages for this many positions."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(slots=True, eq=False)
class ScheduledRun:
    """One run as the scheduler sees it: its tokens, and the pages in which they are cached.

    A ScheduledRun is made from the prompt and the tokens that follow the prompt. `ids` are the
    known tokens, of which the first `prompt` are the prompt. `cached` of them have their keys and
    values in `pages`, and at most `most` will ever be known.
    """

    run: int
    priority: Priority
    sequence: int
    """Order of arrival, over all classes."""
    prompt_ids: InitVar[Sequence[int]]
    generated: InitVar[Sequence[int]]
    max_tokens: InitVar[int]
    ids: list[int] = field(init=False)
    prompt: int = field(init=False)
    most: int = field(init=False)
    continued: bool = field(init=False)
    """True if another worker began the run; the reader waits until this worker continues it."""
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    unread: bool = False
    """True if no client reads the stream; the run then comes after all runs of its class that are
    read."""
    turn: int = 0
    """Sequence number of the run's last decode step; the lowest number in a class is next."""
    work: Work | None = None
    """Work for this run in the current step."""
    accepted: int = 0
    """Number of drafts of `work` that are known to be right."""
    awaited: bool = False
    """True if the last of `ids` is a placeholder for a token that is being drawn."""
    yielded: bool = False
    """True if the run was preempted although it was the first (`RunTable.senior`).

    That may happen only once to a run.
    """
    _keys: list[bytes] = field(default_factory=list)

    def __post_init__(
        self, prompt_ids: Sequence[int], generated: Sequence[int], max_tokens: int
    ) -> None:
        self.ids = [*prompt_ids, *generated]
        self.prompt = len(prompt_ids)
        self.most = len(prompt_ids) + max(max_tokens, len(generated))
        self.continued = bool(generated)

    @property
    def order(self) -> tuple[bool, int]:
        """Sort key within the run's class: the lowest is started first and preempted last."""
        return self.unread, self.sequence

    @property
    def missing(self) -> int:
        """Number of known tokens that are not cached.

        This is 0 only after a step, until the token that the step drew is appended.
        """
        return len(self.ids) - self.cached

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt

    @property
    def decoding(self) -> bool:
        """True if only the last known token is not cached, and it was generated."""
        return len(self.ids) - self.cached == 1 and self.cached >= self.prompt

    @property
    def spent(self) -> bool:
        """True if the token that is being drawn is the run's last."""
        return self.awaited and len(self.ids) >= self.most

    def chunk_end(self, start: int) -> int:
        """Return the end of the chunk at `start`: the end of its page, or of the prompt."""
        return min(self.prompt, (start // PAGE_TOKENS + 1) * PAGE_TOKENS)

    @property
    def reusable_pages(self) -> int:
        """Maximum number of pages that may be taken from the cache instead of computed.

        The last known token must always be computed, since the next draw needs its row.
        """
        return (len(self.ids) - 1) // PAGE_TOKENS

    def key(self, page: int) -> bytes:
        """Return the key of a page, by its index in the block table.

        All its tokens must be known.
        """
        keys = self._keys
        while len(keys) <= page:
            start = len(keys) * PAGE_TOKENS
            prefilled = min(max(self.prompt - start, 0), PAGE_TOKENS)
            ids = self.ids[start : start + PAGE_TOKENS]
            keys.append(page_key(keys[-1] if keys else b"", ids, prefilled))
        return keys[page]

    def reusable_keys(self) -> Iterator[bytes]:
        return map(self.key, range(self.reusable_pages))

    def learn(self, ids: Sequence[int]) -> int:
        """Append the next tokens; return how many more drafts of the step they show to be right.

        A draft counts as right only once the token after it is known, too. So the last known token
        is never cached, and goes through the model again.
        """
        self.ids += ids
        work, before = self.work, self.accepted
        if work is None or not work.drafts:
            return 0
        guesses = work.ids[-work.drafts :]
        known = self.ids[work.start + len(work.ids) - work.drafts :]
        while self.accepted < min(len(guesses), len(known) - 1):
            if guesses[self.accepted] != known[self.accepted]:
                break
            self.accepted += 1
        return self.accepted - before

    def forget(self) -> list[int]:
        """Forget the cached positions, and return the pages that were held."""
        pages, self.pages = self.pages, []
        self.cached = 0
        return pages
