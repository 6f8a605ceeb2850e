"""Rotary position embedding, rotate-half as in Llama: the oracle, and what the CPU runs."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """The factors for positions 0 .. positions-1, computed once when a model loads.

    Returns (cos, sin), both fp32 [positions, head_dim]. Columns d and d + head_dim/2 turn by
    the angle position * theta ** (-2d / head_dim). The first half of sin is negated, so that
    `apply_rope` swaps the halves and never negates. Raises ValueError for an odd head_dim.

    Source: Su et al., RoFormer, 2021.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: {head_dim} is odd")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequency = 1.0 / (theta**exponent)
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of every token by the angles of its position.

    x: fp32 [T, heads, D]. cos, sin: fp32 [T, D], the rows of `rope_table` for those T
    positions. Returns fp32 [T, heads, D]. Raises ValueError for factors that do not fit.
    """
    tokens, _, head_dim = x.shape
    if cos.shape != (tokens, head_dim) or sin.shape != cos.shape:
        raise ValueError(f"cos, sin: shape {tuple(cos.shape)} does not fit {tuple(x.shape)}")
    swapped = x.roll(head_dim // 2, -1)
    return torch.addcmul(x * cos[:, None], swapped, sin[:, None])
