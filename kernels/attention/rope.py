"""Rotary position embedding, rotate-half as in Llama: the reference, which the CPU also runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.attention.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.rows.norm import order_free_rms_norm


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of a layer's query and key heads, after a norm of each head if the model has one.

    cos, sin: fp32 [context, D], from `rope_table`. q_norm, k_norm: fp32 [D], the weights of an
    RMSNorm of every head before its rotation (Qwen3), or both None. eps is above 0. Raises
    TypeError or ValueError.
    """

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_tensor("cos", self.cos, torch.float32, None, None)
        check_tensor("sin", self.sin, torch.float32, *self.cos.shape)
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm, k_norm: expected both or neither")
        for name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is not None:
                check_tensor(name, weight, torch.float32, self.cos.shape[1])
        if not self.eps > 0:
            raise ValueError(f"eps: {self.eps}, expected a number above 0")
        check_same_device(cos=self.cos, sin=self.sin, q_norm=self.q_norm, k_norm=self.k_norm)

    def turn(self, heads: Tensor, positions: Tensor, weight: Tensor | None) -> Tensor:
        """Norm heads, fp32 [T, heads, D], if `weight` is given; then rotate to positions [T].

        The result has the same bits as that of every kernel: two products, each rounded, and their
        sum. `apply_rope` is no reference for the kernels, since on some processors torch fuses one
        product with the sum.
        """
        normed = heads if weight is None else order_free_rms_norm(heads, weight, self.eps)
        swapped = normed.roll(heads.shape[-1] // 2, -1)
        cos, sin = self.cos[positions.long(), None], self.sin[positions.long(), None]
        return normed * cos + swapped * sin


def rope_table(
    positions: int, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the rotation factors of positions 0 .. positions-1, which a model needs only once.

    Returns (cos, sin), both fp32 [positions, head_dim]. Columns d and d + head_dim/2 rotate by the
    angle position * frequency d of `rope_frequencies`; both include YaRN's attention factor. The
    first half of sin is negated, so that a rotation swaps the halves of a head without a negation.
    Raises ValueError for an odd head_dim.

    Source: Su et al., RoFormer, 2021.
    """
    frequency = rope_frequencies(head_dim, theta, scaling)
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    magnitude = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    cos, sin = angle.cos() * magnitude, angle.sin() * magnitude
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return the frequency of each pair of dimensions in radians per position, fp32 [head_dim / 2].

    They are theta ** (-2d / head_dim), then scaled. The operations and their order are those of
    transformers, so that the tables are equal. Raises ValueError for an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: {head_dim}, expected an even number")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelength = theta**exponent
    match scaling:
        case None:
            return 1.0 / wavelength
        case LinearScaling():
            return 1.0 / wavelength / scaling.factor
        case Llama3Scaling():
            return _llama3_frequencies(1.0 / wavelength, scaling)
        case YarnScaling():
            first, last = scaling.ramp(head_dim, theta)
            pair = torch.arange(head_dim // 2, dtype=torch.float32)
            unscaled = 1 - ((pair - first) / (last - first)).clamp(0, 1)
            scaled = 1.0 / (scaling.factor * wavelength)
            return scaled * (1 - unscaled) + 1.0 / wavelength * unscaled


def _llama3_frequencies(frequency: Tensor, scaling: Llama3Scaling) -> Tensor:
    period = 2 * math.pi / frequency
    slow = period > scaling.original_context / scaling.low_turns
    fast = period < scaling.original_context / scaling.high_turns
    turns = scaling.original_context / period
    blend = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    between = (1 - blend) * frequency / scaling.factor + blend * frequency
    return torch.where(slow, frequency / scaling.factor, torch.where(fast, frequency, between))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of every token by the angles of its position.

    x: fp32 [T, heads, D]. cos, sin: fp32 [T, D], the rows of `rope_table` for those T positions.
    Returns fp32 [T, heads, D]. Raises ValueError if cos or sin has another shape.
    """
    tokens, _, head_dim = x.shape
    if cos.shape != (tokens, head_dim) or sin.shape != cos.shape:
        raise ValueError(f"cos, sin: shape {tuple(cos.shape)} does not fit {tuple(x.shape)}")
    swapped = x.roll(head_dim // 2, -1)
    return torch.addcmul(x * cos[:, None], swapped, sin[:, None])
