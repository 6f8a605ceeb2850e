"""Ternary linears (W2A8) of many rows: the tensor cores on weights packed as they lie on disk.

`kernels.linear.ternary_triton` tells how a packed byte is read and why no tile changes a bit. Here
its fields are unpacked in registers, four bytes at a time, as the left operand of the tensor
cores; the activations are the right one, from shared memory.
"""

# Triton's language has no types: its functions are compiled, not called.
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_same_device, check_tensor
from kernels.launch import INTERPRETED, OPTIONS
from kernels.linear.epilogue import Epilogue
from kernels.linear.ternary_weights import TernaryWeights
from kernels.shapes import DecoderShape, Family
from kernels.variant import Variant

NARROW_ROWS = 256
"""Rows up to which the tiles are narrow."""
TILE_IN = 128
"""Elements along `in` of a tile: two lines of int8 activations."""

_ADD = tl.constexpr(int(Epilogue.ADD))


@triton.jit
def part_of(row, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """Of packed rows: their part, the output column of field 0, and the columns between fields."""
    after1, after2 = row >= FIRST, row >= FIRST + SECOND
    start = tl.where(after2, FIRST + SECOND, tl.where(after1, FIRST, 0))
    size = tl.where(after2, THIRD, tl.where(after1, SECOND, FIRST))
    return after1.to(tl.int32) + after2.to(tl.int32), 3 * start + row, size


@triton.constexpr_function
def field_asm(shift, mask):
    """A field of four bytes at once; the topmost is moved down, where it is no sign."""
    word = f"shr.b32 w, $1, {shift};" if shift else "mov.b32 w, $1;"
    return f"{{.reg .b32 w; {word} and.b32 $0, w, {mask * 0x01010101};}}"


@triton.jit
def field(packed, i: tl.constexpr, INTERPRETED: tl.constexpr):
    """Field i of packed bytes as int8: weight + 1, times 1, 4, 16 and, for the last, 16."""
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
    SLICES: tl.constexpr, EPILOGUE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program: TILE_PACKED packed rows times TILE_ROWS rows; slices of `in` go to a warp each.

    The weights are the left operand, unpacked in registers; one more product, with ones, sums
    the activations.
    """
    END: tl.constexpr = FIRST + SECOND + THIRD
    STEPS: tl.constexpr = (IN + SLICES * TILE_IN - 1) // (SLICES * TILE_IN)
    row = tl.program_id(0) * TILE_PACKED + tl.arange(0, TILE_PACKED)
    token = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    q_ptr += token * IN
    packed_ptr += row * IN
    ones = tl.full((SLICES, TILE_PACKED, TILE_IN), 1, tl.int8)
    sums = (tl.zeros((SLICES, TILE_PACKED, TILE_ROWS), tl.int32),) * 5
    if SLICES == 1:
        ones = tl.full((TILE_PACKED, TILE_IN), 1, tl.int8)
        sums = (tl.zeros((TILE_PACKED, TILE_ROWS), tl.int32),) * 5
    for step in range(STEPS):
        if SLICES == 1:
            k = step * TILE_IN + tl.arange(0, TILE_IN)
            mask = (row < END)[:, None] & (k < IN)[None, :]
            packed = tl.load(packed_ptr[:, None] + k[None, :], mask=mask, other=0)
            mask = (token < rows)[None, :] & (k < IN)[:, None]
            q = tl.load(q_ptr[None, :] + k[:, None], mask=mask, other=0)
        else:
            k = (step * SLICES + tl.arange(0, SLICES)[:, None]) * TILE_IN
            k = k + tl.arange(0, TILE_IN)[None, :]
            mask = (row < END)[None, :, None] & (k < IN)[:, None, :]
            packed = tl.load(packed_ptr[None, :, None] + k[:, None, :], mask=mask, other=0)
            mask = (token < rows)[None, None, :] & (k < IN)[:, :, None]
            q = tl.load(q_ptr[None, None, :] + k[:, :, None], mask=mask, other=0)
        longer = ()
        for i in tl.static_range(4):
            left = field(packed, i, INTERPRETED)
            longer = longer + (tl.dot(left, q, sums[i], out_dtype=tl.int32),)
        sums = longer + (tl.dot(ones, q, sums[4], out_dtype=tl.int32),)
    part, column, size = part_of(row, FIRST, SECOND, THIRD)
    scale = tl.load(scale_ptr + part, mask=row < END, other=0.0)
    factor = tl.load(factor_ptr + token, mask=token < rows, other=1.0)
    mask = (row < END)[:, None] & (token < rows)[None, :]
    for i in tl.static_range(4):
        total = (sums[i] >> min(2 * i, 4)) - sums[4]
        if SLICES > 1:
            total = tl.sum(total, 0)
        y = tl.div_rn(total.to(tl.float32), factor[None, :]) * scale[:, None]
        place = out_ptr + token[None, :] * (4 * END) + (column + i * size)[:, None]
        if EPILOGUE == _ADD:
            y = tl.load(place, mask=mask, other=0.0) + y
        tl.store(place, y, mask=mask)


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The tile of a GEMM: the batch may choose it, since whole sums do not depend on it."""

    packed: int
    rows: int
    slices: int
    stages: int

    @classmethod
    def of(cls, rows: int) -> GemmPlan:
        """Narrow tiles read few weights in many programs; wide ones read each weight seldom."""
        return cls(64, 64, 1, 3) if rows > NARROW_ROWS else cls(16, 16, 4, 4)

    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled with."""
        return {
            "TILE_PACKED": self.packed,
            "TILE_ROWS": self.rows,
            "TILE_IN": TILE_IN,
            "SLICES": self.slices,
        }


def ternary_gemm(
    q: Tensor,
    factor: Tensor,
    weights: TernaryWeights,
    out: Tensor,
    *,
    epilogue: Epilogue = Epilogue.STORE,
) -> None:
    """`ternary_linear` of rows that are int8 already, with the bits of `ternary_gemv`.

    q: int8 [rows, in], whole numbers of -127 .. 127. factor: fp32 [rows], by which a row was
    multiplied. out: fp32 [rows, sum of outs]. epilogue: STORE or ADD.

    Moves in * sum of outs / 4 bytes of weights once for each tile of rows, and rows * in bytes.
    Raises TypeError or ValueError naming the argument.
    """
    if epilogue.gated:
        raise ValueError(f"epilogue: {epilogue.name}, expected STORE or ADD")
    rows = check_linear("q", q, torch.int8, weights, out, epilogue)
    check_tensor("factor", factor, torch.float32, rows)
    check_same_device(q=q, factor=factor, packed=weights.packed, out=out)
    if rows == 0:
        return
    first, second, third = weights.part_rows()
    plan = GemmPlan.of(rows)
    grid = (triton.cdiv(weights.packed_rows, plan.packed), triton.cdiv(rows, plan.rows))
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
        **plan.constants(),
        EPILOGUE=int(epilogue),
        INTERPRETED=INTERPRETED,
        num_warps=4,
        num_stages=plan.stages,
        **OPTIONS,
    )


def check_linear(
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    weights: TernaryWeights,
    out: Tensor,
    epilogue: Epilogue,
) -> int:
    """Check what both linears take; returns the rows."""
    check_tensor(name, x, dtype, None, weights.in_features)
    columns = weights.out_features
    if epilogue is Epilogue.SWIGLU:
        raise ValueError("epilogue: SWIGLU, expected STORE, ADD or RELU2_GATE")
    if epilogue.gated:
        if len(weights.outs) != 2 or weights.outs[0] != weights.outs[1]:
            raise ValueError(f"weights: parts of {weights.outs}, expected two equal, gate and up")
        columns = weights.outs[0]
    check_tensor("out", out, torch.float32, len(x), columns)
    return len(x)


_TYPES = {
    "q_ptr": "*i8",
    "factor_ptr": "*fp32",
    "packed_ptr": "*u8",
    "scale_ptr": "*fp32",
    "out_ptr": "*fp32",
    "rows": "i32",
}


def bitnet_linears(shape: DecoderShape) -> dict[str, tuple[tuple[int, ...], int, Epilogue]]:
    """Output rows of the parts, `in` and epilogue of each linear; none unless they are ternary."""
    if shape.family is not Family.BITNET:
        return {}
    parts = {
        "qkv": ((shape.queries, shape.keys, shape.keys), Epilogue.STORE),
        "o": ((shape.hidden,), Epilogue.ADD),
        "gate_up": ((shape.ffn, shape.ffn), Epilogue.RELU2_GATE),
        "down": ((shape.hidden,), Epilogue.ADD),
    }
    return {
        step: (outs, shape.linears[step][1], epilogue) for step, (outs, epilogue) in parts.items()
    }


def part_constants(outs: tuple[int, ...], width: int, epilogue: Epilogue) -> dict[str, Any]:
    """The constants of a compilation that the weight alone determines."""
    first, second, third = (out // 4 for out in (*outs, 0, 0)[:3])
    return {
        "IN": width,
        "FIRST": first,
        "SECOND": second,
        "THIRD": third,
        "EPILOGUE": int(epilogue),
        "INTERPRETED": False,
    }


def bytes_moved(
    outs: tuple[int, ...], width: int, epilogue: Epilogue, rows: int, element: int
) -> int:
    """Weights, activations of `element` bytes each in, and results out: in, too, for ADD."""
    out = 4 * sum(outs) // (2 if epilogue.gated else 1)
    return width * sum(outs) // 4 + rows * (
        width * element + out * (2 if epilogue is Epilogue.ADD else 1)
    )


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """All compilations that serving `shape` launches: none unless its linears are ternary."""
    for step, (outs, width, fused) in bitnet_linears(shape).items():
        epilogue = Epilogue.STORE if fused.gated else fused
        for rows in (16, NARROW_ROWS + 1):
            plan = GemmPlan.of(rows)
            yield Variant(
                name=f"{shape.name}.{step} ternary gemm rows={rows}",
                kernel=ternary_gemm_kernel,
                signature=_TYPES,
                constants=part_constants(outs, width, epilogue) | plan.constants(),
                divisible=frozenset(_TYPES) - {"rows"},
                num_stages=plan.stages,
                expects=("IMMA",) if plan.slices > 1 else ("IGMMA",),
                bytes_moved=bytes_moved(outs, width, epilogue, rows, 1) + 4 * rows,
            )
