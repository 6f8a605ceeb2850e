"""Random ternary weights for the tests of both ternary kernels, and what their rows should give."""

from __future__ import annotations

import torch
from torch import Tensor

from tailrace.kernels.linear.ternary import pack_ternary, ternary_linear
from tailrace.kernels.linear.ternary_weights import TernaryWeights


def make(outs: tuple[int, ...], width: int, device: torch.device) -> TernaryWeights:
    """Parts of -1, 0 and 1 with a bf16 scale each, of which no two are equal."""
    generator = torch.Generator().manual_seed(sum(outs) + width)
    parts = []
    for k, out in enumerate(outs):
        ternary = torch.randint(-1, 2, (out, width), generator=generator, dtype=torch.int8)
        scale = torch.tensor([0.3 + 0.7 * k], dtype=torch.bfloat16)
        parts.append((pack_ternary(ternary).to(device), scale.to(device)))
    return TernaryWeights.from_parts(parts)


def oracle(x: Tensor, weights: TernaryWeights) -> Tensor:
    """`ternary_linear` part by part, on the CPU."""
    results, start = [], 0
    for out, scale in zip(weights.outs, weights.scale.cpu(), strict=True):
        packed = weights.packed[start : start + out // 4].cpu()
        results.append(ternary_linear(x.cpu(), packed, scale))
        start += out // 4
    return torch.cat(results, 1)
