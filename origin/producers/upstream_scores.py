"""The logprobs of an OpenAI-compatible server, in the two forms that its two routes have.

They are a side of an answer, not the answer: what is no score is left out. Such servers do not say
the ids of tokens, which are 0 here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from ledger.frame import Score, TokenScores

UNKNOWN_ID = 0
MAX_TOP = 20


def read_scores(logprobs: object) -> tuple[TokenScores, ...]:
    """The scores of the tokens of one event."""
    if not isinstance(logprobs, dict):
        return ()
    if isinstance(content := logprobs.get("content"), list):
        found = [_of_chat(item) for item in content]
    else:
        found = _of_completion(logprobs)
    return tuple(scores for scores in found if scores is not None)


def _of_chat(item: object) -> TokenScores | None:
    chosen = _score(item)
    if chosen is None or not isinstance(item, dict):
        return None
    top = item.get("top_logprobs")
    others = [_score(each) for each in top[:MAX_TOP]] if isinstance(top, list) else []
    return TokenScores(chosen, tuple(score for score in others if score is not None))


def _score(item: object) -> Score | None:
    if not isinstance(item, dict):
        return None
    said = item.get("bytes")
    if isinstance(said, list) and all(isinstance(n, int) and 0 <= n < 256 for n in said):
        return _made(bytes(said), item.get("logprob"))
    return _made(item.get("token"), item.get("logprob"))


def _of_completion(logprobs: Mapping[str, Any]) -> list[TokenScores | None]:
    tokens, values, tops = (
        value if isinstance(value := logprobs.get(name), list) else []
        for name in ("tokens", "token_logprobs", "top_logprobs")
    )
    found: list[TokenScores | None] = []
    for token, value, top in zip_longest(tokens, values, tops[: len(tokens)]):
        chosen = _made(token, value)
        others = [_made(*each) for each in top.items()] if isinstance(top, dict) else []
        best = sorted((s for s in others if s is not None), key=lambda s: -s.logprob)
        found.append(None if chosen is None else TokenScores(chosen, tuple(best[:MAX_TOP])))
    return found


def _made(token: object, logprob: object) -> Score | None:
    """None for what is no token, or no number."""
    if isinstance(logprob, bool) or not isinstance(logprob, int | float) or math.isnan(logprob):
        return None
    if isinstance(token, str):
        token = token.encode(errors="replace")
    return Score(UNKNOWN_ID, token, float(logprob)) if isinstance(token, bytes) else None
