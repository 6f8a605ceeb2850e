"""Squared ReLU on the CPU: the oracle of the kernel in activation_triton."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.ternary import quantize_activations
from kernels.rows.norm import order_free_rms_norm


def relu2_gate(gate_up: Tensor) -> Tensor:
    """max(gate, 0) ** 2 * up: fp32 [..., 2 F], gate before up -> fp32 [..., F].

    Source: So et al., Primer, 2021, for the square; Ma et al., BitNet b1.58 2B4T, 2025, for the
    gate.
    """
    gate, up = halves(gate_up)
    return gate.relu().square() * up


def relu2_gate_norm_int8(gate_up: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`relu2_gate`, normed and quantised: fp32 [..., 2 F] -> (int8 [..., F], fp32 [...]).

    A row with NaN or infinite values has the factor NaN and zeros.
    """
    quantised, factor = quantize_activations(order_free_rms_norm(relu2_gate(gate_up), weight, eps))
    return quantised.nan_to_num(nan=0.0).to(torch.int8), factor.squeeze(-1)


def halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up; raises ValueError for an odd number of columns."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: {gate_up.shape[-1]} columns, expected gate and up of one size")
    gate, up = gate_up.chunk(2, -1)
    return gate, up
