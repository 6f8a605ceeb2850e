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
    rows = scored_rows(draws)
    if not rows:
        return [None] * len(draws)
    packed = pack_scores(
        logits[rows], torch.tensor([max(tokens[row], 0) for row in rows]), most_scores(draws)
    )
    return unpack_scores(packed, draws, tokens)


def scored_rows(draws: Sequence[Draw]) -> list[int]:
    """Return the indices of the draws that request scores."""
    return [row for row, draw in enumerate(draws) if draw.logprobs is not None]


def most_scores(draws: Sequence[Draw]) -> int:
    """Return the maximum number of alternatives that a draw requests."""
    return max((draw.logprobs or 0 for draw in draws), default=0)


def pack_scores(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Compute the scores of rows without waiting for their device.

    logits: fp32 [rows, vocab]. tokens: int [rows], the chosen ids. Returns int32 [rows, 1 + 2 n]:
    the bits of the chosen token's score, the n = min(most, vocab) best ids, and the bits of their
    scores. The scores of a row that is not finite are meaningless.
    """
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.long()[:, None])
    ids = best_ids(logprobs, most)
    best = logprobs.gather(1, ids)
    return torch.cat((chosen.view(torch.int32), ids.int(), best.view(torch.int32)), 1)


def unpack_scores(
    packed: Tensor, draws: Sequence[Draw], tokens: Sequence[int]
) -> list[Scores | None]:
    """Return the scores of each draw, given the packed scores of `scored_rows` in host memory."""
    found: list[Scores | None] = [None] * len(draws)
    count = packed.shape[1] // 2
    chosen = packed[:, 0].view(torch.float32).tolist()
    ids = packed[:, 1 : 1 + count].tolist()
    scores = packed[:, 1 + count :].contiguous().view(torch.float32).tolist()
    for place, row in enumerate(scored_rows(draws)):
        if tokens[row] != NO_TOKEN:
            pairs = tuple(zip(ids[place], scores[place], strict=True))
            found[row] = Scores(chosen[place], pairs[: draws[row].logprobs])
    return found


def best_ids(values: Tensor, most: int) -> Tensor:
    """Return up to `most` ids of each row, the best first, and of equal ones the lowest first.

    values: fp32 [rows, vocab]. Returns int64 [rows, ids]. Among equal numbers `topk` may return
    any. Here each value is joined with its id into one number, so no two are equal.
    """
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    keys = (ordered << 32) - torch.arange(values.shape[1], device=values.device)
    return keys.topk(min(most, values.shape[1])).indices
