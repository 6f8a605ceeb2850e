"""One run as the scheduler sees it: its tokens, and how many of them are in which pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernels.shapes import PAGE_TOKENS
from ledger.wire.schema import Priority
from origin.scheduler.pages import page_key
from origin.scheduler.plan import Work


def pages_for(tokens: int) -> int:
    """How many pages hold so many positions."""
    return -(-tokens // PAGE_TOKENS)


class ScheduledRun:
    """`ids` are the known tokens, of which the first `prompt` are the prompt; `cached` of them
    have their keys and values in `pages`, and at most `most` will ever be known."""

    __slots__ = (
        "_keys",
        "accepted",
        "awaited",
        "cached",
        "continued",
        "ids",
        "most",
        "pages",
        "priority",
        "prompt",
        "run",
        "sequence",
        "turn",
        "unread",
        "work",
        "yielded",
    )

    def __init__(
        self,
        run: int,
        priority: Priority,
        sequence: int,
        prompt: Sequence[int],
        generated: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.run = run
        self.priority = priority
        self.sequence = sequence
        """Order of arrival, over all classes."""
        self.ids = [*prompt, *generated]
        self.prompt = len(prompt)
        self.most = len(prompt) + max(max_tokens, len(generated))
        self.continued = bool(generated)
        """It ran before, on a worker that is gone, and its reader sees a pause."""
        self.cached = 0
        self.pages: list[int] = []
        self.unread = False
        """Nobody reads its stream: it comes after those of its class that somebody reads."""
        self.turn = 0
        """When it decoded last: the smallest is next of its class."""
        self.work: Work | None = None
        """What the step that is under way does for it."""
        self.accepted = 0
        """How many guesses of `work` are known to be right."""
        self.awaited = False
        """The last of `ids` stands for a token that is being drawn."""
        self.yielded = False
        """It has made room although it was the senior, which it does not do twice."""
        self._keys: list[bytes] = []

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
