"""RMSNorm: what the CPU runs, and the oracle of the kernels, which no order of sums changes."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

FIXED_BITS = 20
"""Binary places of an element in `inverse_rms`; rows of up to 2**22 columns sum below 2**62."""
EXPONENT_BIAS = 126
"""Of fp32, where a number is a fraction in [1/2, 1) times a power of two."""
MIN_EXPONENT = -40
"""Rows whose largest value is smaller are scaled as if it were this power of two."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, then scale each column by `weight`.

    x: fp32 [..., H]. weight: fp32 [H]. eps is added to the mean square, not to its root.
    Returns fp32 [..., H]. Rows are independent of one another. Raises ValueError for a
    weight that does not fit.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    _check_weight(x, weight)
    # A mean is this sum and this quotient in torch too, which takes longer to say so.
    mean_square = (x * x).sum(-1, keepdim=True).div_(_number(x.shape[-1]))
    return weight * (x * mean_square.add_(_number(eps)).rsqrt_())


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x ** 2) + eps) of each row, the same bits in any order of summation.

    x: fp32 [..., H]. Returns fp32 [..., 1]; NaN for a row with NaN or infinite values. Each row
    is scaled by the power of two that brings its largest value into [2**19, 2**20), and rounded
    to whole numbers, half to even, whose squares are added as such. eps is above 0.
    """
    largest = x.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()
    _, exponent = torch.frexp(largest.where(finite, torch.tensor(1.0)))
    up = torch.ldexp(torch.ones_like(largest), FIXED_BITS - exponent.clamp(min=MIN_EXPONENT))
    whole = (x * up).where(finite, torch.tensor(0.0)).round().to(torch.int64)
    total = (whole * whole).sum(-1, keepdim=True).to(torch.float32)
    mean = total / x.shape[-1] + eps * up * up
    # torch's fp32 root on CPUs is not always the nearest; by way of float64 it is.
    root = mean.double().sqrt().float()
    return (up / root).where(finite, torch.tensor(torch.nan))


def order_free_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` by way of `inverse_rms`: what every kernel computes, bit for bit.

    The weight goes first: the products do not wait for the norm, and since rounding is monotonic
    the largest of them is the largest of the normed row.
    """
    _check_weight(x, weight)
    return weight * x * inverse_rms(x, eps)


@lru_cache(maxsize=64)
def _number(value: float) -> Tensor:
    """As a tensor: an operation with a Python number takes twice the time of one with this."""
    with torch.inference_mode(False):  # or none that is trained could use it
        return torch.tensor(value, dtype=torch.float32)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: shape {tuple(weight.shape)} does not fit {tuple(x.shape)}")
