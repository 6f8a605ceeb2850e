"""Device functions of the sampler: weights, noise, the best id of a block, settings of a row.

All functions are element-wise, or compute integer sums or maxima. So no result depends on the size
of a block, the number of warps or the order in which blocks run.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from tailrace.kernels.sampler.sampler import (
    EXP_SERIES,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    MIN_WEIGHED_SCORE,
    ROUND_TO_WHOLE,
    TOP_P_BITS,
    WEIGHT_BITS,
)

_LOG2_E = tl.constexpr(LOG2_E)
_LN2_HIGH = tl.constexpr(LN2_HIGH)
_LN2_LOW = tl.constexpr(LN2_LOW)
_ROUND_TO_WHOLE = tl.constexpr(ROUND_TO_WHOLE)
_MIN_WEIGHED_SCORE = tl.constexpr(MIN_WEIGHED_SCORE)
_E6, _E5, _E4, _E3, _E2, _E1, _E0 = (tl.constexpr(coefficient) for coefficient in EXP_SERIES)
_WEIGHT_UNIT_BITS = tl.constexpr((127 + WEIGHT_BITS) << 23)
_WEIGHT_UNIT = tl.constexpr(float(2**WEIGHT_BITS))
_TOP_P_BITS = tl.constexpr(TOP_P_BITS)
_TOP_P_UNIT = tl.constexpr(float(2**TOP_P_BITS))
_TOP_P_LOW = tl.constexpr(2**TOP_P_BITS - 1)
_MAX_ID = tl.constexpr(2**31 - 1)
# Noise is in [-2.853, 16.636] and the best score is 0, so a score below -(16.636 + 2.853) cannot be
# drawn.
NOISE_REACH = 20.0
_NOISE_REACH = tl.constexpr(NOISE_REACH)


@triton.jit
def weights(scores):
    """Compute `sampler.weights` of scores, with the same bits: fp32 <= 0 -> int64."""
    bounded = tl.maximum(scores, _MIN_WEIGHED_SCORE)
    shifted = bounded * _LOG2_E + _ROUND_TO_WHOLE
    whole = shifted - _ROUND_TO_WHOLE
    rest = bounded - whole * _LN2_HIGH - whole * _LN2_LOW
    series = rest * _E6 + _E5
    series = series * rest + _E4
    series = series * rest + _E3
    series = series * rest + _E2
    series = series * rest + _E1
    series = series * rest + _E0
    power = (shifted.to(tl.int32, bitcast=True) << 23) + _WEIGHT_UNIT_BITS
    return (series * power.to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def key_weights(keys):
    """Return the weights of the scores that have these keys (see `score_keys`)."""
    return weights(-keys.to(tl.float32, bitcast=True))


@triton.jit
def score_keys(scores):
    """Return int32 keys of scores, fp32 <= 0; a better score has a lower key."""
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def noise_words(ids, seed, position):
    """Return the first word of Philox4x32-10 for each id: uint32 [BLOCK]."""
    zero = ids * 0
    word, _, _, _ = tl.philox(seed, ids, zero + position, zero, zero)
    return word


@triton.jit
def noise(ids, seed, position):
    """Compute `sampler.gumbel` of ids, with the same bits: fp32 [BLOCK]."""
    words = noise_words(ids, seed, position)
    uniform = tl.maximum((words >> 8).to(tl.int32).to(tl.float64), 0.5) * 5.9604644775390625e-08
    exponential = (-tl.log(uniform)).to(tl.float32)
    return (-tl.log(exponential.to(tl.float64))).to(tl.float32)


@triton.jit
def best(scores, ids):
    """Return the best score of a block, and the lowest id with that score."""
    top = tl.max(scores, 0)
    return top, tl.min(tl.where(scores == top, ids, _MAX_ID), 0)


@triton.jit
def better(score, id, other_score, other_id):
    """Return the better of two (score, id); of equal scores the one with the lower id."""
    takes = (other_score > score) | ((other_score == score) & (other_id < id))
    return tl.where(takes, other_score, score), tl.where(takes, other_id, id)


@triton.jit
def draw(scores, ids, seed, position):
    """Return the best (noisy score, id) of a block; scores of -inf are ignored.

    The best score of a row is 0. If all scores of the block are below -NOISE_REACH, none can win,
    so the function computes no noise.
    """
    top = tl.max(scores, 0)
    id = _MAX_ID
    if top > -_NOISE_REACH:
        top, id = best(scores + noise(ids, seed, position), ids)
    return top, id


@triton.jit
def least_weight(min_p):
    """Compute `sampler.least_weight`: fp32 -> int64; 0 if min-p is off."""
    return (tl.where(min_p > 0, tl.minimum(min_p, 1.0), 0.0) * _WEIGHT_UNIT).to(tl.int64)


@triton.jit
def top_p_weight(total, top_p):
    """Compute `sampler.top_p_weight`: int64, fp32 -> int64, with products that fit into 64 bits."""
    fraction = (tl.maximum(top_p, 0.0) * _TOP_P_UNIT).to(tl.int64)
    low = (total & _TOP_P_LOW) * fraction + _TOP_P_LOW
    return tl.maximum((total >> _TOP_P_BITS) * fraction + (low >> _TOP_P_BITS), 1)


@triton.jit
def selects(temperature, top_k, top_p, vocab):
    """Return True if a row's settings use top-k or top-p."""
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1))
