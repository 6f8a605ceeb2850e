"""The scores of tokens as the OpenAI API writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ledger.frame import Score, TokenScores

IMPOSSIBLE = -9999.0
"""What that API says of a token that cannot be: JSON has no infinity."""


def scores_of(scores: Sequence[TokenScores]) -> list[dict[str, Any]]:
    """Each drawn token with the likeliest ones."""
    return [_score(each.chosen) | {"top_logprobs": [*map(_score, each.top)]} for each in scores]


def _score(score: Score) -> dict[str, Any]:
    return {
        "token": score.token.decode(errors="replace"),
        "bytes": list(score.token),
        "logprob": score.logprob if math.isfinite(score.logprob) else IMPOSSIBLE,
    }
