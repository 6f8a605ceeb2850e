"""The kernel of every linear with float activations: dense, int8 and int4 weights.

The operands are swapped: a tile of the weight is the left operand of the tensor cores, which must
have at least 64 rows. The activations of 16 rows are the right operand, padded with zeros. So a
batch of one row loads little more than the weights. A row has the same bits alone and among 64
rows, because its products, their order and the instruction do not depend on how many columns of the
right operand are in use. A program serves up to four groups of 16 rows from one reading of the
weight.

If a plan splits sums over several programs, partial sums go to a workspace, and the last program to
finish adds them in ascending order. There are no float atomics.

The first tiles of the weight are prefetched into L2 while the prologue computes norms or, under
programmatic dependent launch, while the preceding kernel still runs.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from tailrace.kernels.dependent_triton import prefetch
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.linear_plan import ROWS
from tailrace.kernels.rows.norm_triton import inverse_rms, normalise
from tailrace.kernels.rows.rounding_triton import rounded

PREFETCH = 4
"""Tiles of the weight that a program prefetches before it may read activations. With 224 programs
that is 14.7 MB together."""

_ROWS = tl.constexpr(ROWS)
_PREFETCH = tl.constexpr(PREFETCH)
_ADD = tl.constexpr(int(Epilogue.ADD))
_SWIGLU = tl.constexpr(int(Epilogue.SWIGLU))

# 0x4300 is 128 in bf16. The last bit of its fraction stands for 1, so writing an integer below 128
# into the fraction gives 128 + integer. 32-bit logic handles two such numbers per register. Then
# 128, the sign or the zero is subtracted. Subtraction of bf16 needs sm_90. A fused multiply-add
# with -1 (0xbf80) also rounds only once, and runs on sm_80.
_INT8_ASM = """{
.reg .b32 word, low, sign;
shr.u32 word, $1, SHIFT;
lop3.b32 low, word, 0x007f007f, 0x43004300, 0xea;
lop3.b32 sign, word, 0x00800080, 0x43004300, 0xea;
.reg .b32 minus;
mov.b32 minus, 0xbf80bf80;
fma.rn.bf16x2 $0, sign, minus, low;
}"""
_INT4_ASM = """{
.reg .b32 word;
shr.u32 word, $1, SHIFT;
lop3.b32 word, word, 0x000f000f, 0x43004300, 0xea;
.reg .b32 minus;
mov.b32 minus, 0xbf80bf80;
fma.rn.bf16x2 $0, $2, minus, word;
}"""


@triton.constexpr_function
def unpack_asm(bits, part):
    """Return the instructions that convert element `part` of two words to two bf16 numbers."""
    return (_INT8_ASM if bits == 8 else _INT4_ASM).replace("SHIFT", str(part * bits))


@triton.jit
def unpacked(words, offset, BITS: tl.constexpr, part: tl.constexpr, INTERPRETED: tl.constexpr):
    """Unpack element `part` of each 16-bit word, as an integer in bf16.

    offset: 128 + zero of each row, used for int4 only, whose codes are 0 .. 15.
    """
    if INTERPRETED:
        code = (words.to(tl.int32) >> (part * BITS)) & ((1 << BITS) - 1)
        if BITS == 8:
            return ((code ^ 0x80) - 0x80).to(tl.float32)
        else:
            return (code + 128).to(tl.float32) - offset
    elif BITS == 8:
        return tl.inline_asm_elementwise(
            unpack_asm(BITS, part), "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            unpack_asm(BITS, part),
            "=r,r,r",
            [words, offset],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def weight_place(
    weight_ptr, out, chunk, OUT: tl.constexpr, IN: tl.constexpr, BITS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    """Return the addresses where chunk `chunk` of the inputs begins in weight rows `out`."""
    if BITS == 0:
        return weight_ptr + out.to(tl.int64) * IN + chunk * BLOCK_WORDS
    else:
        return weight_ptr + (out.to(tl.int64) + chunk * OUT) * BLOCK_WORDS


@triton.jit
def group_constants(
    scale_ptr, zero_ptr, out, real, chunk, OUT: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Load fp32 scales, and 128 + zero as bf16, of int4 rows for a group of inputs: [BLOCK_OUT]."""
    scale = tl.load(scale_ptr + chunk * OUT + out, mask=real, other=0.0)
    zero = tl.load(zero_ptr + chunk * OUT + out, mask=real, other=0)
    return scale, rounded(zero.to(tl.float32) + 128.0, tl.bfloat16, INTERPRETED)


