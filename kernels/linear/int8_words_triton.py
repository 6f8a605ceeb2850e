"""Device functions for rows in registers: loading rows, and quantising activations to int8.

Both GEMVs with int8 activations use them. A row of `IN` elements is held as `STEPS` tiles [LINES,
32, 4]: a line is 32 words of 4 elements, and each line of a tile belongs to one warp. The tiles
form a tuple, so that for sizes that are no power of two, such as 2560 or 6912, only the last tile
has idle lanes.

The functions compute `inverse_rms`, `normalise` and `int8_factor` of norm_triton, bit for bit, with
a third of the instructions. That matters because every program of a GEMV repeats this work after
the wait for earlier launches.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from tailrace.kernels.linear.ternary import INT8_MAX, MIN_ABSMAX
from tailrace.kernels.rows.rounding_triton import fixed_factor, squares

WORDS = 32
"""Words per line: 128 bytes, one memory transaction."""
WORD = 4
"""Elements per word, which one dp4a multiplies."""
_WORDS = tl.constexpr(WORDS)
_WORD = tl.constexpr(WORD)
_INT8_MAX = tl.constexpr(float(INT8_MAX))
_MIN_ABSMAX = tl.constexpr(MIN_ABSMAX)
# This is 1.5 * 2**23. From 2**23 on, fp32 numbers are integers. So adding it to |v| < 2**22 rounds
# v to an integer, half to even, and the lowest byte of the sum's bits is that of the integer.
_ROUND = tl.constexpr(12_582_912.0)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
_PIECE_BITS = tl.constexpr(23)
_PIECE = tl.constexpr(2**23 - 1)


@triton.jit
def dp4a(weights, activations, total, INTERPRETED: tl.constexpr):
    """Add the four products of the signed bytes of two words to `total`: int32, element-wise."""
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
def lowest_bytes(numbers, LINES: tl.constexpr, INTERPRETED: tl.constexpr):
    """Pack the lowest bytes of int32 [LINES, 32, 4] into words, int32 [LINES, 32]."""
    if INTERPRETED:
        shift = (8 * tl.arange(0, _WORD))[None, None, :]
        return tl.sum((numbers & 0xFF) << shift, 2)
    else:
        even, odd = tl.split(tl.reshape(numbers, (LINES, _WORDS, 2, 2)))
        byte0, byte2 = tl.split(even)
        byte1, byte3 = tl.split(odd)
        return tl.inline_asm_elementwise(
            "{.reg .b32 l, h; prmt.b32 l, $1, $2, 0x0040; prmt.b32 h, $3, $4, 0x0040; "
            "prmt.b32 $0, l, h, 0x5410;}",
            "=r,r,r,r,r",
            [byte0, byte1, byte2, byte3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def elements(step: tl.constexpr, LINES: tl.constexpr):
    """Return the indices of a row's elements in a tile: int32 [LINES, 128], one line per warp.

    The tile has two dimensions here: with three, Triton 3.6 would give each warp parts of 8 lines,
    and would have to exchange data between warps later.
    """
    line = (step * LINES + tl.arange(0, LINES)) * (_WORDS * _WORD)
    return line[:, None] + tl.arange(0, _WORDS * _WORD)[None, :]


@triton.jit
def load_row(
    row_ptr, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr, CACHE: tl.constexpr = ""
):  # fmt: skip
    """Load a row of IN fp32 elements as a tuple of STEPS tiles, with 0 after its end.

    CACHE: `.cg` to read from the L2 cache only, and not from the multiprocessor's L1 cache.
    """
    tiles = ()
    for step in tl.static_range(STEPS):
        element = elements(step, LINES)
        if (step + 1) * LINES * _WORDS * _WORD <= IN:
            tile = tl.load(row_ptr + element, cache_modifier=CACHE)
        else:
            tile = tl.load(row_ptr + element, mask=element < IN, other=0.0, cache_modifier=CACHE)
        tiles = tiles + (tl.reshape(tile, (LINES, _WORDS, _WORD)),)
    return tiles


@triton.jit
def load_weights(
    words_ptr, row, end, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Load weight rows `row` of IN // 4 words as a tuple of STEPS tiles int32 [LINES, rows, 32].

    Rows from `end` on are 0. Each word is read only once, so the loads tell the caches not to keep
    it.
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
def joined(tensors, LEVELS: tl.constexpr):
    """Join 2**LEVELS tensors into one tensor with LEVELS more dimensions, each of size 2.

    The new dimensions are the bits of a tensor's number in the tuple; the last one is the lowest
    bit.
    """
    for level in tl.static_range(LEVELS):
        pairs = ()
        for i in tl.static_range(1 << (LEVELS - level - 1)):
            pairs = pairs + (tl.join(tensors[i], tensors[i + (1 << (LEVELS - level - 1))]),)
        tensors = pairs
    return tensors[0]


@triton.jit
def parted(tensor, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Split the last LEVELS dimensions into 2**LEVELS tensors [SIZE]; the inverse of `joined`."""
    tensors = (tensor,)
    for level in tl.static_range(LEVELS):
        low, high = (), ()
        for i in tl.static_range(1 << level):
            if level == LEVELS - 1:
                pairs = tl.reshape(tensors[i], (SIZE, 2))
            else:
                pairs = tl.reshape(tensors[i], (SIZE, 1 << (LEVELS - level - 1), 2))
            even, odd = tl.split(pairs)
            low, high = low + (even,), high + (odd,)
        tensors = low + high
    return tensors


