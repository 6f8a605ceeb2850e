"""Logprobs: the scores of a draw as the frames carry them, with the exact bytes of the tokens."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ledger.frame import Score, TokenScores
from origin.engine.vocabulary import Vocabulary

if TYPE_CHECKING:  # it needs torch, and a Transcript does not
    from origin.models.model import Scores

MAX_FRAME_SCORE_BYTES = 128 * 1024
"""Scores that one frame carries; with 20 alternatives, those of some 300 tokens."""
SCORE_BYTES = 16
"""Of one encoded Score, at most, besides the token's bytes."""


class Scorer:
    """Scores of drawn tokens for ScoredToken frames; one per model, shared by its runs.

    The engine calls `of(drawn.token, drawn.scores)` for a run that has logprobs and gives the
    result to `Transcript.accept` along with the token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def of(self, token: int, scores: Scores) -> TokenScores:
        """`token` was drawn with these scores; ids beyond the tokenizer have no bytes."""
        return TokenScores(
            chosen=self._score(token, scores.chosen),
            top=tuple(self._score(other, logprob) for other, logprob in scores.best),
        )

    def _score(self, token: int, logprob: float) -> Score:
        return Score(token, self._vocabulary.bytes_of(token), logprob)


class PendingScores:
    """Scores of tokens whose frame is not made yet; of too many, the last that one frame holds."""

    def __init__(self) -> None:
        self._scores: deque[TokenScores] = deque()
        self._bytes = 0

    def add(self, scores: TokenScores) -> None:
        self._scores.append(scores)
        self._bytes += _size(scores)
        while self._bytes > MAX_FRAME_SCORE_BYTES and len(self._scores) > 1:
            self._bytes -= _size(self._scores.popleft())

    def take(self) -> tuple[TokenScores, ...]:
        taken = tuple(self._scores)
        self._scores.clear()
        self._bytes = 0
        return taken


def _size(scores: TokenScores) -> int:
    return sum(SCORE_BYTES + len(score.token) for score in (scores.chosen, *scores.top))