@triton.jit
def activations(
    x_ptr, norm_ptr, inverse, row, rows, column, IN: tl.constexpr, FULL: tl.constexpr,
    NORM: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Load activations of rows `row`, normed if NORM: [16, columns], 0 beyond the batch."""
    mask = (row < rows)[:, None]
    if not FULL:
        mask = mask & (column < IN)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * IN + column[None, :], mask=mask, other=0.0)
    if NORM:
        weight = tl.load(norm_ptr + column, mask=column < IN, other=0.0)
        x = normalise(x, weight[None, :], inverse[:, None])
    if x_ptr.dtype.element_ty == tl.float32:
        return rounded(x, dtype, INTERPRETED)
    elif INTERPRETED:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def inverse_of_rows(x_ptr, rows, eps, IN: tl.constexpr, NORM_BLOCK: tl.constexpr):
    """Return 1 / rms of each row of a group, fp32 [16], and 1 for rows beyond the batch."""
    inverse = tl.full((_ROWS,), 1.0, tl.float32)
    column = tl.arange(0, NORM_BLOCK)
    for row in range(rows):
        x = tl.load(x_ptr + row * IN + column, mask=column < IN, other=0.0)
        inverse = tl.where(tl.arange(0, _ROWS) == row, inverse_rms(x[None, :], IN, eps), inverse)
    return inverse


@triton.jit
def zeros(BLOCK_OUT: tl.constexpr, GROUPS: tl.constexpr):
    """Return sums of 0 for each group of rows: a tuple of GROUPS tensors, fp32 [BLOCK_OUT, 16]."""
    return (tl.zeros((BLOCK_OUT, _ROWS), tl.float32),) * GROUPS


@triton.jit
def add_product(total, w, x):
    """Return total + w x as a tuple of one tensor, since Triton can only join tuples."""
    return (tl.dot(w, tl.trans(x), total, input_precision="ieee"),)


@triton.jit
def add_products(
    sums, w, x_ptr, norm_ptr, inverse, first_row, rows, column,
    IN: tl.constexpr, FULL: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr,
    GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the products of one weight tile to the sums of each group of rows."""
    longer = ()
    for group in tl.static_range(GROUPS):
        row = first_row + group * _ROWS + tl.arange(0, _ROWS)
        x = activations(
            x_ptr, norm_ptr, inverse, row, rows, column, IN, FULL, NORM, dtype, INTERPRETED
        )
        longer = longer + add_product(sums[group], w, x)
    return longer


@triton.jit
def add_scaled_product(total, product, scale):
    """Return total + product * scale, with a scale per weight row, as a tuple of one tensor."""
    return (total + product * scale[:, None],)


@triton.jit
def add_scaled(sums, products, scale, GROUPS: tl.constexpr):
    """Apply `add_scaled_product` to each group of rows."""
    longer = ()
    for group in tl.static_range(GROUPS):
        longer = longer + add_scaled_product(sums[group], products[group], scale)
    return longer


@triton.jit
def add_chunk(
    sums, words, scale_ptr, zero_ptr, out, real, x_ptr, norm_ptr, inverse, first_row, rows,
    chunk, word, OUT: tl.constexpr, IN: tl.constexpr, BITS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr,
    FULL: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Unpack the weight's words of one chunk of inputs, and add its products to the sums."""
    PARTS: tl.constexpr = 1 if BITS == 0 else 16 // BITS
    products, offset = sums, 0.0
    if BITS == 4:
        scale, offset = group_constants(scale_ptr, zero_ptr, out, real, chunk, OUT, INTERPRETED)
        offset = tl.broadcast_to(offset[:, None], (BLOCK_OUT, BLOCK_WORDS))
        products = zeros(BLOCK_OUT, GROUPS)
    for part in tl.static_range(PARTS):
        w = words
        if BITS != 0:
            w = unpacked(words, offset, BITS, part, INTERPRETED)
        elif INTERPRETED:
            w = words.to(tl.float32)
        products = add_products(
            products, w, x_ptr, norm_ptr, inverse, first_row, rows,
            (chunk * PARTS + part) * BLOCK_WORDS + word,
            IN, FULL, NORM, dtype, GROUPS, INTERPRETED,
        )  # fmt: skip
    if BITS == 4:
        return add_scaled(sums, products, scale, GROUPS)
    else:
        return products


@triton.jit
def finish(
    total, scale, out_ptr, row, rows, tile,
    OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, EPILOGUE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Apply scales and epilogue to a group's sums, fp32 [BLOCK_OUT, 16], and store the result."""
    if SCALED:
        total = total * scale[:, None]
    width: tl.constexpr = OUT // 2 if EPILOGUE == _SWIGLU else OUT
    columns: tl.constexpr = BLOCK_OUT // 2 if EPILOGUE == _SWIGLU else BLOCK_OUT
    if EPILOGUE == _SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, columns, _ROWS)), (1, 2, 0)))
        # exp of numbers that are at most 0 cannot overflow.
        small = tl.exp(-tl.abs(gate))
        total = tl.div_rn(gate * tl.where(gate >= 0, 1.0, small), 1.0 + small) * up
    column = tile * columns + tl.arange(0, columns)
    place = out_ptr + row.to(tl.int64)[None, :] * width + column[:, None]
    mask = (row < rows)[None, :] & (column < width)[:, None]
    if EPILOGUE == _ADD:
        total = tl.load(place, mask=mask, other=0.0) + total
    tl.store(place, total, mask=mask)


