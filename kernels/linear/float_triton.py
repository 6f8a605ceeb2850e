"""Linear layers of float activations on the GPU, with bf16, fp16, fp32, int8 or int4 weights.

One kernel serves all formats. Quantised weights are converted to integers in bf16, which is exact,
in the registers that the tensor cores read. Scales are multiplied to fp32 sums: in int8 to the sum
of a whole weight row, in int4 to the sum over each group of 128 inputs.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.gpu_limits import HOPPER, GpuLimits, limits_of
from tailrace.kernels.launch import INTERPRETED, OPTIONS, dependent_launch, next_power_of_2
from tailrace.kernels.linear.dense import check_epilogue
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.linear_plan import (
    NORM_MAX_INPUTS,
    NORM_MAX_ROWS,
    ROWS,
    LinearPlan,
    LinearWorkspace,
    plan_linear,
)
from tailrace.kernels.linear.linear_triton import linear_kernel
from tailrace.kernels.linear.weight_only import GROUP, WORD_BITS, WeightOnly
from tailrace.kernels.shapes import LLAMA_8B, DecoderShape, Family
from tailrace.kernels.variant import Variant

Weight = Tensor | WeightOnly
"""A weight: bf16, fp16 or fp32 [out, in], or int8 or int4 for bf16 activations."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EPILOGUES = {"o": Epilogue.ADD, "down": Epilogue.ADD, "gate_up": Epilogue.SWIGLU}
_NORMED = ("qkv", "gate_up", "head")


def float_plan(weight: Weight, epilogue: Epilogue = Epilogue.STORE) -> LinearPlan:
    """Return the launch plan of a linear with this weight, for the device that holds the weight.

    `LinearWorkspace` takes plans to find the size that it needs.
    """
    if isinstance(weight, WeightOnly):
        limits = limits_of(weight.words.device)
        return plan_linear(*weight.shape, 2, weight.bits, epilogue.gated, limits=limits)
    limits = limits_of(weight.device)
    return plan_linear(*weight.shape, weight.element_size(), gated=epilogue.gated, limits=limits)


