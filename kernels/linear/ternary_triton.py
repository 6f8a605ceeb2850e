"""Ternary linears (W2A8) on the GPU, on weights packed as they lie in a BitNet checkpoint.

A 32-bit word along `in` of packed row r holds 16 weights: 4 of each of the output rows
i * R + r, with i = 0 .. 3 and R the packed rows of its part. `word & (0x03030303 << 2i)` has
weight + 1, times 4**i, in each byte and goes straight into dp4a: no weight is ever shifted.
The sums are divided by 4**i at the end, which is exact, and lack the sum of the activations,
which is subtracted. They are whole numbers: no tile, split or batch changes a bit of what
`kernels.linear.ternary.ternary_linear` gives.

    ternary_gemv   1 to 8 rows: norm and quantisation in the prologue, dp4a
    ternary_gemm   any number of rows that are int8 already, tensor cores
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
from triton.language.extra import cuda

from kernels.checks import check_same_device, check_tensor
from kernels.launch import INTERPRETED, dependent_launch
from kernels.linear.epilogue import Epilogue
from kernels.linear.int8_words_triton import (
    WORD,
    WORDS,
    dp4a,
    load_row,
    load_weights,
    normalise_row,
    quantise_row,
)
from kernels.linear.ternary_gemm_triton import (
    bitnet_linears,
    bytes_moved,
    check_linear,
    part_constants,
    part_of,
    ternary_gemm,
)
from kernels.linear.ternary_weights import TernaryWeights
from kernels.shapes import DecoderShape
from kernels.variant import Variant

__all__ = ["GEMV_MAX_IN", "GEMV_MAX_ROWS", "TernaryWeights", "ternary_gemm", "ternary_gemv"]

GEMV_MAX_ROWS = 8
"""Rows that ternary_gemv takes; each repeats the prologue."""
GEMV_MAX_IN = 28_672
"""Elements along `in` that the registers of a program of 16 warps hold."""
PROGRAMS = 132
"""Multiprocessors of an H100 or H200: a linear of a decode step is resident at once."""
PACKED_ROWS = 4
"""Packed rows abreast in a warp: 8 lanes read 16 bytes each of one line of 128."""
TILE_REGISTERS = 96
"""Words of weights that a thread may hold at once."""

_PACKED_ROWS = tl.constexpr(PACKED_ROWS)
_WORDS = tl.constexpr(WORDS)
_WORD = tl.constexpr(WORD)
_ADD = tl.constexpr(int(Epilogue.ADD))
_RELU2_GATE = tl.constexpr(int(Epilogue.RELU2_GATE))


@triton.constexpr_function
def masked_dp4a_asm(i):
    """dp4a of field i of a word.

    The mask is part of it, since masked words would be kept from row to row, in four times the
    registers of the words.
    """
    return f"{{.reg .b32 f; and.b32 f, $1, {0x03030303 << 2 * i}; dp4a.u32.s32 $0, f, $2, $3;}}"


@triton.jit
def masked_dp4a(words, activations, total, i: tl.constexpr, INTERPRETED: tl.constexpr):
    """total + the products of field i of each word, that is 4**i * (weight + 1), and x."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            field = (words >> (8 * byte)) & (3 << 2 * i)
            total += field * ((activations << (24 - 8 * byte)) >> 24)
        return total
    else:
        return tl.inline_asm_elementwise(
            masked_dp4a_asm(i),
            "=r,r,r,r",
            [words, activations, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def sum_products(
    tiles, FIRST_TILE: tl.constexpr, words, LINES: tl.constexpr, STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums of weight * x: int32 [PACKED_ROWS, 2, 2], of row i * R + r at [r, i // 2, i % 2]."""
    minus = tl.full((LINES, _PACKED_ROWS, _WORDS), -1, tl.int32)
    total = tl.zeros((LINES, _PACKED_ROWS, _WORDS), tl.int32)
    for step in tl.static_range(STEPS):
        x = tl.broadcast_to(words[step][:, None, :], (LINES, _PACKED_ROWS, _WORDS))
        total = dp4a(minus, x, total, INTERPRETED)
    sum0, sum1, sum2, sum3 = total, total << 2, total << 4, total << 6
    for step in tl.static_range(STEPS):
        x = tl.broadcast_to(words[step][:, None, :], (LINES, _PACKED_ROWS, _WORDS))
        tile = tiles[FIRST_TILE + step]
        sum0 = masked_dp4a(tile, x, sum0, 0, INTERPRETED)
        sum1 = masked_dp4a(tile, x, sum1, 1, INTERPRETED)
        sum2 = masked_dp4a(tile, x, sum2, 2, INTERPRETED)
        sum3 = masked_dp4a(tile, x, sum3, 3, INTERPRETED)
    even = tl.join(tl.sum(sum0, 2), tl.sum(sum2, 2) >> 4)
    odd = tl.join(tl.sum(sum1, 2) >> 2, tl.sum(sum3, 2) >> 6)
    return tl.sum(tl.join(even, odd), 0)


@triton.jit
def ternary_gemv_kernel(
    x_ptr, norm_ptr, words_ptr, scale_ptr, out_ptr, rows, eps,
    IN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr,
    LINES: tl.constexpr, STEPS: tl.constexpr, GROUPS: tl.constexpr, NORM: tl.constexpr,
    EPILOGUE: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program: GROUPS * PACKED_ROWS packed rows; with a gate as many more of `up`."""
    GATED: tl.constexpr = EPILOGUE == _RELU2_GATE
    END: tl.constexpr = FIRST if GATED else FIRST + SECOND + THIRD
    first = tl.program_id(0) * (GROUPS * _PACKED_ROWS)
    i = 2 * tl.arange(0, 2)[:, None] + tl.arange(0, 2)[None, :]
    # All that does not depend on the launch before: in flight while the activations are made.
    tiles = ()
    for group in tl.static_range(GROUPS):
        row = first + group * _PACKED_ROWS + tl.arange(0, _PACKED_ROWS)
        tiles = tiles + load_weights(words_ptr, row, END, IN, LINES, STEPS)
        if GATED:
            up_ptr = words_ptr + FIRST * (IN // _WORD)
            tiles = tiles + load_weights(up_ptr, row, END, IN, LINES, STEPS)
    gains, columns, scales = (), (), ()
    if NORM:
        gains = load_row(norm_ptr, IN, LINES, STEPS)
    for group in tl.static_range(GROUPS):
        row = first + group * _PACKED_ROWS + tl.arange(0, _PACKED_ROWS)
        part, column, size = part_of(row, FIRST, SECOND, THIRD)
        columns = columns + (column[:, None, None] + i[None, :, :] * size[:, None, None],)
        scale = tl.load(scale_ptr + part, mask=row < END, other=0.0)
        scales = scales + (scale[:, None, None],)
    up_scale = tl.load(scale_ptr + 1) if GATED else 0.0
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    for token in range(rows):
        x = load_row(x_ptr + token * IN, IN, LINES, STEPS)
        olds = ()
        for group in tl.static_range(GROUPS if EPILOGUE == _ADD else 0):
            row = first + group * _PACKED_ROWS + tl.arange(0, _PACKED_ROWS)
            place = out_ptr + token * (4 * END) + columns[group]
            olds = olds + (tl.load(place, mask=(row < END)[:, None, None], other=0.0),)
        if NORM:
            x = normalise_row(x, gains, eps, IN, LINES, STEPS)
        words, factor = quantise_row(x, LINES, STEPS)
        for group in tl.static_range(GROUPS):
            row = first + group * _PACKED_ROWS + tl.arange(0, _PACKED_ROWS)
            if GATED:
                y = sum_products(tiles, 2 * group * STEPS, words, LINES, STEPS, INTERPRETED)
                up = sum_products(tiles, (2 * group + 1) * STEPS, words, LINES, STEPS, INTERPRETED)
                y = tl.div_rn(y.to(tl.float32), factor) * scales[group]
                up = tl.div_rn(up.to(tl.float32), factor) * up_scale
                y = tl.where(y < 0.0, 0.0, y)
                y = y * y * up
            else:
                y = sum_products(tiles, group * STEPS, words, LINES, STEPS, INTERPRETED)
                y = tl.div_rn(y.to(tl.float32), factor) * scales[group]
            if EPILOGUE == _ADD:
                y = olds[group] + y
            place = out_ptr + token * (4 * END) + columns[group]
            tl.store(place, y, mask=(row < END)[:, None, None])


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """How a GEMV of one weight is divided; the batch has no part in it."""

    lines: int
    """Lines of a row that a step reads, one to a warp."""
    steps: int
    groups: int
    """Groups of PACKED_ROWS packed rows that a program owns."""
    programs: int

    @classmethod
    def of(cls, packed_rows: int, in_features: int, tiles: int) -> GemvPlan:
        """For packed rows of `in` elements, `tiles` of which (gate and up) go together."""
        row_lines = triton.cdiv(in_features, WORDS * WORD)
        lines = 1 if row_lines <= 4 else 4 if row_lines <= 28 else 8 if row_lines <= 112 else 16
        steps = triton.cdiv(row_lines, lines)
        groups = triton.cdiv(packed_rows, PACKED_ROWS)
        fit = max(1, TILE_REGISTERS // (steps * WORD * tiles))
        owned = min(fit, triton.cdiv(groups, PROGRAMS))
        return cls(lines, steps, owned, triton.cdiv(groups, owned))

    def constants(self) -> dict[str, Any]:
        """What the kernel is compiled with."""
        return {"LINES": self.lines, "STEPS": self.steps, "GROUPS": self.groups}


def ternary_gemv(
    x: Tensor,
    weights: TernaryWeights,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    epilogue: Epilogue = Epilogue.STORE,
    dependent: bool = False,
) -> None:
    """`ternary_linear` of rows, with RMSNorm before it and an epilogue after it, in one launch.

    x: fp32 [rows, in], rows up to GEMV_MAX_ROWS, in up to GEMV_MAX_IN. norm: fp32 [in], the
    weight of an RMSNorm (`order_free_rms_norm`) of x. out: fp32 [rows, sum of outs]; with
    RELU2_GATE the weights are two equal parts, gate and up, and out is [rows, out of one]; SWIGLU
    is not offered. x and out must not overlap. A row with NaN or infinite values gives NaN.
    dependent: programmatic dependent launch; the weights are read while the launch before it
    still runs, all else after it has ended.

    Moves in * sum of outs / 4 bytes of weights once, whatever the rows. Raises TypeError or
    ValueError naming the argument.
    """
    rows = check_linear("x", x, torch.float32, weights, out, epilogue)
    if rows > GEMV_MAX_ROWS:
        raise ValueError(f"x: {rows} rows, expected at most {GEMV_MAX_ROWS}")
    if weights.in_features > GEMV_MAX_IN:
        raise ValueError(f"x: in = {weights.in_features}, expected at most {GEMV_MAX_IN}")
    if norm is not None:
        check_tensor("norm", norm, torch.float32, weights.in_features)
    if not eps > 0:
        raise ValueError(f"eps: {eps}, expected a number above 0")
    check_same_device(x=x, packed=weights.packed, norm=norm, out=out)
    if rows == 0:
        return
    first, second, third = weights.part_rows()
    owned = first if epilogue.gated else weights.packed_rows
    plan = GemvPlan.of(owned, weights.in_features, 2 if epilogue.gated else 1)
    dependent, options = dependent_launch(dependent)
    ternary_gemv_kernel[(plan.programs,)](
        x,
        x if norm is None else norm,
        weights.words,
        weights.scale,
        out,
        rows,
        eps,
        IN=weights.in_features,
        FIRST=first,
        SECOND=second,
        THIRD=third,
        **plan.constants(),
        NORM=norm is not None,
        EPILOGUE=int(epilogue),
        PDL=dependent,
        INTERPRETED=INTERPRETED,
        num_warps=plan.lines,
        **options,
    )


_TYPES = {
    "x_ptr": "*fp32",
    "norm_ptr": "*fp32",
    "words_ptr": "*i32",
    "scale_ptr": "*fp32",
    "out_ptr": "*fp32",
    "rows": "i32",
    "eps": "fp32",
}


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """All compilations that serving `shape` launches: none unless its linears are ternary."""
    for step, (outs, width, epilogue) in bitnet_linears(shape).items():
        tiles = 2 if epilogue.gated else 1
        plan = GemvPlan.of(sum(outs) // 4 // tiles, width, tiles)
        for rows, dependent in ((1, False), (1, True), (GEMV_MAX_ROWS, False)):
            # Triton compiles an argument of 1 in.
            compiled_in = {"rows": 1} if rows == 1 else {}
            yield Variant(
                name=f"{shape.name}.{step} ternary gemv rows={rows}" + " dependent" * dependent,
                kernel=ternary_gemv_kernel,
                signature={
                    name: type_ for name, type_ in _TYPES.items() if name not in compiled_in
                },
                constants=part_constants(outs, width, epilogue)
                | plan.constants()
                | {"NORM": True, "PDL": dependent}
                | compiled_in,
                divisible=frozenset(_TYPES) - {"rows", "eps"},
                num_warps=plan.lines,
                launch_pdl=dependent,
                expects=("IDP.4A", "LDG.E.EF.128"),
                bytes_moved=bytes_moved(outs, width, epilogue, rows, 4) + 4 * width,
                step=step if rows == 1 and not dependent else None,
            )
