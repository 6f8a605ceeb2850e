"""Sampling that depends on nothing but the logits, the request's settings and the position.

The steps are, in this order: grammar mask, penalties, temperature, top-k, top-p, min-p, noise.
At every cutoff and in the draw, ids are ranked by score; of equal scores the lowest id comes first.

**Noise.** The random number of a vocabulary id is a function of (seed, position, id), so a request
draws the same tokens alone, in a batch with others, and when another worker continues it. The
generator is Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011) with

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (vocabulary id, position, 0, 0)

and only the first word of its result is used. Its upper 24 bits k give the uniform number
u = max(k, 1/2) * 2**-24. -log(-log(u)) is Gumbel noise: the largest noisy score is a draw
from the softmax (Gumbel, 1954). Each logarithm is taken in double precision and rounded to
fp32. For every one of the 2**24 uniform numbers, the logarithm as a double is at least 13 units in
the last place away from a point where it would round to another fp32 number. So any library whose
logarithm is right within a few units in the last place gives the same fp32 number, and the noise is
the same on every device.

**Probabilities.** A sum of floats depends on the order of additions; a sum of integers does not. So
the probability of an id is computed as an integer, its weight: the probability divided by that of
the best id, in units of 2**-40, rounded down. That is floor(exp(score - best) * 2**40). The
function `weights` computes exp as a polynomial of fp32 products and sums, each rounded once, so
that it is the same on every device. Its error is at most 1.2 units in the last place. Ids with less
than 2**-40 of the best id's probability have weight 0.

- top-p keeps the best ids of those that top-k has kept: as few as are needed for a weight of
  ceil(total * floor(top_p * 2**24) / 2**24), and at least one.
- min-p (Nguyen et al., Turning Up the Heat, 2024) keeps the ids whose weight is at least
  floor(min_p * 2**40), which is relative to the best id's and so needs no total.

Settings are rounded to fp32. From equal logits, a CPU and a GPU draw equal tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.checks import check_tensor

ZERO_TEMPERATURE = 2.0**-150
"""Maximum temperature that counts as 0, because it is 0 when rounded to fp32."""
PHILOX_ROUNDS = 10
MASK_BITS = 32
"""Vocabulary ids per word of a grammar mask."""
WEIGHT_BITS = 40
"""The unit of a weight is 2**-WEIGHT_BITS. With 40 bits, the weights of up to 2**23 ids sum to less
than 2**63, so int64 does not overflow."""
TOP_P_BITS = 24
"""top_p is rounded down to a multiple of 2**-TOP_P_BITS."""
MIN_WEIGHED_SCORE = -28.0
"""This score and all lower ones have weight 0, since exp of them is below 2**-40."""
ROUND_TO_WHOLE = 12_582_912.0
"""1.5 * 2**23. Adding and then subtracting it rounds fp32 numbers up to 2**22 to integers."""
LOG2_E = 1.44269502162933349609375
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860676533018704503775e-06
"""Two numbers whose sum is log(2). The first has 15 significant bits, so that its products with
small integers are exact."""
EXP_SERIES = (
    0.0013814540579915047,
    0.00836874544620514,
    0.04166838899254799,
    0.1666652113199234,
    0.4999999403953552,
    1.0,
    1.0,
)
"""Coefficients of a polynomial for exp(r) with |r| <= log(2) / 2, highest power first.

