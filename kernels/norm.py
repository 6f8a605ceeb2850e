"""RMSNorm: the oracle, and what the CPU runs."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square, then scale each column by `weight`.

    x: fp32 [..., H]. weight: fp32 [H]. eps is added to the mean square, not to its root.
    Returns fp32 [..., H]. Rows are independent of one another. Raises ValueError for a
    weight that does not fit.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: shape {tuple(weight.shape)} does not fit {tuple(x.shape)}")
    mean_square = (x * x).mean(-1, keepdim=True)
    return weight * (x * mean_square.add_(eps).rsqrt_())