def float_linear(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    epilogue: Epilogue = Epilogue.STORE,
    dependent: bool = False,
    plan: LinearPlan | None = None,
) -> None:
    """Compute out = epilogue(W round(norm(x))) for any number of rows, in one launch.

    x: fp32 [rows, in], or already rounded to the weight's type. With more than 16 rows rounded
    activations are better, because fp32 takes twice as many bytes. weight: bf16, fp16 or fp32 [out,
    in]; for SWIGLU [2 F, in], gate rows before up rows. Any sizes are allowed; rows of 16-byte
    multiples are faster. The type of a quantised weight counts as bf16; its bytes are in * out *
    bits / 8 and the scales. out: fp32 [rows, out] or [rows, F], not overlapping x. norm: fp32 [in],
    the weight of an RMSNorm of x, for fp32 x of up to NORM_MAX_ROWS rows and NORM_MAX_INPUTS
    inputs. The bits are the same as with a norm in a launch of its own. The operands are rounded to
    the weight's type, half to even (to infinity beyond fp16's range); sums are fp32. dependent:
    programmatic dependent launch; tiles of the weight are requested while the preceding launch
    still runs, everything else is accessed after its end. plan: for benchmarks, a plan to use in
    place of `float_plan`'s; results with different plans have different bits.

    A row has the same bits in any batch, and a row with NaN or infinite values does not affect
    others. Moves the weight once per 64 rows (per 32 of fp32 x where shared memory holds no more),
    x and out. Raises TypeError and ValueError that name the argument.
    """
    check_epilogue(epilogue)
    if isinstance(weight, WeightOnly):
        _check_quantised(weight)
        words, scale, zero, dtype = weight.words, weight.scale, weight.zero, torch.bfloat16
    else:
        check_tensor("weight", weight, DTYPES, None, None)
        words, scale, zero, dtype = weight, None, None, weight.dtype
    plan = plan or float_plan(weight, epilogue)
    _check(x, dtype, out, norm, eps, plan)
    check_same_device(
        x=x, weight=words, scale=scale, zero=zero, out=out, norm=norm, workspace=workspace.partials
    )
    rows = len(x)
    if rows == 0:
        return
    workspace.check(plan, rows)
    groups = plan.groups(rows, x.element_size())
    dependent, options = dependent_launch(dependent)
    grid = (-(-rows // (ROWS * groups)), plan.tiles, plan.splits)
    linear_kernel[grid](
        x, words, scale, zero, norm, out, workspace.partials, workspace.counters, rows, eps,
        **constants(plan, groups, norm is not None, epilogue),
        PDL=dependent, INTERPRETED=INTERPRETED,
        num_warps=plan.tile.num_warps, num_stages=plan.tile.num_stages, **options,
    )  # fmt: skip


def _check(
    x: Tensor, dtype: torch.dtype, out: Tensor, norm: Tensor | None, eps: float, plan: LinearPlan
) -> None:
    """Raise unless activations, result and norm fit the weight of `plan`."""
    if plan.out < 1 or plan.inputs < 1:
        raise ValueError(f"weight: shape [{plan.out}, {plan.inputs}], expected sizes above 0")
    if plan.gated and plan.out % 2:
        raise ValueError(f"weight: {plan.out} rows, expected an even number: gate, then up")
    check_tensor("x", x, (torch.float32, dtype), None, plan.inputs)
    width = plan.out // 2 if plan.gated else plan.out
    check_tensor("out", out, torch.float32, x.shape[0], width)
    if norm is None:
        return
    check_tensor("norm", norm, torch.float32, plan.inputs)
    check_tensor("x", x, torch.float32, None, plan.inputs)
    if len(x) > NORM_MAX_ROWS or plan.inputs > NORM_MAX_INPUTS:
        raise ValueError(
            f"norm: x is {tuple(x.shape)}, expected at most [{NORM_MAX_ROWS}, {NORM_MAX_INPUTS}]"
        )
    if not eps > 0:
        raise ValueError(f"eps: {eps}, expected a number above 0")


def _check_quantised(weights: WeightOnly) -> None:
    """Raise unless words, scales and zeros of a quantised weight fit each other."""
    if weights.bits not in (4, 8):
        raise ValueError(f"weights: {weights.bits} bits, expected 4 or 8")
    words = GROUP * weights.bits // WORD_BITS
    check_tensor("words", weights.words, torch.int16, None, None, words)
    groups, out, _ = weights.words.shape
    if (weights.zero is None) != (weights.bits == 8):
        raise ValueError("zero: expected for weights of 4 bits, and None for weights of 8 bits")
    if weights.zero is None:
        check_tensor("scale", weights.scale, torch.float32, out)
        return
    check_tensor("scale", weights.scale, torch.float32, groups, out)
    check_tensor("zero", weights.zero, torch.uint8, groups, out)


def constants(plan: LinearPlan, groups: int, norm: bool, epilogue: Epilogue) -> dict[str, Any]:
    """Return the constants that the kernel is compiled with, on any device."""
    return {
        "OUT": plan.out,
        "IN": plan.inputs,
        "BITS": plan.bits,
        "BLOCK_OUT": plan.tile.block_out,
        "BLOCK_WORDS": plan.tile.block_words,
        "SPLITS": plan.splits,
        "GROUPS": groups,
        "NORM_BLOCK": next_power_of_2(plan.inputs) if norm else 0,
        "EPILOGUE": int(epilogue),
    }


def variants(shape: DecoderShape, limits: GpuLimits = HOPPER) -> Iterator[Variant]:
    """Yield all variants that are launched to serve `shape` in bf16; for BitNet only the LM head.

    Quantised linears are compiled for one shape only. Those of other shapes, such as Qwen3-8B, have
    the same instructions, except for one split less in `down`.
    """
    linears = {"head": (shape.vocab, shape.hidden)}
    if shape.family is not Family.BITNET:
        linears |= shape.linears
    for step, (out, inputs) in linears.items():
        plan = plan_linear(out, inputs, 2, gated=step == "gate_up", limits=limits)
        yield from _variants(f"{shape.name}.{step} dense bf16", step, plan, "*bf16")
        for bits in (8, 4) if shape == LLAMA_8B and step != "head" else ():
            plan = plan_linear(out, inputs, 2, bits, gated=step == "gate_up", limits=limits)
            yield from _variants(f"{shape.name}.{step} int{bits}", step, plan, "*i16")


def _variants(name: str, step: str, plan: LinearPlan, weight_type: str) -> Iterator[Variant]:
    """Yield the variants of the linear `step` for batches of 1, 16 and 64 rows."""
    normed = step in _NORMED
    for rows, norm, dependent in (
        (1, normed, False),
        (1, normed, True),
        (16, False, False),
        (64, False, False),
    ):
        if rows == 16 and not normed:
            continue  # the same compilation as the variant of a batch of 1
        # With more rows the norm before the linear is a launch of its own, which stores bf16.
        x_bytes = 2 if normed and not norm else 4
        groups = plan.groups(rows, x_bytes)
        given = {
            "x_ptr": "*bf16" if x_bytes == 2 else "*fp32",
            "weight_ptr": weight_type,
            "scale_ptr": "*fp32" if plan.bits else None,
            "zero_ptr": "*u8" if plan.bits == 4 else None,
            "norm_ptr": "*fp32" if norm else None,
            "out_ptr": "*fp32",
            "partial_ptr": "*fp32",
            "counter_ptr": "*i32",
        }
        signature = {argument: kind for argument, kind in given.items() if kind}
        yield Variant(
            name=f"{name} rows={rows}" + " dependent" * dependent,
            kernel=linear_kernel,
            signature=signature | {"rows": "i32", "eps": "fp32"},
            constants=constants(plan, groups, norm, _EPILOGUES.get(step, Epilogue.STORE))
            | {argument: None for argument, kind in given.items() if not kind}
            | {"PDL": dependent, "INTERPRETED": False},
            divisible=frozenset(signature),
            num_warps=plan.tile.num_warps,
            num_stages=plan.tile.num_stages,
            programs=plan.tiles * plan.splits,
            launch_pdl=dependent,
            expects=("HGMMA", "LDGSTS.E.BYPASS.128"),
            bytes_moved=plan.bytes_moved(rows, x_bytes),
            step=step if rows == 1 and not dependent and step != "head" and not plan.bits else None,
            options=OPTIONS,
        )
