"""Sampling that depends on nothing but the logits, the request's seed and the position.

The random number of a vocabulary id is a function of (seed, position, id), so a request
draws the same tokens alone, among others, and when it is continued by another worker.
Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011) is keyed

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (vocabulary id, position, 0, 0)

and only the first word of its result is used. Its upper 24 bits k give the uniform number
u = max(k, 1/2) * 2**-24, which fp32 holds exactly and which lies strictly between 0 and 1.
-log(-log(u)) is Gumbel noise: the largest noisy logit is a draw from the softmax (Gumbel,
1954). The words and u are the same bits on every device; log and exp are not, so a stream
is continued only by a worker of the same fingerprint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PHILOX_ROUNDS = 10
_LOW_32 = 0xFFFFFFFF
# Tensors, because an operation with a Python number takes twice the time of one without.
_MULTIPLIERS = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
_KEY_STEPS = torch.tensor([[0x9E3779B9], [0xBB67AE85]])
_LOW_HALF = torch.tensor(_LOW_32)
_HALF = torch.tensor(32)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose a token: temperature 0 is greedy, top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def sample(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Choose one token; equal scores go to the lowest id.

    logits: fp32 [V]. position: index of the token among those generated, from 0.
    The order is temperature, top-k, top-p, noise. Raises FloatingPointError for NaN or
    infinite logits.
    """
    low, high = logits.aminmax()
    if not math.isfinite(float(high) - float(low)):
        raise FloatingPointError("the logits hold NaN or infinite values")
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    # Relative to the best, a tiny temperature can only overflow to -inf: no chance at all.
    scores = (logits - high) / torch.tensor(sampling.temperature, dtype=torch.float32)
    ids = survivors(scores, sampling.top_k, sampling.top_p)
    noise = gumbel(ids, sampling.seed, position)
    return int(ids[(scores[ids] + noise).argmax()])


def survivors(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """The ids that top-k, then top-p leave, ascending: int64 [n], n >= 1.

    scores: fp32 [V], already divided by the temperature. top-p keeps the fewest best ids
    whose chances, renormalised after top-k, sum to at least top_p.
    """
    if not 0 < top_k < scores.numel() and top_p >= 1.0:
        return torch.arange(scores.numel())
    ranked, ids = scores.sort(descending=True, stable=True)
    if 0 < top_k < scores.numel():
        ranked, ids = ranked[:top_k], ids[:top_k]
    if top_p < 1.0:
        chances = ranked.softmax(-1)
        before = chances.cumsum(-1) - chances
        ids = ids[: max(1, int((before < top_p).sum()))]
    return ids.sort().values


def gumbel(ids: Tensor, seed: int, position: int) -> Tensor:
    """Gumbel noise of each vocabulary id at a position: int64 [n] -> fp32 [n]."""
    counter = torch.zeros(4, ids.numel(), dtype=torch.int64)
    counter[0] = ids
    counter[1] = position
    word = philox(counter, seed)[0]
    uniform = (word >> 8).to(torch.float32).clamp_(min=0.5) * 2.0**-24
    return uniform.log_().neg_().log_().neg_()


def philox(counter: Tensor, seed: int) -> Tensor:
    """Philox4x32-10 of n counters: int64 [4, n] that holds u32 words, and so does the result.

    seed: u64, the two key words. int64 products wrap modulo 2**64, as the 32x32-bit product
    needs. Between rounds the odd words keep the whole product: only their low half matters
    and the mask on the even words, or the last one, takes the rest off.
    """
    rounds = torch.arange(PHILOX_ROUNDS)[:, None, None]
    first_key = torch.tensor([seed & _LOW_32, seed >> 32])[:, None]
    even, odd = counter[0::2], counter[1::2]
    for key in (first_key + rounds * _KEY_STEPS).unbind():
        product = (even * _MULTIPLIERS).flip(0)
        even = (product >> _HALF ^ odd ^ key) & _LOW_HALF
        odd = product
    return torch.stack((even, odd & _LOW_HALF), 1).view(4, -1)
