"""The one way in which every kernel rounds fp32 to a narrower float."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl


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
