"""Draws the same tokens as `sampler.sample` for many rows at once, with a tenth of the torch calls.

Each operation is one of `sample`'s, or is exact, or adds integers. So a row draws the same token
alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailrace.kernels.checks import check_tensor
from tailrace.kernels.sampler.sampler import (
    MASK_BITS,
    ZERO_TEMPERATURE,
    Sampling,
    keyed_gumbel,
    least_weight,
    mask_bits,
    penalised_by,
    sample,
    seed_key,
    top_p_weight,
    weights,
)

NO_TOKEN = -1
"""Returned in place of a token for a row whose logits are NaN or infinite."""


def sample_batch(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    masks: Sequence[Tensor | None],
    counts: Sequence[Tensor | None],
) -> list[int]:
    """Draw one token for each row of fp32 [rows, V]; the other arguments are `sample`'s, per row.

    A row for which `sample` would raise FloatingPointError gets NO_TOKEN. If `sample` would raise
    ValueError or TypeError for a row, this function does for the whole batch.
    """
    if len(samplings) == 1:
        return [_sample_one(logits[0], samplings[0], positions[0], masks[0], counts[0])]
    logits = _penalise(logits, samplings, counts)
    low, high = logits.aminmax(dim=-1)
    finite = (low.isfinite() & high.isfinite()).tolist()
    if not all(finite):
        logits = logits.where(torch.tensor(finite)[:, None], 0.0)
    logits = _mask(logits, masks)
    drawing = [row for row, s in enumerate(samplings) if s.temperature > ZERO_TEMPERATURE]
    if len(drawing) == len(samplings):
        tokens = _draw(logits, samplings, positions)
    else:
        tokens = logits.argmax(-1).tolist()
        if drawing:
            settings = [samplings[row] for row in drawing]
            drawn = _draw(logits[drawing], settings, [positions[row] for row in drawing])
            for row, token in zip(drawing, drawn, strict=True):
                tokens[row] = token
    return [token if right else NO_TOKEN for token, right in zip(tokens, finite, strict=True)]


def _sample_one(
    logits: Tensor, sampling: Sampling, position: int, mask: Tensor | None, counts: Tensor | None
) -> int:
    """Draw with `sample` itself, which is faster for a single row."""
    try:
        return sample(logits, sampling, position, mask, counts)
    except FloatingPointError:
        return NO_TOKEN


def _penalise(
    logits: Tensor, samplings: Sequence[Sampling], counts: Sequence[Tensor | None]
) -> Tensor:
    rows = [row for row, sampling in enumerate(samplings) if sampling.penalises]
    if not rows:
        return logits
    seen = []
    for row in rows:
        if (count := counts[row]) is None:
            raise ValueError("counts: missing, but the sampling has penalties, which need them")
        check_tensor("counts", count, torch.int32, logits.shape[1])
        seen.append(count)
    penalties = [
        (samplings[row].repetition, samplings[row].presence, samplings[row].frequency)
        for row in rows
    ]
    changed = penalised_by(logits[rows], torch.stack(seen), torch.tensor(penalties))
    return logits.index_copy(0, torch.tensor(rows), changed)


def _mask(logits: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """Set logits to -inf where a row's mask does not allow the id."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    vocab = logits.shape[1]
    given = [mask for mask in masks if mask is not None]
    for mask in given:
        check_tensor("mask", mask, torch.int32, -(-vocab // MASK_BITS))
    allowed = mask_bits(torch.stack(given), vocab).bool()
    if not bool(allowed.any(-1).all()):
        raise ValueError("mask: it allows no token")
    changed = logits[rows].masked_fill_(~allowed, -torch.inf)
    return logits.index_copy(0, torch.tensor(rows), changed)


def _draw(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Draw one id for each row; all temperatures are above 0, and logits of masked ids are -inf."""
    temperature = torch.tensor([[s.temperature] for s in samplings])
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    kept = _best(scores, samplings)
    rows, ids = kept.nonzero().unbind(1)
    left = scores[rows, ids]
    noise = keyed_gumbel(
        ids, seed_key(*(s.seed for s in samplings))[:, rows], torch.tensor(positions)[rows]
    )
    noisy = left + noise
    if any(s.min_p > 0 for s in samplings):
        least = torch.tensor([least_weight(p) for p in _fp32([s.min_p for s in samplings])])
        noisy = noisy.masked_fill_(weights(left) < least[rows], -torch.inf)
    # Put the scores back into the columns of their ids, so that argmax picks the lowest id of equal
    # scores.
    spread = torch.full_like(scores, -torch.inf).index_put_((rows, ids), noisy)
    tokens: list[int] = spread.argmax(-1).tolist()
    return tokens


def _best(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return a mask of the ids that top-k and top-p keep: fp32 [rows, V] -> bool [rows, V]."""
    vocab = scores.shape[1]
    top_p = _fp32([s.top_p for s in samplings])
    top_k = [s.top_k if 0 < s.top_k < vocab else vocab for s in samplings]
    ranked = [p < 1 or k < vocab for k, p in zip(top_k, top_p, strict=True)]
    if not any(ranked):
        return torch.ones_like(scores, dtype=torch.bool)
    most = max(k for k, needed in zip(top_k, ranked, strict=True) if needed)
    values = scores.topk(most).values
    number = _top_p_numbers(values, top_k, top_p)
    last = values.gather(1, number.clamp(max=most)[:, None] - 1)
    if not all(ranked):
        last = last.where(torch.tensor(ranked)[:, None], -torch.inf)
    kept = scores >= last
    surplus = kept.sum(-1) - number
    if bool(surplus.any()):
        # Several ids have the lowest score that is kept, and not all of them may be kept: drop the
        # highest ids.
        level = scores == last
        room = level.sum(-1) - surplus
        kept &= ~level | (level.cumsum(-1) <= room[:, None])
    return kept


def _top_p_numbers(values: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Return the number of ids that top-k and top-p keep in each row: int64 [rows].

    values: fp32 [rows, n], the best scores in descending order; n is at least top_k in rows where
    top-k or top-p is on.
    """
    number = torch.tensor(top_k)
    if all(p >= 1 for p in top_p):
        return number
    chances = weights(values)
    sums = chances.masked_fill_(torch.arange(values.shape[1]) >= number[:, None], 0).cumsum(-1)
    target = [
        [top_p_weight(total, min(p, 1.0))]
        for total, p in zip(sums[:, -1].tolist(), top_p, strict=True)
    ]
    # The sums ascend. Keep the ids whose sum is below the target, and one more, with which the sum
    # reaches it.
    enough = 1 + (sums < torch.tensor(target)).sum(-1)
    return enough.where(torch.tensor([p < 1 for p in top_p]), number)


def _fp32(settings: Sequence[float]) -> list[float]:
    """Round settings to fp32, since `sample` defines its result by settings in fp32."""
    rounded: list[float] = torch.tensor(settings, dtype=torch.float32).tolist()
    return rounded
