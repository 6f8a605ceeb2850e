"""SwiGLU and squared ReLU: the device functions that every kernel shares, and a kernel of its own.

Where a linear computes gate and up of a column in one program, its epilogue applies them; the
kernel here serves the linears that do not.
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
from triton.language.extra import cuda

from kernels.checks import check_same_device, check_tensor
from kernels.launch import INTERPRETED, dependent_launch
from kernels.linear.int8_words_triton import load_row
from kernels.rows.norm_triton import (
    check_norm,
    check_quantised,
    int8_plan,
    quantised,
    store_int8,
)
from kernels.shapes import DecoderShape, Family
from kernels.variant import Variant


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) without overflow: fp32, any shape. NaN for NaN and for -infinity."""
    small = tl.exp(-tl.abs(x))
    kept = tl.where(x > -float("inf"), x, float("nan"))
    return tl.div_rn(kept * tl.where(x >= 0.0, 1.0, small), 1.0 + small)


@triton.jit
def relu2(x):
    """max(x, 0) ** 2: fp32, any shape. NaN for NaN."""
    positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return positive * positive


@triton.jit
def relu2_gate_norm_int8_kernel(
    gate_up_ptr, weight_ptr, q_ptr, factor_ptr, eps,
    SIZE: tl.constexpr, LINES: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program: a row."""
    row = tl.program_id(0).to(tl.int64)
    gains = load_row(weight_ptr, SIZE, LINES, STEPS)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    gate_up_ptr += row * (2 * SIZE)
    gate = load_row(gate_up_ptr, SIZE, LINES, STEPS)
    up = load_row(gate_up_ptr + SIZE, SIZE, LINES, STEPS)
    inner = ()
    for step in tl.static_range(STEPS):
        inner = inner + (relu2(gate[step]) * up[step],)
    store_int8(inner, gains, q_ptr, factor_ptr, row, eps, SIZE, LINES, STEPS, INTERPRETED)


def relu2_gate_norm_int8(
    gate_up: Tensor,
    weight: Tensor,
    eps: float,
    q: Tensor,
    factor: Tensor,
    *,
    dependent: bool = False,
) -> None:
    """q, factor = norm(max(gate, 0) ** 2 * up), quantised as by `rms_norm_int8`.

    gate_up: fp32 [rows, 2 F], gate before up, F up to 16,384. weight: fp32 [F]. eps: above 0.
    q: int8 [rows, F]. factor: fp32 [rows]. A row whose products are NaN or infinite gets zeros
    and the factor NaN. dependent: programmatic dependent launch. Moves 9 F + 4 bytes per row and
    4 F once. Raises TypeError or ValueError.

    Source: So et al., Primer, 2021; the `bitnet` model of transformers for the sub-norm.
    """
    rows, size = _check_gate_up(gate_up)
    check_norm("gate_up", weight, eps, size)
    check_quantised(q, factor, rows, size)
    check_same_device(gate_up=gate_up, weight=weight, q=q, factor=factor)
    if rows > 0:
        dependent, options = dependent_launch(dependent)
        relu2_gate_norm_int8_kernel[(rows,)](
            gate_up, weight, q, factor, eps, **int8_plan(size), PDL=dependent,
            INTERPRETED=INTERPRETED, **options,
        )  # fmt: skip


def _check_gate_up(gate_up: Tensor) -> tuple[int, int]:
    """Rows and F."""
    check_tensor("gate_up", gate_up, torch.float32, None, None)
    rows, columns = gate_up.shape
    if columns == 0 or columns % 2:
        raise ValueError(f"gate_up: {columns} columns, expected gate and up of one size")
    return rows, columns // 2


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """BitNet's activation between two linears, at batches where it is a launch."""
    if shape.family is not Family.BITNET:
        return
    name, kernel = f"{shape.name}.relu2_gate_norm_int8", relu2_gate_norm_int8_kernel
    for dependent in (False, True):
        yield quantised(name, kernel, "gate_up_ptr", shape.ffn, 9, dependent=dependent)