@triton.jit
def partial_place(
    partial_ptr, place, split, group,
    BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Return the workspace addresses for the sums of one split and group: [BLOCK_OUT, 16].

    The sums of each row of activations are contiguous.
    """
    first = ((place * SPLITS + split) * GROUPS + group) * (_ROWS * BLOCK_OUT)
    row, out = tl.arange(0, _ROWS), tl.arange(0, BLOCK_OUT)
    return partial_ptr + first + row[None, :] * BLOCK_OUT + out[:, None]


@triton.jit
def finish_splits(
    sums, scale, out_ptr, partial_ptr, counter_ptr, first_row, rows, tile, split, place,
    OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr,
    EPILOGUE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Store this split's sums in the workspace; the last split also finishes the tile.

    The last program of the tile to finish adds the sums of all splits, in ascending order.
    """
    for group in tl.static_range(GROUPS):
        kept = partial_place(partial_ptr, place, split, group, BLOCK_OUT, SPLITS, GROUPS)
        row = first_row + group * _ROWS + tl.arange(0, _ROWS)
        tl.store(kept, sums[group], mask=(row < rows)[None, :])
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + place, 1, sem="acq_rel") == SPLITS - 1:
        for group in tl.static_range(GROUPS):
            row = first_row + group * _ROWS + tl.arange(0, _ROWS)
            total = tl.zeros((BLOCK_OUT, _ROWS), tl.float32)
            for other in tl.static_range(SPLITS):
                kept = partial_place(partial_ptr, place, other, group, BLOCK_OUT, SPLITS, GROUPS)
                mask = (row < rows)[None, :]
                total += tl.load(kept, mask=mask, other=0.0, cache_modifier=".cg")
            finish(total, scale, out_ptr, row, rows, tile, OUT, BLOCK_OUT, EPILOGUE, SCALED)
        tl.store(counter_ptr + place, 0)


@triton.jit
def tile_rows(tile, OUT: tl.constexpr, BLOCK_OUT: tl.constexpr, GATED: tl.constexpr):
    """Return a tile's weight rows and a mask of those that exist; half are `up` if GATED."""
    local = tl.arange(0, BLOCK_OUT)
    if GATED:
        half: tl.constexpr = BLOCK_OUT // 2
        within = tile * half + local % half
        return within + local // half * (OUT // 2), within < OUT // 2
    else:
        return tile * BLOCK_OUT + local, tile * BLOCK_OUT + local < OUT


