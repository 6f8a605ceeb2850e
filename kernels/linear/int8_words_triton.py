"""Rows in the registers of a program: activations, normalised and quantised, and their weights.

The device functions that both GEMVs with int8 activations share. A row of `IN` elements is
held as `STEPS` tiles [LINES, 32, 4]: a line is 32 words of 4 elements, and the lines of a tile
go to one warp each. Tiles follow one another in a tuple, so that a size which is no power of
two, such as 2560 or 6912, leaves only the last one with lanes that have nothing to do.

What they compute is `inverse_rms`, `normalise` and `int8_factor` of norm_triton, bit for bit,
in half the instructions: every program of a GEMV repeats this work, so it counts.
"""

# Triton's language has no types: its functions are compiled, not called.
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear.ternary import INT8_MAX, MIN_ABSMAX
from kernels.rows.norm import EXPONENT_BIAS, MAX_EXPONENT, MIN_EXPONENT, SQUARE_BITS
from kernels.rows.norm_triton import normalise

WORDS = 32
"""Words of a line: 128 bytes, what a memory transaction holds."""
WORD = 4
"""Elements of a word: what one dp4a multiplies."""
_WORDS = tl.constexpr(WORDS)
_WORD = tl.constexpr(WORD)
_INT8_MAX = tl.constexpr(float(INT8_MAX))
_MIN_ABSMAX = tl.constexpr(MIN_ABSMAX)
_SQUARE_SCALE = tl.constexpr(2.0**SQUARE_BITS)
_HALF_SCALE = tl.constexpr(2.0 ** (SQUARE_BITS // 2))
_LOWEST = tl.constexpr(EXPONENT_BIAS + MIN_EXPONENT)
_HIGHEST = tl.constexpr(EXPONENT_BIAS + MAX_EXPONENT)
# fp32 counts in ones from 2**23 on: adding this rounds |v| < 2**22 half to even, and leaves
# v + 128 in the lowest byte of the sum's bits, below bits that are the same for every v.
_ROUND = tl.constexpr(12_582_912.0 + 128.0)
# The constant bits of four such sums, each moved to its byte and added up, modulo 2**32.
_ROUND_BITS = tl.constexpr(0x4B400000 * 0x01010101 % 2**32 - 2**32)
_SIGNS = tl.constexpr(0x80808080 - 2**32)


@triton.jit
def dp4a(weights, activations, total, INTERPRETED: tl.constexpr):
    """total + the four products of the signed bytes of two words: int32, elementwise."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            left = (weights << (24 - 8 * byte)) >> 24
            total += left * ((activations << (24 - 8 * byte)) >> 24)
        return total
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [weights, activations, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def elements(step: tl.constexpr, LINES: tl.constexpr):
    """Which elements of a row a tile holds: int32 [LINES, 32, 4]."""
    line = step * LINES + tl.arange(0, LINES)
    word = line[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    return (word * _WORD)[:, :, None] + tl.arange(0, _WORD)[None, None, :]


@triton.jit
def load_row(row_ptr, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr):
    """A row of IN fp32 elements as a tuple of STEPS tiles, 0 beyond its end."""
    tiles = ()
    for step in tl.static_range(STEPS):
        element = elements(step, LINES)
        if (step + 1) * LINES * _WORDS * _WORD <= IN:
            tiles = tiles + (tl.load(row_ptr + element),)
        else:
            tiles = tiles + (tl.load(row_ptr + element, mask=element < IN, other=0.0),)
    return tiles


@triton.jit
def load_weights(
    words_ptr, row, end, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Rows `row` of IN // 4 words as a tuple of STEPS tiles int32 [LINES, rows, 32]; 0 from `end`.

    Each is read once: what comes from memory is not kept for others.
    """
    tiles = ()
    for step in tl.static_range(STEPS):
        line = step * LINES + tl.arange(0, LINES)
        word = (line[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :])[:, None, :]
        mask = (row < end)[None, :, None]
        if (step + 1) * LINES * _WORDS * _WORD > IN:
            mask = mask & (word < IN // _WORD)
        place = words_ptr + row[None, :, None] * (IN // _WORD) + word
        tile = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def largest_magnitude(tiles, LINES: tl.constexpr, STEPS: tl.constexpr):
    """max |x| of a row, infinity if it holds NaN: fp32 scalar."""
    largest = tl.abs(tiles[0])
    for step in tl.static_range(1, STEPS):
        largest = tl.maximum(largest, tl.abs(tiles[step]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(tl.where(largest == largest, largest, float("inf")))


@triton.jit
def normalise_row(
    tiles, gains, eps, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """gains * (x * inverse_rms(x)) of a row and its gains, both tuples of tiles."""
    largest = largest_magnitude(tiles, LINES, STEPS)
    finite = largest < float("inf")
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, _LOWEST), _HIGHEST)
    down = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    # The scale of a square is split between its factors: powers of two round nothing.
    factor = down * _HALF_SCALE
    fixed = tl.zeros((LINES, _WORDS, _WORD), tl.int64)
    for step in tl.static_range(STEPS):
        scaled = tl.where(finite, tiles[step] * factor, 0.0)
        fixed += (scaled * scaled).to(tl.int64)
    mean = tl.div_rn(tl.sum(fixed).to(tl.float32), IN * _SQUARE_SCALE) + eps * down * down
    inverse = tl.div_rn(down, tl.sqrt_rn(tl.where(finite, mean, 1.0)))
    inverse = tl.where(finite, inverse, float("nan"))
    normed = ()
    for step in tl.static_range(STEPS):
        normed = normed + (normalise(tiles[step], gains[step], inverse),)
    return normed


@triton.jit
def quantise_row(tiles, LINES: tl.constexpr, STEPS: tl.constexpr):
    """Words of int8 of a row, a tuple of int32 [LINES, 32], and the factor: fp32 scalar.

    The factor of a row with NaN or infinite values is NaN, and its words have no meaning.
    """
    largest = largest_magnitude(tiles, LINES, STEPS)
    factor = tl.div_rn(1.0, tl.maximum(largest, _MIN_ABSMAX)) * _INT8_MAX
    factor = tl.where(largest < float("inf"), factor, float("nan"))
    shift = (8 * tl.arange(0, _WORD))[None, None, :]
    words = ()
    for step in tl.static_range(STEPS):
        bits = (tiles[step] * factor + _ROUND).to(tl.int32, bitcast=True)
        words = words + ((tl.sum(bits << shift, 2) - _ROUND_BITS) ^ _SIGNS,)
    return words, factor