@triton.jit
def over_warps(values, COUNT: tl.constexpr, LINES: tl.constexpr, MAXIMUM: tl.constexpr):
    """Reduce COUNT tensors, int32 [LINES, 32] of numbers >= 0, to maxima or sums over all warps.

    Each result is int32 [LINES], all equal, so that every warp has it. Each warp stores its own
    partial results to shared memory, and after a barrier every warp reduces those of all warps. As
    many tensors are reduced at a time as fit into a line; another barrier comes before the memory
    is reused.
    """
    ROOM: tl.constexpr = _WORDS // LINES
    lane = tl.broadcast_to(tl.arange(0, _WORDS)[None, :], (LINES, _WORDS))
    # Lane l of every warp reads partial result number l // LINES of warp l % LINES.
    place = tl.reshape(lane % LINES * _WORDS + lane, (LINES * _WORDS,))
    reduced = ()
    for first in tl.static_range(0, COUNT, ROOM):
        own = tl.zeros((LINES, _WORDS), tl.int32)
        for i in tl.static_range(min(ROOM, COUNT - first)):
            one = tl.max(values[first + i], 1) if MAXIMUM else tl.sum(values[first + i], 1)
            own = tl.where(lane >= i * LINES, one[:, None], own)
        every = tl.gather(tl.reshape(own, (LINES * _WORDS,)), place, 0)
        every = tl.reshape(every, (LINES, _WORDS))
        for i in tl.static_range(min(ROOM, COUNT - first)):
            one = tl.where(lane // LINES == i, every, 0)
            reduced = reduced + (tl.max(one, 1) if MAXIMUM else tl.sum(one, 1),)
    return reduced


@triton.jit
def magnitudes(tiles, STEPS: tl.constexpr):
    """Return the bits of max |x| over STEPS tiles: int32 [LINES, 32].

    Read as integers, the bits of non-negative floats have the same order as the floats, and NaN is
    above all.
    """
    largest = tl.abs(tiles[0])
    for step in tl.static_range(1, STEPS):
        largest = tl.maximum(largest, tl.abs(tiles[step]), propagate_nan=tl.PropagateNan.ALL)
    low, high = tl.split(tl.reshape(largest, (largest.shape[0], _WORDS, 2, 2)))
    largest = tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)
    low, high = tl.split(largest)
    largest = tl.maximum(low, high, propagate_nan=tl.PropagateNan.ALL)
    return largest.to(tl.int32, bitcast=True) & _MAGNITUDE


# These are the instructions of a division and a square root without the tests and the slow path for
# numbers near the limits of the range. The compiler cannot know that such numbers do not occur
# here. Leaving the tests out saves time after the wait for earlier launches.
_QUOTIENT_ASM = """{
.reg .f32 inverse, rest, quotient, minus;
neg.f32 minus, $2;
rcp.approx.ftz.f32 inverse, $2;
fma.rn.f32 rest, minus, inverse, 0f3F800000;
fma.rn.f32 inverse, rest, inverse, inverse;
mul.rn.f32 quotient, $1, inverse;
fma.rn.f32 rest, minus, quotient, $1;
fma.rn.f32 $0, rest, inverse, quotient;
}"""
_ROOT_ASM = """{
.reg .f32 inverse, root, half, rest;
rsqrt.approx.ftz.f32 inverse, $1;
mul.rn.f32 root, $1, inverse;
mul.rn.f32 half, inverse, 0f3F000000;
neg.f32 rest, root;
fma.rn.f32 rest, rest, root, $1;
fma.rn.f32 $0, rest, half, root;
}"""
_QUOTIENT = tl.constexpr(_QUOTIENT_ASM)
_ROOT = tl.constexpr(_ROOT_ASM)


