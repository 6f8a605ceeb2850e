"""Linear layers of int8 or int4 weights and float activations on the GPU.

The kernel is that of dense weights; weights become whole numbers in bf16, exactly, in the
registers that the tensor cores read. Scales are applied to fp32 sums: to a row's in int8, to
those of a group of 128 inputs in int4.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.checks import check_same_device, check_tensor
from kernels.linear.dense import check_epilogue
from kernels.linear.dense_triton import check_linear, launch_linear, linear_variants
from kernels.linear.epilogue import Epilogue
from kernels.linear.linear_plan import LinearPlan, LinearWorkspace, plan_linear
from kernels.linear.weight_only import GROUP, WORD_BITS, WeightOnly
from kernels.shapes import DecoderShape, Family
from kernels.variant import Variant


def weight_only_plan(weights: WeightOnly, epilogue: Epilogue = Epilogue.STORE) -> LinearPlan:
    """How a linear of this weight is launched; for a workspace that has room for it."""
    return plan_linear(*weights.shape, 2, weights.bits, epilogue.gated)


def weight_only_linear(
    x: Tensor,
    weights: WeightOnly,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    epilogue: Epilogue = Epilogue.STORE,
    dependent: bool = False,
    plan: LinearPlan | None = None,
) -> None:
    """`dense_linear` (which see) of a quantised weight and activations rounded to bf16.

    x: fp32, or bf16, [rows, in]. out: fp32 [rows, out], or [rows, out / 2] for SWIGLU. Moves
    in * out * bits / 8 bytes of weights and the scales once per 64 rows (per 32 of fp32 x where
    shared memory holds no more). Raises TypeError and ValueError that name the argument.
    """
    check_epilogue(epilogue)
    check_weights(weights)
    plan = plan or weight_only_plan(weights, epilogue)
    check_linear(x, torch.bfloat16, out, norm, eps, plan)
    check_same_device(
        x=x, words=weights.words, scale=weights.scale, zero=weights.zero, out=out, norm=norm,
        workspace=workspace.partials,
    )  # fmt: skip
    launch_linear(
        plan, x, weights.words, weights.scale, weights.zero, out, workspace, norm, eps, epilogue,
        dependent,
    )  # fmt: skip


def check_weights(weights: WeightOnly) -> None:
    """Refuse words, scales and zeros that do not fit one another."""
    if weights.bits not in (4, 8):
        raise ValueError(f"weights: {weights.bits} bits, expected 4 or 8")
    words = GROUP * weights.bits // WORD_BITS
    check_tensor("words", weights.words, torch.int16, None, None, words)
    groups, out, _ = weights.words.shape
    if (weights.zero is None) != (weights.bits == 8):
        raise ValueError("zero: expected with 4 bits, and none with 8, which are symmetric")
    if weights.zero is None:
        check_tensor("scale", weights.scale, torch.float32, out)
        return
    check_tensor("scale", weights.scale, torch.float32, groups, out)
    check_tensor("zero", weights.zero, torch.uint8, groups, out)


def variants(shape: DecoderShape) -> Iterator[Variant]:
    """All compilations that serving `shape` with quantised linears launches; BitNet has none."""
    if shape.family is Family.BITNET:
        return
    for step, (out, inputs) in shape.linears.items():
        for bits in (8, 4):
            plan = plan_linear(out, inputs, 2, bits, gated=step == "gate_up")
            yield from linear_variants(f"{shape.name}.{step} int{bits}", step, plan, "*i16")
