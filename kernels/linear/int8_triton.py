"""Linears of int8 weights and activations (W8A8) on the GPU, mainly the LM head.

    int8_gemv   one row: norm and quantisation in the prologue, dp4a
    int8_gemm   any number of rows that are already int8, on tensor cores

Both give the bits of `int8_linear.int8_linear`, whatever the tile or the batch, since integer sums
do not depend on order.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from tailrace.kernels.checks import check_multiple, check_same_device, check_tensor
from tailrace.kernels.dependent_triton import prefetch, wait_for_launches_ahead
from tailrace.kernels.gpu_limits import HOPPER, GpuLimits, limits_of
from tailrace.kernels.launch import INTERPRETED, dependent_launch
from tailrace.kernels.linear.int8_linear import check_int8_weight
from tailrace.kernels.linear.int8_words_triton import (
    WORD,
    WORDS,
    dp4a,
    int8_row,
    load_row,
    load_weights,
)
from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.variant import Variant

GEMV_MAX_ROWS = 1
"""Maximum rows of int8_gemv. Every program repeats the norms of all rows, so for more rows a norm
in a launch of its own is faster."""
GEMV_MAX_IN = 4096
"""Maximum inputs of a row of int8_gemv."""
GROUP_ROWS = 4
"""Weight rows that a warp loads at once: for each row, 8 lanes read 16 bytes of a 128-byte line."""
TILE_OUT = 2 * GROUP_ROWS
"""Weight rows that a GEMV program multiplies at a time, while it loads the next TILE_OUT rows."""
PREFETCH = 4
"""Tiles of the weight that a GEMM program prefetches before the wait for earlier launches."""

_WORDS = tl.constexpr(WORDS)
_GROUP_ROWS = tl.constexpr(GROUP_ROWS)
_TILE_OUT = tl.constexpr(TILE_OUT)
_PREFETCH = tl.constexpr(PREFETCH)


@triton.jit
def load_rows(
    words_ptr, first, OUT: tl.constexpr, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Load TILE_OUT weight rows as a tuple: STEPS tiles int32 [LINES, GROUP_ROWS, 32], twice."""
    tiles = ()
    for group in tl.static_range(2):
        row = first + group * _GROUP_ROWS + tl.arange(0, _GROUP_ROWS)
        tiles = tiles + load_weights(words_ptr, row, OUT, IN, LINES, STEPS)
    return tiles