@triton.jit
def quotient(left, right, INTERPRETED: tl.constexpr):
    """Return left / right, correctly rounded.

    Both are fp32 scalars far from the limits of the range.
    """
    if INTERPRETED:
        return tl.div_rn(left, right)
    else:
        return tl.inline_asm_elementwise(
            _QUOTIENT, "=f,f,f", [left, right], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def root(square, INTERPRETED: tl.constexpr):
    """Return the square root, correctly rounded, of an fp32 scalar; as in `quotient`."""
    if INTERPRETED:
        return tl.sqrt_rn(square)
    else:
        return tl.inline_asm_elementwise(
            _ROOT, "=f,f", [square], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def pieces_of_squares(tiles, factor, STEPS: tl.constexpr):
    """Sum a lane's integer squares over STEPS tiles, as two parts, int32 [LINES, 32]: low, high.

    The low part has 23 bits. A square is at most 2**40, so a lane's 64 elements sum to at most
    2**46, and a row of 2**14 elements to 2**54. So the sum of either part over the lanes of 16
    warps fits into 32 unsigned bits.
    """
    total = tl.zeros((tiles[0].shape[0], _WORDS, _WORD), tl.int64)
    for step in tl.static_range(STEPS):
        total += squares(tiles[step], factor)
    total = tl.sum(total, 2)
    return (total & _PIECE).to(tl.int32), (total >> _PIECE_BITS).to(tl.int32)


@triton.jit
def inverse_of(
    tiles, largest, eps, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return `inverse_rms` of a row, given the bits of its largest magnitude: fp32 [LINES]."""
    factor, finite = fixed_factor(largest), largest < _INFINITE
    # For a row with NaN or infinite values the sum is meaningless; `finite` discards it below.
    pieces = pieces_of_squares(tiles, factor[:, None, None], STEPS)
    low, high = over_warps(pieces, 2, LINES, False)
    total = high.to(tl.uint32, bitcast=True).to(tl.int64) << _PIECE_BITS
    total += low.to(tl.uint32, bitcast=True)
    mean = quotient(total.to(tl.float32), float(IN), INTERPRETED)
    mean = tl.where(finite, mean + eps * factor * factor, 1.0)
    # `factor` is a power of two, so the multiplication by it is exact.
    inverse = factor * quotient(1.0, root(mean, INTERPRETED), INTERPRETED)
    return tl.where(finite, inverse, float("nan"))


@triton.jit
def int8_row(
    tiles, gains, eps, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr,
    NORM: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Quantise a row of STEPS tiles to int8, after a norm if NORM; return its words and its factor.

    gains: the norm's weight. The words are STEPS tiles int32 [LINES, 32]. The factor is fp32
    [LINES], all equal. The factor of a row with NaN or infinite values is NaN, and its words are
    meaningless.
    """
    largest = magnitudes(tiles, STEPS)
    if NORM:
        # Rounding is monotonic, so the largest normed element comes from the largest product of
        # gain and element. That product can be found before the norm is known, in the same exchange
        # as the largest element.
        products = ()
        for step in tl.static_range(STEPS):
            products = products + (gains[step] * tiles[step],)
        most_of = magnitudes(products, STEPS)
        largest, most_of = over_warps((largest, most_of), 2, LINES, True)
        inverse = inverse_of(tiles, largest, eps, IN, LINES, STEPS, INTERPRETED)
        most = most_of.to(tl.float32, bitcast=True) * inverse
    else:
        most = over_warps((largest,), 1, LINES, True)[0].to(tl.float32, bitcast=True)
    factor = tl.div_rn(1.0, tl.maximum(most, _MIN_ABSMAX)) * _INT8_MAX
    factor = tl.where(most < float("inf"), factor, float("nan"))
    words = ()
    for step in tl.static_range(STEPS):
        normed = products[step] * inverse[:, None, None] if NORM else tiles[step]
        rounded = (normed * factor[:, None, None] + _ROUND).to(tl.int32, bitcast=True)
        words = words + (lowest_bytes(rounded, LINES, INTERPRETED),)
    return words, factor