@triton.jit(do_not_specialize=["rows", "eps"])
def linear_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, norm_ptr, out_ptr, partial_ptr, counter_ptr, rows, eps,
    OUT: tl.constexpr, IN: tl.constexpr, BITS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_WORDS: tl.constexpr, SPLITS: tl.constexpr,
    GROUPS: tl.constexpr, NORM_BLOCK: tl.constexpr, EPILOGUE: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a linear; a program has a tile of weight rows, a split, and 1 to 4 groups of rows.

    x: fp32 or the weight's type [rows, IN]. weight: bf16, fp16 or fp32 [OUT, IN] (BITS 0), or int16
    words [IN / 128, OUT, BLOCK_WORDS]. scale: fp32 [OUT] (8 bits) or [IN / 128, OUT]. zero: uint8
    [IN / 128, OUT]. norm: fp32 [IN], applied if NORM_BLOCK, a power of two >= IN, is above 0. out:
    fp32 [rows, OUT], or [rows, OUT / 2] if gated.
    """
    block, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    BLOCK_IN: tl.constexpr = BLOCK_WORDS if BITS == 0 else BLOCK_WORDS * (16 // BITS)
    CHUNKS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN // SPLITS
    FULL: tl.constexpr = IN % BLOCK_IN == 0
    GATED: tl.constexpr = EPILOGUE == _SWIGLU
    EVEN: tl.constexpr = FULL and OUT % BLOCK_OUT == 0
    SCALED: tl.constexpr = BITS == 8
    dtype: tl.constexpr = weight_ptr.dtype.element_ty if BITS == 0 else tl.bfloat16
    out, real = tile_rows(tile, OUT, BLOCK_OUT, GATED)
    word = tl.arange(0, BLOCK_WORDS)
    first = split * CHUNKS
    if (NORM_BLOCK > 0 or PDL) and not INTERPRETED:
        inside = tl.minimum(out, OUT - 1)
        for ahead in tl.static_range(min(_PREFETCH, CHUNKS)):
            prefetch(weight_place(weight_ptr, inside, first + ahead, OUT, IN, BITS, BLOCK_WORDS))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inverse = tl.full((_ROWS,), 1.0, tl.float32)
    if NORM_BLOCK > 0:
        inverse = inverse_of_rows(x_ptr, rows, eps, IN, NORM_BLOCK)

    first_row = block * GROUPS * _ROWS
    sums = zeros(BLOCK_OUT, GROUPS)
    for chunk in range(first, first + CHUNKS):
        place = weight_place(weight_ptr, out, chunk, OUT, IN, BITS, BLOCK_WORDS)
        place = place[:, None] + word[None, :]
        if EVEN:
            words = tl.load(place)
        else:
            inputs = (chunk * BLOCK_WORDS + word < IN) | (BITS != 0)
            words = tl.load(place, mask=real[:, None] & inputs[None, :], other=0)
        sums = add_chunk(
            sums, words, scale_ptr, zero_ptr, out, real, x_ptr, norm_ptr, inverse, first_row, rows,
            chunk, word, OUT, IN, BITS, BLOCK_OUT, BLOCK_WORDS, GROUPS, NORM_BLOCK > 0, FULL,
            dtype, INTERPRETED,
        )  # fmt: skip

    if SCALED:
        scale = tl.load(scale_ptr + out, mask=real, other=0.0)
    else:
        scale = 1.0
    if SPLITS == 1:
        for group in tl.static_range(GROUPS):
            row = first_row + group * _ROWS + tl.arange(0, _ROWS)
            finish(sums[group], scale, out_ptr, row, rows, tile, OUT, BLOCK_OUT, EPILOGUE, SCALED)
    else:
        finish_splits(
            sums, scale, out_ptr, partial_ptr, counter_ptr, first_row, rows, tile, split,
            block * tl.num_programs(1) + tile,
            OUT, BLOCK_OUT, SPLITS, GROUPS, EPILOGUE, SCALED,
        )  # fmt: skip