@triton.jit
def int8_gemv_kernel(
    x_ptr, norm_ptr, words_ptr, scale_ptr, out_ptr, eps,
    OUT: tl.constexpr, IN: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr,
    PROGRAMS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Multiply a row by the weight; a program takes every PROGRAMS-th tile, and loads one ahead."""
    program = tl.program_id(0)
    group = tl.arange(0, 2)[None, :]
    local = tl.arange(0, _GROUP_ROWS)[:, None] + _GROUP_ROWS * group
    tiles = load_rows(words_ptr, program * _TILE_OUT, OUT, IN, LINES, STEPS)
    gains = ()
    if NORM:
        gains = load_row(norm_ptr, IN, LINES, STEPS)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    x = load_row(x_ptr, IN, LINES, STEPS)
    words, factor = int8_row(x, gains, eps, IN, LINES, STEPS, NORM, INTERPRETED)
    # All elements of `factor` are equal. The maximum of their bits makes one number of them, also
    # if they are NaN.
    factor = tl.max(factor.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    for tile in range(program, (OUT + _TILE_OUT - 1) // _TILE_OUT, PROGRAMS):
        following = load_rows(words_ptr, (tile + PROGRAMS) * _TILE_OUT, OUT, IN, LINES, STEPS)
        row = tile * _TILE_OUT + local
        scale = tl.load(scale_ptr + row, mask=row < OUT, other=0.0)
        first = tl.zeros((LINES, _GROUP_ROWS, _WORDS), tl.int32)
        second = first
        for step in tl.static_range(STEPS):
            word = tl.broadcast_to(words[step][:, None, :], (LINES, _GROUP_ROWS, _WORDS))
            first = dp4a(tiles[step], word, first, INTERPRETED)
            second = dp4a(tiles[STEPS + step], word, second, INTERPRETED)
        total = tl.sum(tl.join(tl.sum(first, 2), tl.sum(second, 2)), 0)
        tl.store(out_ptr + row, tl.div_rn(total.to(tl.float32), factor) * scale, mask=row < OUT)
        tiles = following


@triton.jit(do_not_specialize=["rows"])
def int8_gemm_kernel(
    q_ptr, factor_ptr, weight_ptr, scale_ptr, out_ptr, rows,
    OUT: tl.constexpr, IN: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply int8 rows by the weight; a program has TILE_ROWS rows and TILE_OUT weight rows."""
    row = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    token = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    if PDL:
        first = weight_ptr + tl.minimum(row, OUT - 1).to(tl.int64) * IN
        for step in tl.static_range(min(_PREFETCH, (IN + TILE_IN - 1) // TILE_IN)):
            prefetch(first + step * TILE_IN)
        wait_for_launches_ahead(PDL)
    weight_ptr += row.to(tl.int64)[:, None] * IN
    q_ptr += token[None, :] * IN
    total = tl.zeros((TILE_OUT, TILE_ROWS), tl.int32)
    for step in range((IN + TILE_IN - 1) // TILE_IN):
        k = step * TILE_IN + tl.arange(0, TILE_IN)
        mask = (row < OUT)[:, None] & (k < IN)[None, :]
        weight = tl.load(weight_ptr + k[None, :], mask=mask, other=0)
        mask = (token < rows)[None, :] & (k < IN)[:, None]
        q = tl.load(q_ptr + k[:, None], mask=mask, other=0)
        total = tl.dot(weight, q, total, out_dtype=tl.int32)
    scale = tl.load(scale_ptr + row, mask=row < OUT, other=0.0)
    factor = tl.load(factor_ptr + token, mask=token < rows, other=1.0)
    y = tl.div_rn(total.to(tl.float32), factor[None, :]) * scale[:, None]
    place = out_ptr + token[None, :] * OUT + row[:, None]
    tl.store(place, y, mask=(row < OUT)[:, None] & (token < rows)[None, :])


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """Launch plan of a GEMV. It does not affect results, since all sums are integers."""

    lines: int
    """Lines of a row (128 elements each) per step: each warp has one."""
    steps: int
    programs: int
    registers: int
    """Maximum registers per thread; a multiprocessor has 64 Ki for all its programs."""

    @classmethod
    def of(cls, out_features: int, in_features: int, limits: GpuLimits = HOPPER) -> GemvPlan:
        """Plan many programs, each of the fewest warps whose registers hold a row and a tile."""
        row_lines = triton.cdiv(in_features, WORDS * WORD)
        lines = 1 if row_lines <= 4 else 4 if row_lines <= 20 else 8
        beside = 3 if lines == 4 else 2
        programs = min(limits.multiprocessors * beside, triton.cdiv(out_features, TILE_OUT))
        registers = 168 if lines == 4 else 128
        return cls(lines, triton.cdiv(row_lines, lines), programs, registers)

    def constants(self) -> dict[str, Any]:
        """Constants that the kernel is compiled with."""
        return {"LINES": self.lines, "STEPS": self.steps, "PROGRAMS": self.programs}


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """Launch plan of a GEMM: weight rows and activation rows of its tile, warps and stages."""

    out: int
    rows: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int) -> GemmPlan:
        """Plan tiles of 16 activation rows for up to 16 rows, and of 64 for more."""
        return cls(64, 16, 4, 4) if rows <= 16 else cls(128, 64, 8, 3)

    def constants(self) -> dict[str, Any]:
        """Constants that the kernel is compiled with."""
        return {"TILE_OUT": self.out, "TILE_ROWS": self.rows, "TILE_IN": 128}


def int8_gemv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    dependent: bool = False,
) -> None:
    """Compute `int8_linear` of one row in one launch.

    x: fp32 [rows, in], one row or none, with up to GEMV_MAX_IN inputs, a multiple of 4. weight:
    int8 [out, in]. scale: fp32 [out]. out: fp32 [rows, out]. norm: fp32 [in], the weight of an
    RMSNorm (`order_free_rms_norm`) of x. dependent: programmatic dependent launch; the first
    weights are read while the preceding launch still runs.

    Moves out * in bytes of weights once. Raises TypeError or ValueError that names the argument.
    """
    check_int8_weight(weight, scale)
    out_features, in_features = weight.shape
    check_tensor("x", x, torch.float32, None, in_features)
    check_multiple("weight: in", in_features, WORD)
    if len(x) > GEMV_MAX_ROWS:
        raise ValueError(f"x: {len(x)} rows, expected at most {GEMV_MAX_ROWS}")
    if in_features > GEMV_MAX_IN:
        raise ValueError(f"weight: in = {in_features}, expected at most {GEMV_MAX_IN}")
    if norm is not None:
        check_tensor("norm", norm, torch.float32, in_features)
    if not eps > 0:
        raise ValueError(f"eps: {eps}, expected a number above 0")
    check_tensor("out", out, torch.float32, len(x), out_features)
    check_same_device(x=x, weight=weight, scale=scale, norm=norm, out=out)
    if out.numel() == 0:
        return
    plan = GemvPlan.of(out_features, in_features, limits_of(weight.device))
    dependent, options = dependent_launch(dependent)
    int8_gemv_kernel[(plan.programs,)](
        x,
        x if norm is None else norm,
        weight.view(torch.int32),
        scale,
        out,
        eps,
        OUT=out_features,
        IN=in_features,
        **plan.constants(),
        NORM=norm is not None,
        PDL=dependent,
        INTERPRETED=INTERPRETED,
        num_warps=plan.lines,
        maxnreg=plan.registers,
        **options,
    )


def int8_gemm(
    q: Tensor,
    factor: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    *,
    dependent: bool = False,
) -> None:
    """Compute `int8_linear` of rows that are already int8, with the bits of `int8_gemv`.

    q: int8 [rows, in], integers in -127 .. 127. factor: fp32 [rows], by which each row was
    multiplied. weight: int8 [out, in]. scale: fp32 [out]. out: fp32 [rows, out]. dependent:
    programmatic dependent launch; the first weights are prefetched into L2 while the preceding
    launch still runs.

    Moves out * in bytes of weights once per 64 rows. Raises TypeError or ValueError that names the
    argument.
    """
    check_int8_weight(weight, scale)
    out_features, in_features = weight.shape
    check_tensor("q", q, torch.int8, None, in_features)
    check_tensor("factor", factor, torch.float32, len(q))
    check_tensor("out", out, torch.float32, len(q), out_features)
    check_same_device(q=q, factor=factor, weight=weight, scale=scale, out=out)
    if out.numel() == 0:
        return
    plan = GemmPlan.of(len(q))
    dependent, options = dependent_launch(dependent)
    grid = (triton.cdiv(out_features, plan.out), triton.cdiv(len(q), plan.rows))
    int8_gemm_kernel[grid](
        q,
        factor,
        weight,
        scale,
        out,
        len(q),
        OUT=out_features,
        IN=in_features,
        **plan.constants(),
        PDL=dependent,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **options,
    )


_GEMV_TYPES = {
    "x_ptr": "*fp32",
    "norm_ptr": "*fp32",
    "words_ptr": "*i32",
    "scale_ptr": "*fp32",
    "out_ptr": "*fp32",
    "eps": "fp32",
}
_GEMM_TYPES = {
    "q_ptr": "*i8",
    "factor_ptr": "*fp32",
    "weight_ptr": "*i8",
    "scale_ptr": "*fp32",
    "out_ptr": "*fp32",
    "rows": "i32",
}


def variants(shape: DecoderShape, limits: GpuLimits = HOPPER) -> Iterator[Variant]:
    """Yield the LM head for each number of rows that has a compilation of its own."""
    sizes = {"OUT": shape.vocab, "IN": shape.hidden}
    weights = shape.vocab * (shape.hidden + 4)
    plan = GemvPlan.of(shape.vocab, shape.hidden, limits)
    for dependent in (False, True):
        yield Variant(
            name=f"{shape.name}.head int8 gemv rows=1" + " dependent" * dependent,
            kernel=int8_gemv_kernel,
            signature=_GEMV_TYPES,
            constants=sizes
            | plan.constants()
            | {"NORM": True, "PDL": dependent, "INTERPRETED": False},
            divisible=frozenset(_GEMV_TYPES) - {"eps"},
            num_warps=plan.lines,
            launch_pdl=dependent,
            options={"maxnreg": plan.registers},
            expects=("IDP.4A", "LDG.E.EF.128"),
            bytes_moved=weights + 4 * (2 * shape.hidden + shape.vocab),
        )
    for rows, dependent in ((16, False), (16, True), (64, False), (64, True)):
        wide = GemmPlan.of(rows)
        yield Variant(
            name=f"{shape.name}.head int8 gemm rows={rows}" + " dependent" * dependent,
            kernel=int8_gemm_kernel,
            signature=_GEMM_TYPES,
            constants=sizes | wide.constants() | {"PDL": dependent},
            divisible=frozenset(_GEMM_TYPES) - {"rows"},
            num_warps=wide.warps,
            num_stages=wide.stages,
            launch_pdl=dependent,
            expects=("IGMMA",),
            bytes_moved=weights + rows * (shape.hidden + 4 + 4 * shape.vocab),
        )
