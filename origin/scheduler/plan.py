"""What one step of the engine is to do, and the runs that it is done for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.pages import page_key

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


def pages_for(tokens: int) -> int:
    """How many pages hold so many positions."""
    return -(-tokens // PAGE_TOKENS)


@dataclass(slots=True, eq=False)
class ScheduledRun:
    """One run as the scheduler sees it: its tokens, and how many of them are in which pages.

    Made of a prompt, and of what is to follow it. `ids` are the known tokens, of which the first
    `prompt` are the prompt; `cached` of them have their keys and values in `pages`, and at most
    `most` will ever be known.
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
    """It ran before, on a worker that is gone, and its reader sees a pause."""
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    unread: bool = False
    """Nobody reads its stream: it comes after those of its class that somebody reads."""
    turn: int = 0
    """When it decoded last: the smallest is next of its class."""
    work: Work | None = None
    """What the step that is under way does for it."""
    accepted: int = 0
    """How many guesses of `work` are known to be right."""
    awaited: bool = False
    """The last of `ids` stands for a token that is being drawn."""
    yielded: bool = False
    """It has made room although it was the senior, which it does not do twice."""
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
        """Its place in its class: the least is first to start and last to make room."""
        return self.unread, self.sequence

    @property
    def missing(self) -> int:
        """Known tokens that are not cached; 0 only between a step and the token that it drew."""
        return len(self.ids) - self.cached

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt

    @property
    def decoding(self) -> bool:
        """Only the last known token is not cached, and it was generated."""
        return len(self.ids) - self.cached == 1 and self.cached >= self.prompt

    @property
    def spent(self) -> bool:
        """What is being drawn for it is its last token."""
        return self.awaited and len(self.ids) >= self.most

    def chunk_end(self, start: int) -> int:
        """Where the prompt's chunk at `start` ends: at a multiple of PAGE_TOKENS, or with it."""
        return min(self.prompt, (start // PAGE_TOKENS + 1) * PAGE_TOKENS)

    @property
    def reusable_pages(self) -> int:
        """How many pages may be found instead of computed: the last known token's row is needed."""
        return (len(self.ids) - 1) // PAGE_TOKENS

    def key(self, page: int) -> bytes:
        """The key of the page at this place in the block table; all its tokens must be known."""
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
        """These tokens come next; returns how many more guesses of the step are right by it.

        A right guess counts once a token follows it, which was drawn from its row: the last known
        token always goes through the model again.
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
        """Nothing is cached any more; returns the pages that were held."""
        pages, self.pages = self.pages, []
        self.cached = 0
        return pages
