"""How every kernel rounds fp32: to a narrower float, and to whole numbers, squared for a norm."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from tailrace.kernels.rows.norm import EXPONENT_BIAS, FIXED_BITS, MIN_EXPONENT

# Adding 1.5 * 2**23 rounds |v| <= 2**22 to a whole number, half to even, which is then what the
# bits of the sum are above those of 1.5 * 2**23.
_ROUND = tl.constexpr(12_582_912.0)
_ROUND_BITS = tl.constexpr(0x4B400000)
# The least biased exponent of a row's largest value, and what a factor's is above its negative.
_LOWEST = tl.constexpr(EXPONENT_BIAS + MIN_EXPONENT)
_FACTOR = tl.constexpr(127 + EXPONENT_BIAS + FIXED_BITS)


@triton.jit
def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 x in `dtype`, half to even; in the interpreter, whose bf16 truncates, held as fp32."""
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
    """The power of two that a row is scaled by, from the bits of its largest magnitude: fp32."""
    exponent = tl.maximum(largest >> 23, _LOWEST)
    return ((_FACTOR.value - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def squares(x, factor):
    """x * factor, rounded to whole numbers, squared: int64. A power of two as factor rounds
    nothing, so that product and sum are one instruction."""
    whole = tl.fma(x, factor, _ROUND).to(tl.int32, bitcast=True) - _ROUND_BITS
    return whole.to(tl.int64) * whole
