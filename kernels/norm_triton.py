"""RMSNorm and int8 quantisation of a row, as the device functions that every kernel shares.

A float sum depends on its order, and the order on tile, warps and batch. Here a row's squares
are summed as whole numbers: scaled by a power of two so that the largest lies in [1/4, 1),
cut to 46 binary places and added as int64. Addition of integers has no order, so a row has
the same norm in every kernel, at every batch, and in the torch oracle, bit for bit.
Kernels that use these functions are compiled with `enable_fp_fusion=False`: a product that is
fused with an addition is not rounded, and would differ from the oracle's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.norm import EXPONENT_BIAS, MAX_EXPONENT, MIN_EXPONENT, SQUARE_BITS
from kernels.ternary import INT8_MAX, MIN_ABSMAX

_SQUARE_SCALE = tl.constexpr(2.0**SQUARE_BITS)
_INT8_MAX = tl.constexpr(float(INT8_MAX))
_MIN_ABSMAX = tl.constexpr(MIN_ABSMAX)
# Adding and subtracting 1.5 * 2**23 rounds |v| < 2**22 to a whole number, half to even.
_ROUND = tl.constexpr(12_582_912.0)
# Biased exponents of the largest value between which a row is scaled.
_LOWEST = tl.constexpr(EXPONENT_BIAS + MIN_EXPONENT)
_HIGHEST = tl.constexpr(EXPONENT_BIAS + MAX_EXPONENT)


@triton.jit
def inverse_rms(x, size, eps):
    """1 / sqrt(mean(x ** 2) + eps) of each row: fp32 [rows, BLOCK] -> fp32 [rows].

    x holds 0 beyond `size` columns. NaN for a row with NaN or infinite values.
    """
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, _LOWEST), _HIGHEST)
    down = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    finite = largest < float("inf")
    scaled = tl.where(finite[:, None], x * down[:, None], 0.0)
    fixed = (scaled * scaled * _SQUARE_SCALE).to(tl.int64)
    total = tl.sum(fixed, 1).to(tl.float32)
    mean = tl.div_rn(total, size * _SQUARE_SCALE) + eps * down * down
    inverse = tl.div_rn(down, tl.sqrt_rn(tl.where(finite, mean, 1.0)))
    return tl.where(finite, inverse, float("nan"))


@triton.jit
def normalise(x, weight, inverse):
    """weight * (x * inverse): the order of the products is part of the definition."""
    return weight * (x * inverse)


@triton.jit
def int8_factor(normed):
    """127 / max(|row|, 1e-5): what a row is multiplied by before rounding; NaN where it has NaN.

    It is the product of 127 and the reciprocal, since that is what torch makes of the quotient.
    normed: fp32 [rows, BLOCK], 0 beyond its size. Returns fp32 [rows].
    """
    largest = tl.max(tl.where(normed == normed, tl.abs(normed), float("inf")), 1)
    factor = tl.div_rn(1.0, tl.maximum(largest, _MIN_ABSMAX)) * _INT8_MAX
    return tl.where(largest < float("inf"), factor, float("nan"))


@triton.jit
def quantise(x, factor):
    """Whole numbers of -127 .. 127 as int32, rounded half to even; 0 for NaN.

    x, factor: fp32, of shapes that broadcast; |x * factor| <= 127 but for rounding.
    """
    rounded = (x * factor + _ROUND) - _ROUND
    bounded = tl.minimum(tl.maximum(rounded, -_INT8_MAX), _INT8_MAX)
    return tl.where(bounded == bounded, bounded, 0.0).to(tl.int32)
