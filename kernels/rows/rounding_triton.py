"""Device functions that round fp32: to narrower floats, and to the integers that norms sum."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from tailrace.kernels.rows.norm import EXPONENT_BIAS, FIXED_BITS, MIN_EXPONENT

# Adding 1.5 * 2**23 rounds |v| <= 2**22 to an integer, half to even. The integer is the bits of the
# sum minus the bits of 1.5 * 2**23.
_ROUND = tl.constexpr(12_582_912.0)
_ROUND_BITS = tl.constexpr(0x4B400000)
# _LOWEST: minimum biased exponent of a row's largest value. The factor that scales the row has the
# biased exponent _FACTOR - e, if e is the biased exponent of the row's largest value.
_LOWEST = tl.constexpr(EXPONENT_BIAS + MIN_EXPONENT)
_FACTOR = tl.constexpr(127 + EXPONENT_BIAS + FIXED_BITS)


@triton.jit
def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round fp32 x to `dtype`, half to even.

    The interpreter's conversion to bf16 truncates. So in the interpreter the bits are rounded with
    integer operations, and the result stays fp32.
    """
    if not INTERPRETED:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def fixed_factor(largest):
    """Return the power of two that scales a row, from the bits of its largest magnitude."""
    exponent = tl.maximum(largest >> 23, _LOWEST)
    return ((_FACTOR.value - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def squares(x, factor):
    """Return the squares of x * factor rounded to integers: int64.

    The factor is a power of two, so the product is exact. So the product and the addition that
    rounds can be one instruction, with the same result.
    """
    whole = tl.fma(x, factor, _ROUND).to(tl.int32, bitcast=True) - _ROUND_BITS
    return whole.to(tl.int64) * whole
