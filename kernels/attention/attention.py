"""Causal attention over a KV cache in torch: the reference for kernels, and what CPUs run.

Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.1; grouped queries after
Ainslie et al., GQA, 2023. Query head h reads KV head h // (heads / kv_heads).
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention of the last T of N positions over all positions up to their own.

    q: fp32 [T, heads, D], the queries of positions N-T .. N-1. keys: fp32 [kv_heads, D, N],
    transposed. values: fp32 [kv_heads, N, D]. Returns fp32 [T, heads * D]. The bits of the result
    depend on T. Raises ValueError for shapes that do not fit.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, _, positions = keys.shape
    _check_shapes(q, keys, values)
    group = heads // kv_heads
    rows = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    rows = rows.reshape(kv_heads, group * tokens, head_dim)
    scores = torch.bmm(rows, keys).mul_(head_dim**-0.5)
    if tokens > 1:
        _hide_later_positions(scores.view(kv_heads * group, tokens, positions))
    mixed = torch.bmm(scores.softmax(-1), values).view(kv_heads, group, tokens, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(tokens, heads * head_dim)


def row_attention(q: Tensor, keys: Tensor, values: Tensor, scale: Tensor) -> Tensor:
    """Compute `causal_attention` of one position, for decoding, without checks.

    q: fp32 [kv_heads, heads / kv_heads, D]. keys, values: as in `causal_attention`. scale: fp32 [],
    D ** -0.5; it is a tensor, because torch takes twice as long to multiply by a Python number.
    Returns fp32 of q's shape.
    """
    scores = torch.bmm(q, keys).mul_(scale)
    return torch.bmm(scores.softmax(-1), values)


def _hide_later_positions(scores: Tensor) -> None:
    """Set the score of every position after a query's own to -inf, in place."""
    _, tokens, positions = scores.shape
    later = torch.ones(tokens, positions, dtype=torch.bool).triu_(positions - tokens + 1)
    scores.masked_fill_(later, -torch.inf)


def _check_shapes(q: Tensor, keys: Tensor, values: Tensor) -> None:
    tokens, heads, head_dim = q.shape
    kv_heads, key_dim, positions = keys.shape
    if key_dim != head_dim or heads % kv_heads or positions < tokens:
        raise ValueError(f"keys: shape {tuple(keys.shape)} does not fit q {tuple(q.shape)}")
    if values.shape != (kv_heads, positions, key_dim):
        raise ValueError(f"values: shape {tuple(values.shape)}, but keys {tuple(keys.shape)}")
