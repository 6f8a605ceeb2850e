"""Speculative decoding: guesses of the tokens that come next, and how many were right.

The engine decodes the rows [last, d1 .. dk] in one step and draws at each of their positions with
the run's own seed (and, under a grammar, the mask there). What was drawn counts; the drafts only
say how many of the draws were drawn from the right row. So drafts never change a text, and a
drafter may be as wrong or as forgetful as it likes: a continuation starts a new one.
(Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, accept by
chance; here a draw is a function of row, seed and position, so equality is enough.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kernels.sampler import Sampling
from origin.models.model import PREFILL_CHUNK_TOKENS, Draw, Model, Piece
from origin.scheduler.pages import PagePool

MAX_DRAFT_TOKENS = 8
"""Drafts that one step verifies of one run."""
FIRST_DRAFT_TOKENS = 4
NGRAM_TOKENS = (4, 2)
"""Lengths of the ends of a text that prompt lookup looks for, the longest first."""
LOOKUP_TOKENS = 16 * 1024
"""How far back prompt lookup surely remembers; at most twice as far."""
CATCH_UP_TOKENS = 512
"""Known tokens that a draft model takes in per step before it proposes anything."""


_GREEDY = Sampling()


class Drafter(Protocol):
    """Guesses of one run. Per step: `propose`, verify, `learn`; at the run's end `release`."""

    def propose(self, ids: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` ids that may follow `ids`, the run's prompt and generated tokens.

        `ids` only ever grows from call to call; pass the list itself, no copy of it.
        """
        ...

    def learn(self, drafted: int, accepted: int) -> None:
        """So many of the last proposal were verified, and so many of them were right."""
        ...

    def release(self) -> None:
        """The run has ended, or is preempted: give back what is shared. It can go on later."""
        ...


def accepted(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens that a verified step gives: the draws up to the first that is not its draft.

    drawn[i] was drawn from the row of the i-th of [last, *drafts]: one more than drafts, or less
    where a run ended in between. The row after a draft is only right where the draft is.
    """
    tokens = []
    for at, token in enumerate(drawn):
        tokens.append(token)
        if at >= len(drafts) or token != drafts[at]:
            break
    return tokens


class DraftLength:
    """How many tokens to draft: two more when all were right, else one more than were right.

    A rejected draft costs a row of the step, a missing one a step; so the length follows what
    the text has just shown, and one draft is always tried.
    """

    def __init__(self) -> None:
        self.tokens = FIRST_DRAFT_TOKENS

    def learn(self, drafted: int, accepted: int) -> None:
        if drafted:
            grown = self.tokens + 2 if accepted >= drafted else accepted + 1
            self.tokens = min(MAX_DRAFT_TOKENS, grown)


class PromptLookup:
    """Drafts what followed the text's last tokens when they last occurred; costs no model.

    A. Saxena, Prompt Lookup Decoding, 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
    Every token is indexed once, so that a call costs as much as there are new tokens, and of a
    long prompt only the last LOOKUP_TOKENS. At most about 10 MB of memory.
    """

    def __init__(self) -> None:
        self._length = DraftLength()
        # An n-gram -> where its last follower is: of the last tokens, and of those before.
        self._recent: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # followers

    def propose(self, ids: Sequence[int], limit: int) -> Sequence[int]:
        self._index(ids)
        limit = min(limit, self._length.tokens)
        if limit < 1:
            return ()
        for size in NGRAM_TOKENS:
            end = tuple(ids[-size:])
            at = self._recent.get(end, self._older.get(end))
            if at is not None:
                return _going_on(ids, at, limit)
        return ()

    def learn(self, drafted: int, accepted: int) -> None:
        self._length.learn(drafted, accepted)

    def release(self) -> None:
        """Nothing is shared."""

    def _index(self, ids: Sequence[int]) -> None:
        for follower in range(max(self._indexed, len(ids) - LOOKUP_TOKENS), len(ids)):
            for size in NGRAM_TOKENS:
                if follower >= size:
                    self._recent[tuple(ids[follower - size : follower])] = follower
            if len(self._recent) >= LOOKUP_TOKENS * len(NGRAM_TOKENS):
                self._older, self._recent = self._recent, {}
        self._indexed = len(ids)


def _going_on(ids: Sequence[int], at: int, limit: int) -> list[int]:
    """`limit` ids from `at` on, the last of them followed by what is drafted itself."""
    period = len(ids) - at
    return [ids[at + n % period] for n in range(limit)]


class DraftModel:
    """Drafts of a smaller model with the same tokenizer, greedy, in its own KV cache.

    One per run; `model` and `pool` are shared by all, and the pool's pages are the draft model's.
    Where the pool has no pages left, it proposes nothing. Each draft of each run is a forward of
    its own: worth it where few runs share a large model.
    """

    def __init__(self, model: Model, pool: PagePool) -> None:
        self._model = model
        self._pool = pool
        self._length = DraftLength()
        self._pages: list[int] = []
        self._cached: list[int] = []  # the ids whose keys and values are in the pages

    def propose(self, ids: Sequence[int], limit: int) -> Sequence[int]:
        room = self._model.config.context - len(ids)
        limit = min(limit, self._length.tokens, room)
        if limit < 1 or not self._has_pages(len(ids) + limit):
            return ()
        self._forget_rejected(ids)
        drafts: list[int] = []
        if not self._catch_up(ids):
            return drafts
        token = ids[-1]
        for position in range(len(ids), len(ids) + limit):
            hidden = self._model.forward([self._piece([token], prefill=False)])
            token = self._model.draw(hidden, [Draw(_GREEDY, position)])[0].token
            if token < 0:
                break
            drafts.append(token)
        return drafts

    def learn(self, drafted: int, accepted: int) -> None:
        self._length.learn(drafted, accepted)

    def release(self) -> None:
        self._pool.release(self._pages)
        self._pages, self._cached = [], []

    def _forget_rejected(self, ids: Sequence[int]) -> None:
        """Go back to where the cache holds other tokens than `ids`: drafts that were wrong."""
        common = min(len(self._cached), len(ids) - 1)
        right = max(0, common - MAX_DRAFT_TOKENS)  # no drafts of the last call lie before
        while right < common and self._cached[right] == ids[right]:
            right += 1
        del self._cached[right:]

    def _catch_up(self, ids: Sequence[int]) -> bool:
        """Push all known ids but the last; false where they are more than a step may push."""
        known = len(ids) - 1
        until = min(known, len(self._cached) + CATCH_UP_TOKENS)
        while (start := len(self._cached)) < until:
            in_chunk = start % PREFILL_CHUNK_TOKENS
            end = min(start + PREFILL_CHUNK_TOKENS - in_chunk, until)
            self._model.forward([self._piece(ids[start:end], prefill=not in_chunk)])
        return until == known

    def _piece(self, ids: Sequence[int], prefill: bool) -> Piece:
        """The ids after those in the cache, which has them then."""
        start = len(self._cached)
        self._cached += ids
        return Piece(ids, start, self._pages, prefill)

    def _has_pages(self, tokens: int) -> bool:
        missing = -(-tokens // PREFILL_CHUNK_TOKENS) - len(self._pages)
        more = self._pool.take(missing) if missing > 0 else []
        self._pages += more or []
        return more is not None
