"""Log probabilities of drawn tokens, computed from their rows of logits, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailrace.kernels.sampler.sampler_batch import NO_TOKEN
from tailrace.origin.models.model import Draw, Scores


def scores_of(logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int]) -> list[Scores | None]:
    """Return the scores of each row that requests them and has a token (not NO_TOKEN).

    logits: fp32 [len(draws), vocab], before penalties, temperature and masks.
    """
    wanted = [
        row
        for row, (draw, token) in enumerate(zip(draws, tokens, strict=True))
        if draw.logprobs is not None and token != NO_TOKEN
    ]
    found: list[Scores | None] = [None] * len(draws)
    if not wanted:
        return found
    logprobs = logits[wanted].log_softmax(-1)
    chosen = logprobs[list(range(len(wanted))), [tokens[row] for row in wanted]].tolist()
    ids = best_ids(logprobs, max(draws[row].logprobs or 0 for row in wanted))
    ranked = zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
    for row, of_token, (best, scores) in zip(wanted, chosen, ranked, strict=True):
        pairs = tuple(zip(best, scores, strict=True))
        found[row] = Scores(of_token, pairs[: draws[row].logprobs])
    return found


def best_ids(values: Tensor, most: int) -> Tensor:
    """Return up to `most` ids of each row, the best first, and of equal ones the lowest first.

    values: fp32 [rows, vocab], without NaN. Returns int64 [rows, ids]. `topk` takes any of equal
    numbers; here a value and its id form one number, so no two are equal.
    """
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ordered like the floats
    keys = (ordered << 32) - torch.arange(values.shape[1], device=values.device)
    return keys.topk(min(most, values.shape[1])).indices
