"""Speculative decoding: guesses of the tokens that come next, and how many were right.

The engine decodes the rows [last, d1 .. dk] in one step and draws at each of their positions with
the run's own seed (and, under a grammar, the mask there). What was drawn counts; the drafts only
say how many of the draws were drawn from the right row. So drafts never change a text, and a
drafter may be as wrong or as forgetful as it likes: of a continuation it knows nothing.
(Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, accept by
chance; here a draw is a function of row, seed and position, so equality is enough.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.origin.models.model import PREFILL_CHUNK_TOKENS, Draw, Model, Piece
from tailrace.origin.scheduler.pages import PagePool

MAX_DRAFT_TOKENS = 8
"""Drafts that one step verifies of one run."""
FIRST_DRAFT_TOKENS = 4
NGRAM_TOKENS = (4, 2)
"""Lengths of the ends of a text that prompt lookup looks for, the longest first."""
LOOKUP_TOKENS = 16 * 1024
"""How far back prompt lookup surely remembers; at most twice as far."""
CATCH_UP_TOKENS = 512
"""Known tokens of all runs that a draft model takes in per step; a run that lacks more proposes
nothing yet."""

_GREEDY = Sampling()


class Asked(NamedTuple):
    """At most `limit` ids that may follow `ids`, a run's prompt and generated tokens, are wanted.

    A run's `ids` only ever grow from step to step; it is the list itself, no copy of it.
    """

    run: int
    ids: Sequence[int]
    limit: int


class Drafter(Protocol):
    """Guesses of all runs of an engine. Per step: `propose`, verify, and `learn` for each run."""

    def propose(self, asked: Sequence[Asked]) -> list[Sequence[int]]:
        """Guesses for each that is asked for, of different runs."""

    def learn(self, run: int, drafted: int, accepted: int) -> None:
        """So many of the run's last proposal were verified, and so many of them were right."""

    def release(self, run: int) -> None:
        """The run has ended, or is preempted, and then may come back: forget it."""


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
    long prompt only the last LOOKUP_TOKENS. At most about 10 MB of memory for a run.
    """

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def propose(self, asked: Sequence[Asked]) -> list[Sequence[int]]:
        return [self._text(each.run).propose(each.ids, each.limit) for each in asked]

    def learn(self, run: int, drafted: int, accepted: int) -> None:
        self._text(run).length.learn(drafted, accepted)

    def release(self, run: int) -> None:
        self._texts.pop(run, None)

    def _text(self, run: int) -> _Text:
        return self._texts.setdefault(run, _Text())


class _Text:
    """One run's, indexed."""

    def __init__(self) -> None:
        self.length = DraftLength()
        # An n-gram -> where its last follower is: of the last tokens, and of those before.
        self._recent: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # followers

    def propose(self, ids: Sequence[int], limit: int) -> Sequence[int]:
        self._index(ids)
        limit = min(limit, self.length.tokens)
        if limit < 1:
            return ()
        for size in NGRAM_TOKENS:
            end = tuple(ids[-size:])
            at = self._recent.get(end, self._older.get(end))
            if at is not None:
                return _going_on(ids, at, limit)
        return ()

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

    `pool` is of the draft model's pages; a run for which it has none left gets no proposal. The
    next draft of all runs is one batch, so that a step's drafts are as many batches as the
    longest proposal has tokens, however many runs there are.
    """

    def __init__(self, model: Model, pool: PagePool) -> None:
        self._model = model
        self._pool = pool
        self._drafts: dict[int, _Draft] = {}

    def propose(self, asked: Sequence[Asked]) -> list[Sequence[int]]:
        drafting = [self._begin(each) for each in asked]
        self._catch_up([each for each in drafting if each is not None])
        going = [each for each in drafting if each is not None and each.is_caught_up]
        while going:
            hidden = self._model.forward([each.next_row() for each in going])
            drawn = self._model.draw(hidden, [Draw(_GREEDY, each.position) for each in going])
            for each, draft in zip(going, drawn, strict=True):
                each.take(draft.token)
            going = [each for each in going if not each.is_done]
        return [() if each is None else each.drafts for each in drafting]

    def learn(self, run: int, drafted: int, accepted: int) -> None:
        self._draft(run).length.learn(drafted, accepted)

    def release(self, run: int) -> None:
        draft = self._drafts.pop(run, None)
        if draft is not None:
            self._pool.release(draft.pages)

    def _draft(self, run: int) -> _Draft:
        return self._drafts.setdefault(run, _Draft())

    def _begin(self, asked: Asked) -> _Draft | None:
        """None where nothing can be drafted."""
        draft, known = self._draft(asked.run), len(asked.ids)
        limit = min(asked.limit, draft.length.tokens, self._model.config.context - known)
        if limit < 1 or not self._has_pages(draft, known + limit):
            return None
        draft.begin(asked.ids, limit)
        return draft

    def _catch_up(self, drafting: Sequence[_Draft]) -> None:
        """Push all known ids but the last of each run, as many as a step may push."""
        room = CATCH_UP_TOKENS
        while room > 0:
            pieces: list[Piece] = []
            for each in drafting:
                more = each.missing_piece(room)
                if more is not None:
                    pieces.append(more)
                    room -= len(more.ids)
            if not pieces:
                return
            self._model.forward(pieces)

    def _has_pages(self, draft: _Draft, tokens: int) -> bool:
        missing = -(-tokens // PREFILL_CHUNK_TOKENS) - len(draft.pages)
        more = self._pool.take(missing) if missing > 0 else []
        draft.pages += more or []
        return more is not None


@dataclass(slots=True)
class _Draft:
    """What one run has in the draft model's pages, the keys and values of the `cached` ids; and its
    proposal, while it grows to `limit` drafts behind the `ids` that are known."""

    length: DraftLength = field(default_factory=DraftLength)
    pages: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    ids: Sequence[int] = ()
    limit: int = 0
    drafts: list[int] = field(default_factory=list)
    broken: bool = False

    def begin(self, ids: Sequence[int], limit: int) -> None:
        """Go back to where the cache holds other tokens than `ids`: drafts that were wrong."""
        self.ids, self.limit, self.drafts, self.broken = ids, limit, [], False
        common = min(len(self.cached), len(ids) - 1)
        right = max(0, common - MAX_DRAFT_TOKENS)  # no drafts of the last call lie before
        while right < common and self.cached[right] == ids[right]:
            right += 1
        del self.cached[right:]

    @property
    def is_caught_up(self) -> bool:
        return len(self.cached) == len(self.ids) - 1

    @property
    def is_done(self) -> bool:
        return self.broken or len(self.drafts) == self.limit

    @property
    def position(self) -> int:
        return len(self.ids) + len(self.drafts)

    def missing_piece(self, room: int) -> Piece | None:
        """Known ids up to the end of their page; None where there is no room, or none is missing.

        What begins in a page that is not full is rows, and what begins with a page is a chunk.
        """
        start = len(self.cached)
        in_chunk = start % PREFILL_CHUNK_TOKENS
        end = min(start + PREFILL_CHUNK_TOKENS - in_chunk, len(self.ids) - 1)
        if not start < end <= start + room:
            return None
        return self._piece(self.ids[start:end], prefill=not in_chunk)

    def next_row(self) -> Piece:
        """Of the last known token, or the last draft."""
        return self._piece(self.drafts[-1:] or self.ids[-1:], prefill=False)

    def take(self, token: int) -> None:
        """What was drawn from it; below 0 where it was no number."""
        self.broken = token < 0
        if not self.broken:
            self.drafts.append(token)

    def _piece(self, ids: Sequence[int], *, prefill: bool) -> Piece:
        """The ids after those in the cache, which has them then."""
        start = len(self.cached)
        self.cached += ids
        return Piece(ids, start, self.pages, prefill)
