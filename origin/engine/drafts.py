"""Speculative decoding: drafting the next tokens, and verifying the drafts.

The engine decodes the rows [last, d1 .. dk] in one step and draws at each of their positions with
the run's own seed (and, under a grammar, its mask). A draw counts only if all drafts before it
equal the draws at their positions, since otherwise its row belongs to a different text. So drafts
never change a text. A drafter can therefore be wrong without harm, and may forget everything, as it
does when a run continues on another worker. (Leviathan et al., Fast Inference from Transformers via
Speculative Decoding, 2023, accept a draft with some probability. Here a draw is a function of row,
seed and position, so that a draft is accepted if it equals the draw.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.origin.models.model import PREFILL_CHUNK_TOKENS, Draw, Model, Piece
from tailrace.origin.scheduler.pages import PagePool

MAX_DRAFT_TOKENS = 8
"""Maximum drafts of one run that one step verifies."""
FIRST_DRAFT_TOKENS = 4
NGRAM_TOKENS = (4, 2)
"""Lengths of the suffixes that prompt lookup searches for, the longest first."""
LOOKUP_TOKENS = 16 * 1024
"""Minimum number of past tokens that prompt lookup remembers; the maximum is twice as many."""
CATCH_UP_TOKENS = 512
"""Maximum known tokens, of all runs together, that a draft model computes in one step. A run for
which more would have to be computed gets no drafts in this step."""

_GREEDY = Sampling()


class Asked(NamedTuple):
    """A request for at most `limit` drafts after `ids`, a run's prompt and generated tokens.

    A run's `ids` only grow from step to step: `ids` is the run's list itself, not a copy.
    """

    run: int
    ids: Sequence[int]
    limit: int


class Drafter(Protocol):
    """Drafts tokens for all runs of an engine.

    In each step the engine calls `propose`, verifies the drafts, and calls `learn` for each run.
    """

    def propose(self, asked: Sequence[Asked]) -> list[Sequence[int]]:
        """Return drafts for each request; the requests are of different runs."""

    def learn(self, run: int, drafted: int, accepted: int) -> None:
        """Record how many of the run's last drafts were verified, and how many were right."""

    def release(self, run: int) -> None:
        """Forget a run, which has ended or was preempted; a preempted one may come back."""


def accepted(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Return the tokens of a verified step: the draws up to the first that differs from its draft.

    drawn[i] was drawn from the row of item i of [last, *drafts], where `last` is the last known
    token. So there is one draw more than drafts, or there are fewer draws if the run ended in
    between. A draw counts only if all drafts up to its row are right.
    """
    tokens = []
    for at, token in enumerate(drawn):
        tokens.append(token)
        if at >= len(drafts) or token != drafts[at]:
            break
    return tokens


class DraftLength:
    """The number of tokens to draft, which grows by two while all drafts are right.

    After a wrong draft it is one more than the number of right ones. A wrong draft costs a row of
    the step, and a missing draft costs a whole step. So the length follows the last result, and at
    least one draft is always tried.
    """

    def __init__(self) -> None:
        self.tokens = FIRST_DRAFT_TOKENS

    def learn(self, drafted: int, accepted: int) -> None:
        if drafted:
            grown = self.tokens + 2 if accepted >= drafted else accepted + 1
            self.tokens = min(MAX_DRAFT_TOKENS, grown)


class PromptLookup:
    """Drafts what followed the text's last tokens when they last occurred; needs no model.

    A. Saxena, Prompt Lookup Decoding, 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
    Every token is indexed once, so that the cost of a call is proportional to the new tokens; of a
    long prompt only the last LOOKUP_TOKENS are indexed. A run takes at most about 10 MB of memory.
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
    """The n-gram index of one run's text."""

    def __init__(self) -> None:
        self.length = DraftLength()
        # Two indexes, of recent and of older tokens. Both map an n-gram to the index of the token
        # after its latest occurrence.
        self._recent: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # number of tokens whose preceding n-grams have been indexed

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
    """Return `limit` ids, beginning with `ids[at:]`, which is repeated if it is too short."""
    period = len(ids) - at
    return [ids[at + n % period] for n in range(limit)]


class DraftModel:
    """Drafts greedily with a smaller model of the same tokenizer, in its own KV cache.

    `pool` has the draft model's pages; a run gets no drafts if there are no pages left for it. Each
    batch computes the next draft token of every run. So a step takes as many batches as the run
    with the most drafts has drafts, however many runs there are.
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
        """Prepare the run's state for drafting and return it; None if nothing can be drafted."""
        draft, known = self._draft(asked.run), len(asked.ids)
        limit = min(asked.limit, draft.length.tokens, self._model.config.context - known)
        if limit < 1 or not self._has_pages(draft, known + limit):
            return None
        draft.begin(asked.ids, limit)
        return draft

    def _catch_up(self, drafting: Sequence[_Draft]) -> None:
        """Push known ids that are not cached through the draft model, except each run's last one.

        At most CATCH_UP_TOKENS ids are pushed.
        """
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
    """The state of one run in the draft model: its pages, cached ids, and drafts of this step."""

    length: DraftLength = field(default_factory=DraftLength)
    pages: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    ids: Sequence[int] = ()
    limit: int = 0
    drafts: list[int] = field(default_factory=list)
    broken: bool = False

    def begin(self, ids: Sequence[int], limit: int) -> None:
        """Discard cached tokens that differ from `ids`, because their drafts were wrong."""
        self.ids, self.limit, self.drafts, self.broken = ids, limit, [], False
        common = min(len(self.cached), len(ids) - 1)
        right = max(0, common - MAX_DRAFT_TOKENS)  # only the last MAX_DRAFT_TOKENS can be wrong
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
        """Return a piece with the next ids that are not cached, up to the end of their page.

        Return None if there are none, or more than `room`. A piece that starts at the beginning of
        a page is a chunk of prefill, any other one is rows.
        """
        start = len(self.cached)
        in_chunk = start % PREFILL_CHUNK_TOKENS
        end = min(start + PREFILL_CHUNK_TOKENS - in_chunk, len(self.ids) - 1)
        if not start < end <= start + room:
            return None
        return self._piece(self.ids[start:end], prefill=not in_chunk)

    def next_row(self) -> Piece:
        """Return the last draft, or the last known token if nothing is drafted yet, as a row."""
        return self._piece(self.drafts[-1:] or self.ids[-1:], prefill=False)

    def take(self, token: int) -> None:
        """Append the drawn draft; an id below 0 means that the logits were not finite."""
        self.broken = token < 0
        if not self.broken:
            self.drafts.append(token)

    def _piece(self, ids: Sequence[int], *, prefill: bool) -> Piece:
        """Return these ids as a piece of work after the cached ids, and count them as cached."""
        start = len(self.cached)
        self.cached += ids
        return Piece(ids, start, self.pages, prefill)