Without rounding errors, its error is below 2**-28.
"""

_LOW_32 = 0xFFFFFFFF
# These are tensors, because operations with Python numbers take twice as long.
_MULTIPLIERS = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
_KEY_STEPS = torch.tensor([[0x9E3779B9], [0xBB67AE85]])
_ROUND_STEPS = (torch.arange(PHILOX_ROUNDS)[:, None, None] * _KEY_STEPS).unbind()
_LOW_HALF = torch.tensor(_LOW_32)
_HALF = torch.tensor(32)
_LOG2_E, _LN2_HIGH, _LN2_LOW = torch.tensor([LOG2_E, LN2_HIGH, LN2_LOW]).unbind()
_ROUND_TO_WHOLE = torch.tensor(ROUND_TO_WHOLE)
_EXP_SERIES = torch.tensor(EXP_SERIES).unbind()
_FRACTION_BITS = 23
_WEIGHT_UNIT_BITS = (127 + WEIGHT_BITS) << _FRACTION_BITS
_BIT_PLACES = torch.arange(MASK_BITS, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for drawing a token; with the defaults the best id is taken and no logit changes.

    Raises ValueError that names the setting which is out of range.
    """

    temperature: float = 0.0
    """Number by which logits are divided; 0 takes the best id."""
    top_k: int = 0
    """Number of best ids to keep; 0, or a number not below the size of the vocabulary, is off."""
    top_p: float = 1.0
    """Probability mass to keep, above 0; 1 is off."""
    seed: int = 0
    """Seed of the noise, u64."""
    min_p: float = 0.0
    """Minimum probability relative to the best id's; 0 is off."""
    repetition: float = 1.0
    """Repetition penalty: positive logits of ids generated so far are divided by this number,
    negative ones are multiplied by it; 1 is off."""
    presence: float = 0.0
    """Presence penalty: this number is subtracted once from the logit of an id that was generated;
    0 is off."""
    frequency: float = 0.0
    """Frequency penalty: this number is subtracted from the logit of an id once for each time that
    it was generated; 0 is off."""

    def __post_init__(self) -> None:
        right = {
            "temperature": 0 <= self.temperature <= torch.finfo(torch.float32).max,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "seed": 0 <= self.seed < 2**64,
            "min_p": 0 <= self.min_p <= 1,
            "repetition": 0 < self.repetition < math.inf,
            "presence": math.isfinite(self.presence),
            "frequency": math.isfinite(self.frequency),
        }
        for name, holds in right.items():
            if not holds:
                raise ValueError(f"{name}: {getattr(self, name)} is out of range")

    @property
    def penalises(self) -> bool:
        """True if the counts of generated ids matter."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


def sample(
    logits: Tensor,
    sampling: Sampling,
    position: int,
    mask: Tensor | None = None,
    counts: Tensor | None = None,
) -> int:
    """Choose one token; of equal scores the lowest id wins.

    logits: fp32 [V]. position: index of the token among those generated, from 0. mask: int32
    [ceil(V / 32)], bit i of word w allows id 32 w + i, as llguidance writes it. counts: int32 [V],
    how often each id was generated; required if `sampling.penalises`. Raises FloatingPointError for
    logits that are NaN or infinite, also after penalties, and ValueError for a mask that allows
    nothing or an argument that is missing or does not fit.
    """
    if sampling.penalises:
        logits = penalised(logits, sampling, counts)
    low, high = logits.aminmax()
    if not math.isfinite(float(high) - float(low)):
        raise FloatingPointError("the logits hold NaN or infinite values")
    if mask is None:
        return _choose(logits, high, sampling, position, None)
    ids = allowed_ids(mask, logits.numel())
    logits = logits[ids]
    return int(ids[_choose(logits, logits.max(), sampling, position, ids)])


def _choose(
    logits: Tensor, high: Tensor, sampling: Sampling, position: int, ids: Tensor | None
) -> int:
    """Choose among `ids` (None: all ids), which have these logits; return an index into `ids`."""
    if sampling.temperature <= ZERO_TEMPERATURE:
        return int(logits.argmax())
    temperature = torch.tensor(sampling.temperature, dtype=torch.float32)
    # The best score is 0 and all others are negative. So a tiny temperature can make scores
    # overflow to -inf, whose probability is 0, but never to +inf.
    scores = (logits - high) / temperature
    kept = survivors(scores, sampling.top_k, sampling.top_p, sampling.min_p)
    noise = gumbel(kept if ids is None else ids[kept], sampling.seed, position)
    return int(kept[(scores[kept] + noise).argmax()])


def allowed_ids(mask: Tensor, vocab: int) -> Tensor:
    """Return the ids that a grammar mask allows, ascending: int32 [words] -> int64 [n].

    Bits from `vocab` on are ignored. Raises ValueError if no id is allowed.
    """
    check_tensor("mask", mask, torch.int32, -(-vocab // MASK_BITS))
    ids = mask_bits(mask, vocab).nonzero()[:, 0]
    if not ids.numel():
        raise ValueError("mask: it allows no token")
    return ids


def mask_bits(masks: Tensor, vocab: int) -> Tensor:
    """Return the bits of grammar masks: int32 [..., words] -> int32 [..., vocab] of 0 and 1."""
    return (masks[..., None] >> _BIT_PLACES).bitwise_and_(1).flatten(-2)[..., :vocab]


def penalised(logits: Tensor, sampling: Sampling, counts: Tensor | None) -> Tensor:
    """Return logits after penalties for generated ids: fp32 [V], int32 [V] -> fp32 [V].

    The repetition penalty is that of CTRL (Keskar et al., CTRL: A Conditional Transformer Language
    Model, 2019, section 4.1), which divides logits. As usual, a negative logit is multiplied
    instead, so that it also becomes lower. Then, as in OpenAI's API
    (https://platform.openai.com/docs/guides/text-generation, "Parameter details"), logit - count *
    frequency - (presence if count > 0).
    """
    if counts is None:
        raise ValueError("counts: missing, but the sampling has penalties, which need them")
    check_tensor("counts", counts, torch.int32, logits.numel())
    penalties = (sampling.repetition, sampling.presence, sampling.frequency)
    return penalised_by(logits, counts, torch.tensor(penalties, dtype=torch.float32))


def penalised_by(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Compute `penalised` for logits and counts [..., V] with penalties fp32 [..., 3].

    The penalties are repetition, presence and frequency.
    """
    repetition, presence, frequency = penalties[..., None].unbind(-2)
    seen = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    kept = torch.where(seen, repeated, logits)
    return kept - counts.to(torch.float32) * frequency - seen.to(torch.float32) * presence


def survivors(scores: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Return the indices that top-k, top-p and min-p keep, ascending: int64 [n], n >= 1.

    scores: fp32 [V], logits minus the best logit, divided by the temperature. The module's
    docstring defines top_p and min_p.
    """
    all_ranks = not 0 < top_k < scores.numel()
    if top_p < 1 or min_p > 0:
        top_p, min_p = torch.tensor((top_p, min_p), dtype=torch.float32).tolist()
    if all_ranks and top_p >= 1 and min_p == 0:
        return torch.arange(scores.numel())
    if all_ranks and top_p >= 1:
        return (weights(scores) >= least_weight(min_p)).nonzero()[:, 0]
    ranked, ids = scores.sort(descending=True, stable=True)
    if not all_ranks:
        ranked, ids = ranked[:top_k], ids[:top_k]
    if top_p < 1 or min_p > 0:
        chances = weights(ranked)
        if top_p < 1:
            sums = chances.cumsum(-1)
            # The sums ascend. Keep the ids whose sum is below the target, and one more, with which
            # the sum reaches it.
            ids = ids[: 1 + int((sums < top_p_weight(int(sums[-1]), top_p)).sum())]
        if min_p > 0:
            ids = ids[chances[: ids.numel()] >= least_weight(min_p)]
    return ids.sort().values


def top_p_weight(total: int, top_p: float) -> int:
    """Return the minimum sum of the weights of the ids that top-p keeps; it is at least 1."""
    return max(1, -(-total * int(top_p * 2**TOP_P_BITS) >> TOP_P_BITS))


def least_weight(min_p: float) -> int:
    """Return the minimum weight of an id that min-p keeps."""
    return int(min_p * 2**WEIGHT_BITS)


def weights(scores: Tensor) -> Tensor:
    """Return exp(score) in units of 2**-40, truncated: fp32 [...] of at most 0 -> int64 [...].

    The bits are the same on every device, because no operation is fused with another and no library
    computes exp. If n is the integer nearest to score / log(2) and r is score - n * log(2),
    exp(score) is 2**n * exp(r). The largest error against double precision is 1.17 units in the
    last place of fp32.
    """
    bounded = scores.clamp(min=MIN_WEIGHED_SCORE)
    shifted = (bounded * _LOG2_E).add_(_ROUND_TO_WHOLE)
    whole = shifted - _ROUND_TO_WHOLE
    rest = bounded.sub_(whole * _LN2_HIGH).sub_(whole.mul_(_LN2_LOW))
    series = rest * _EXP_SERIES[0]
    for coefficient in _EXP_SERIES[1:-1]:
        series.add_(coefficient).mul_(rest)
    series.add_(_EXP_SERIES[-1])
    # The low bits of `shifted` are n. Shifting them left puts n into the exponent of an fp32
    # number; the higher bits are shifted out.
    power = (shifted.view(torch.int32) << _FRACTION_BITS) + _WEIGHT_UNIT_BITS
    return (series * power.view(torch.float32)).to(torch.int64)


def gumbel(ids: Tensor, seed: int, position: int) -> Tensor:
    """Return the Gumbel noise of each vocabulary id at a position: int64 [n] -> fp32 [n]."""
    return keyed_gumbel(ids, seed_key(seed), position)


def keyed_gumbel(ids: Tensor, key: Tensor, position: Tensor | int) -> Tensor:
    """Compute `gumbel` for ids of several rows of a batch, each with its own seed and position.

    key: the seed's words (`seed_key`) for each id, int64 [2, n], or for all ids, [2, 1]. position:
    int64 [n], or one number for all ids.
    """
    counter = torch.zeros(4, ids.numel(), dtype=torch.int64)
    counter[0] = ids
    counter[1] = position
    return gumbel_of(keyed_philox(counter, key)[0])


def gumbel_of(word: Tensor) -> Tensor:
    """Return the Gumbel noise of random words: int64 [n] of u32 values -> fp32 [n]."""
    uniform = (word >> 8).to(torch.float64).clamp_(min=0.5).mul_(2.0**-24)
    exponential = uniform.log_().neg_().to(torch.float32)
    return exponential.to(torch.float64).log_().neg_().to(torch.float32)


def philox(counter: Tensor, seed: int) -> Tensor:
    """Compute Philox4x32-10 of n counters: int64 [4, n] of u32 values -> int64 [4, n].

    seed: u64, which holds the two 32-bit words of the key.
    """
    return keyed_philox(counter, seed_key(seed))


def seed_key(*seeds: int) -> Tensor:
    """Return the two key words of each seed, a u64: int64 [2, seeds] of u32 values."""
    return torch.tensor([[seed & _LOW_32 for seed in seeds], [seed >> 32 for seed in seeds]])


def keyed_philox(counter: Tensor, key: Tensor) -> Tensor:
    """Compute `philox` of n counters, with a key for each, int64 [2, n], or one for all, [2, 1].

    An int64 product wraps modulo 2**64, so its bits are those of the 32x32-bit product. Between
    rounds the odd words hold the whole product, although only its low half counts. The high half is
    removed later by the mask on the even words, or by the mask at the end.
    """
    even, odd = counter[0::2], counter[1::2]
    for step in _ROUND_STEPS:
        product = (even * _MULTIPLIERS).flip(0)
        even = (product >> _HALF ^ odd ^ (key + step)) & _LOW_HALF
        odd = product
    return torch.stack((even, odd & _LOW_HALF), 1).view(4, -1)
