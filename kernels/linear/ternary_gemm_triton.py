"""Ternary linears (W2A8) of rows that are int8 already; the kernel here is for many rows.

`kernels.linear.ternary_triton` explains how a packed byte is read, and why every tile gives the
same bits. Here the weights are the left operand of the tensor cores: their 2-bit fields are
unpacked in registers, four bytes at a time. The activations are the right operand, in shared
memory.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.launch import INTERPRETED, OPTIONS
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.ternary_plan import (
    ROWS_TYPES,
    bitnet_linears,
    bytes_moved,
    check_linear,
    part_constants,
)
from tailrace.kernels.linear.ternary_rows_triton import NARROW_ROWS, gated, part_of, ternary_rows
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.variant import Variant

TILE_PACKED, TILE_ROWS = 64, 64
"""Packed rows and activation rows per tile. Large tiles read weights and activations less often."""
TILE_IN = 128
"""Inputs per tile: 128 bytes of a row of int8 activations."""
STAGES = 3

_ADD = tl.constexpr(int(Epilogue.ADD))
_RELU2_GATE = tl.constexpr(int(Epilogue.RELU2_GATE))


@triton.constexpr_function
def field_asm(shift, mask):
    """Return the instructions that extract the same 2-bit field of four bytes.

    The top field includes a byte's sign bit, so it is shifted down by two bits.
    """
    word = f"shr.b32 w, $1, {shift};" if shift else "mov.b32 w, $1;"
    return f"{{.reg .b32 w; {word} and.b32 $0, w, {mask * 0x01010101};}}"


@triton.jit
def field(packed, i: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return field i of packed bytes as int8: (weight + 1) * 4**i, and * 16 for the last field."""
    shift: tl.constexpr = 2 if i == 3 else 0
    mask: tl.constexpr = 3 << (4 if i == 3 else 2 * i)
    if INTERPRETED:
        return ((packed >> shift) & mask).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            field_asm(shift, mask), "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.jit(do_not_specialize=["rows"])
def ternary_gemm_kernel(
    q_ptr, factor_ptr, packed_ptr, scale_ptr, out_ptr, rows,
    IN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    TILE_PACKED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr,
    EPILOGUE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute a linear; a program has TILE_PACKED packed rows and TILE_ROWS activation rows.

    With a gate, half of the packed rows are gate and half are `up`. A field holds weight + 1, so
    one more product, with ones, sums the activations, to be subtracted.
    """
    GATED: tl.constexpr = EPILOGUE == _RELU2_GATE
    END: tl.constexpr = FIRST if GATED else FIRST + SECOND + THIRD
    OWN: tl.constexpr = TILE_PACKED // 2 if GATED else TILE_PACKED
    own = tl.arange(0, TILE_PACKED)
    row = tl.program_id(0) * OWN + own % OWN
    token = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    q_ptr += token * IN
    packed_ptr += (row + own // OWN * END) * IN
    ones = tl.full((TILE_PACKED, TILE_IN), 1, tl.int8)
    sums = (tl.zeros((TILE_PACKED, TILE_ROWS), tl.int32),) * 5
    for step in range((IN + TILE_IN - 1) // TILE_IN):
        k = step * TILE_IN + tl.arange(0, TILE_IN)
        mask = (row < END)[:, None] & (k < IN)[None, :]
        packed = tl.load(packed_ptr[:, None] + k[None, :], mask=mask, other=0)
        mask = (token < rows)[None, :] & (k < IN)[:, None]
        q = tl.load(q_ptr[None, :] + k[:, None], mask=mask, other=0)
        longer = ()
        for i in tl.static_range(4):
            left = field(packed, i, INTERPRETED)
            longer = longer + (tl.dot(left, q, sums[i], out_dtype=tl.int32),)
        sums = longer + (tl.dot(ones, q, sums[4], out_dtype=tl.int32),)
    part, column, size = part_of(row, FIRST, SECOND, THIRD)
    scale = tl.load(scale_ptr + part + own // OWN, mask=row < END, other=0.0)
    factor = tl.load(factor_ptr + token, mask=token < rows, other=1.0)
    if GATED:
        row = tl.program_id(0) * OWN + tl.arange(0, OWN)
        column = row
    mask = (row < END)[:, None] & (token < rows)[None, :]
    for i in tl.static_range(4):
        total = (sums[i] >> min(2 * i, 4)) - sums[4]
        y = tl.div_rn(total.to(tl.float32), factor[None, :]) * scale[:, None]
        if GATED:
            halves = tl.permute(tl.reshape(y, (2, OWN, TILE_ROWS)), (1, 2, 0))
            gate, up = tl.split(halves)
            y = gated(gate, up)
            size = FIRST
        place = out_ptr + token[None, :] * (4 * END) + (column + i * size)[:, None]
        if EPILOGUE == _ADD:
            y = tl.load(place, mask=mask, other=0.0) + y
        tl.store(place, y, mask=mask)


def ternary_gemm(
    q: Tensor,
    factor: Tensor,
    weights: TernaryWeights,
    out: Tensor,
    *,
    epilogue: Epilogue = Epilogue.STORE,
    dependent: bool = False,
) -> None:
    """Compute `ternary_linear` of rows that are already int8, with the bits of `ternary_gemv`.

    q: int8 [rows, in], integers in -127 .. 127. factor: fp32 [rows], by which each row was
    multiplied. out: fp32 [rows, sum of outs]; with RELU2_GATE [rows, out of one part], as in
    `ternary_gemv`. dependent: programmatic dependent launch. This flag is ignored if there are more
    than NARROW_ROWS rows.

    Moves in * sum of outs / 4 bytes of weights once per tile of rows, and rows * in bytes. Raises
    TypeError or ValueError that names the argument.
    """
    rows = check_linear("q", q, torch.int8, weights, out, epilogue)
    check_tensor("factor", factor, torch.float32, rows)
    check_same_device(q=q, factor=factor, packed=weights.packed, out=out)
    if rows == 0:
        return
    if rows <= NARROW_ROWS:
        ternary_rows(q, factor, weights, out, epilogue, dependent)
        return
    first, second, third = weights.part_rows()
    # With a gate, half of a tile's rows are gate and half are up.
    grid = (triton.cdiv(weights.packed_rows, TILE_PACKED), triton.cdiv(rows, TILE_ROWS))
    ternary_gemm_kernel[grid](
        q,
        factor,
        weights.packed,
        weights.scale,
        out,
        rows,
        IN=weights.in_features,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        **tile(),
        EPILOGUE=int(epilogue),
        INTERPRETED=INTERPRETED,
        num_warps=4,
        num_stages=STAGES,
        **OPTIONS,
    )


def tile() -> dict[str, int]:
    """Return the constants of the kernel that describe its tile; every tile gives the same bits."""
    return {"TILE_PACKED": TILE_PACKED, "TILE_ROWS": TILE_ROWS, "TILE_IN": TILE_IN}


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """Yield all variants that are launched to serve `shape`; none if it has no ternary linears."""
    rows = NARROW_ROWS + 1
    for step, (outs, width, epilogue) in bitnet_linears(shape).items():
        yield Variant(
            name=f"{shape.name}.{step} ternary gemm rows={rows}",
            kernel=ternary_gemm_kernel,
            signature=ROWS_TYPES,
            constants=part_constants(outs, width, epilogue) | tile(),
            divisible=frozenset(ROWS_TYPES) - {"rows"},
            num_stages=STAGES,
            expects=("IGMMA",),
            bytes_moved=bytes_moved(outs, width, epilogue, rows, 1) + 4 * rows,
        )
