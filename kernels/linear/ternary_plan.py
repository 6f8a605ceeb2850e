"""Functions shared by the launches of ternary linears: checks, constants, and bytes moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tailrace.kernels.checks import check_tensor
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.shapes import DecoderShape, Family

ROWS_TYPES = {
    "q_ptr": "*i8",
    "factor_ptr": "*fp32",
    "packed_ptr": "*u8",
    "scale_ptr": "*fp32",
    "out_ptr": "*fp32",
    "rows": "i32",
}
"""Triton types of the run-time arguments of `ternary_gemm_kernel` and `ternary_rows_kernel`."""


def check_linear(
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    weights: TernaryWeights,
    out: Tensor,
    epilogue: Epilogue,
) -> int:
    """Check the arguments that all ternary linears have, and return the number of rows."""
    check_tensor(name, x, dtype, None, weights.in_features)
    columns = weights.out_features
    if epilogue is Epilogue.SWIGLU:
        raise ValueError("epilogue: SWIGLU, expected STORE, ADD or RELU2_GATE")
    if epilogue.gated:
        if len(weights.outs) != 2 or weights.outs[0] != weights.outs[1]:
            raise ValueError(
                f"weights: parts of {weights.outs} rows, expected two of equal size: gate and up"
            )
        columns = weights.outs[0]
    check_tensor("out", out, torch.float32, len(x), columns)
    return len(x)


def bitnet_linears(shape: DecoderShape) -> dict[str, tuple[tuple[int, ...], int, Epilogue]]:
    """Return (output rows of each part, inputs, epilogue) for each ternary linear of `shape`."""
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
    """Return the constants of a kernel that depend only on the weight and the epilogue."""
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
    """Return the bytes of weights, activations and results; `element`: bytes of an activation."""
    out = 4 * sum(outs) // (2 if epilogue.gated else 1)
    return width * sum(outs) // 4 + rows * (
        width * element + out * (2 if epilogue is Epilogue.ADD else 1)
    )
