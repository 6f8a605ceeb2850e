"""RMSNorm in torch: a version for CPUs, and the reference for kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

FIXED_BITS = 20
"""Bits of the largest element of a row as an integer in `inverse_rms`. A square has at most 40
bits, so the sum of a row of up to 2**22 columns is at most 2**62."""
EXPONENT_BIAS = 126
"""Exponent bias of fp32 if the fraction is taken to be in [1/2, 1), as `frexp` does."""
MIN_EXPONENT = -40
"""Minimum exponent of a row's largest value in `inverse_rms`. Rows of smaller values are scaled as
if their largest value had this exponent."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, then multiply each column by `weight`.

    x: fp32 [..., H]. weight: fp32 [H]. eps is added to the mean square, not to its root. Returns
    fp32 [..., H]. Rows do not affect each other. Raises ValueError for a weight that does not fit.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    _check_weight(x, weight)
    # `mean` would compute the same sum and quotient, but with more overhead.
    mean_square = (x * x).sum(-1, keepdim=True).div_(_number(x.shape[-1]))
    return weight * (x * mean_square.add_(_number(eps)).rsqrt_())


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x ** 2) + eps) of each row; its bits do not depend on summation order.

    x: fp32 [..., H]. Returns fp32 [..., 1]; NaN for a row with NaN or infinite values. Each row
    is scaled by the power of two that brings its largest value into [2**19, 2**20), and rounded
    to integers, half to even, whose squares are summed exactly. eps is above 0.
    """
    largest = x.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    _, exponent = torch.frexp(largest.where(finite, torch.tensor(1.0)))
    up = torch.ldexp(torch.ones_like(largest), FIXED_BITS - exponent.clamp(min=MIN_EXPONENT))
    whole = (x * up).where(finite, torch.tensor(0.0)).round().to(torch.int64)
    total = (whole * whole).sum(-1, keepdim=True).to(torch.float32)
    mean = total / x.shape[-1] + eps * up * up
    # torch's fp32 square root on CPUs is not always correctly rounded. Computed in float64 and then
    # rounded to fp32, it is.
    root = mean.double().sqrt().float()
    return (up / root).where(finite, torch.tensor(torch.nan))


def order_free_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` with the bits that every kernel gives, using `inverse_rms`.

    Each element is multiplied by its weight first. So kernels can compute the products before the
    norm is known. Since rounding is monotonic, the largest product also gives the largest value of
    the normed row, which int8 quantisation needs.
    """
    _check_weight(x, weight)
    return weight * x * inverse_rms(x, eps)


@lru_cache(maxsize=64)
def _number(value: float) -> Tensor:
    """Return a number as a tensor; operations with Python numbers take twice as long."""
    with torch.inference_mode(False):  # autograd does not accept inference tensors
        return torch.tensor(value, dtype=torch.float32)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: shape {tuple(weight.shape)} does not fit {tuple(x.shape)}")
