"""Reference for linears of int8 weights and int8 activations (W8A8), such as the LM head.

Each weight row has a scale and each activation row a factor. The products are summed as integers,
so neither the order, nor a split, nor the batch changes a bit. int32 cannot overflow, because the
sum of at most 2**16 products of at most 127 * 128 is below 2**31.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.linear.row_slices import row_slices
from tailrace.kernels.linear.ternary import INT8_MAX, quantize_activations
from tailrace.kernels.rows.norm import order_free_rms_norm

MAX_IN = 2**16
"""Maximum inputs of a row, so that int32 sums cannot overflow: 2**16 * 127 * 128 < 2**31."""
MIN_SCALE = 1e-12
"""Minimum scale of a weight row. It avoids a division by zero for rows of zeros."""


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of a weight to int8, with a scale from its largest value.

    weight: bf16, fp16 or fp32 [out, in], finite, with up to MAX_IN inputs. Returns (int8 [out, in]
    of -127 .. 127, fp32 scale [out] = max |row| / 127) so that `int8 * scale` approximates the
    weight. Only a few rows at a time are converted to fp32, so that little additional memory is
    needed. Raises TypeError or ValueError.
    """
    check_tensor("weight", weight, (torch.bfloat16, torch.float16, torch.float32), None, None)
    if not 1 <= weight.shape[1] <= MAX_IN:
        raise ValueError(f"weight: in = {weight.shape[1]}, expected 1 to {MAX_IN}")
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), device=weight.device)
    for rows in row_slices(*weight.shape):
        real = weight[rows].float()
        if not bool(real.isfinite().all()):
            raise ValueError("weight: holds NaN or infinite values")
        scale[rows] = own = (real.abs().amax(1) / INT8_MAX).clamp(min=MIN_SCALE)
        codes[rows] = real.div(own[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes, scale


def int8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Quantise each row of `x`, normed first if `norm` is given, and multiply by int8 weights.

    x: fp32 [rows, in]. weight: int8 [out, in] with up to MAX_IN inputs. scale: fp32 [out]. norm:
    fp32 [in], the weight of an `order_free_rms_norm` of x. Returns fp32 [rows, out]: the integer
    sum, divided by the activations' factor, times the scale. A row with NaN or infinite values
    gives NaN. Raises TypeError or ValueError.
    """
    check_int8_weight(weight, scale)
    check_tensor("x", x, torch.float32, None, weight.shape[1])
    check_same_device(x=x, weight=weight, scale=scale, norm=norm)
    real = x if norm is None else order_free_rms_norm(x, norm, eps)
    quantised, factor = quantize_activations(real)
    # fp64 holds every sum exactly. Integer types would, too, but not all devices multiply integer
    # matrices.
    summed = torch.nn.functional.linear(quantised.double(), weight.double())
    return summed.float() / factor * scale


def check_int8_weight(weight: Tensor, scale: Tensor) -> None:
    """Raise TypeError or ValueError unless weight and scale are valid for `int8_linear`."""
    check_tensor("weight", weight, torch.int8, None, None)
    if not 1 <= weight.shape[1] <= MAX_IN:
        raise ValueError(f"weight: in = {weight.shape[1]}, expected 1 to {MAX_IN}")
    check_tensor("scale", scale, torch.float32, len(weight))
