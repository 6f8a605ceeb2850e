"""The decoder layers of every family on the CPU, in fp32, for any batch of pieces.

Linears and norms take all rows of a batch at once, since theirs do not depend on one another.
Attention takes each row of decoding, and each prefill chunk, by itself: then the shapes that are
multiplied follow from the sequence's own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention.attention import causal_attention, row_attention
from kernels.attention.kv_cache import KvCache, Place
from kernels.rows.norm import rms_norm
from kernels.shapes import PAGE_TOKENS, Family
from origin.checkpoint.model_config import ModelConfig
from origin.models.cpu_linear import FloatLinear, TernaryLinear
from origin.models.layer_tensors import LayerTensors

Linear = TernaryLinear | FloatLinear


@dataclass(frozen=True, slots=True)
class Span:
    """One piece's rows in a batch."""

    rows: range
    place: Place
    lengths: range
    """Positions that each row attends to, its own included."""
    prefill: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What the layers need of the pieces besides their hidden rows."""

    cos: Tensor
    """fp32 [T, 1, head_dim], as is sin; see `kernels.attention.rope.rope_table`."""
    sin: Tensor
    slots: Tensor
    """int64 [T]: where the keys and values of each row go."""
    spans: Sequence[Span]


def attends_in_place(config: ModelConfig) -> bool:
    """Whether keys and values that lie among others give the bits that a copy of them gives.

    No BLAS promises it, so it is tried out: page ids must not matter.
    """
    random = torch.Generator().manual_seed(1)
    cache = KvCache(1, 4, config.kv_heads, config.head_dim)
    size = 2 * config.kv_heads, config.head_dim
    slots = torch.arange(cache.pages * PAGE_TOKENS)
    cache.write(0, slots, torch.randn(len(slots), *size, generator=random))
    q = torch.randn(5, config.heads, config.head_dim, generator=random)
    row = q[0].view(config.kv_heads, -1, config.head_dim)
    pages, scale = torch.tensor([1, 2, 3]), torch.tensor(config.head_dim**-0.5)
    for length in (5, 63, 64, 65, 100, 192):
        lying, copied = cache.read(0, 1, length), cache.read(0, pages, length)
        alike = torch.equal(
            row_attention(row, *lying, scale), row_attention(row, *copied, scale)
        ) and torch.equal(causal_attention(q, *lying), causal_attention(q, *copied))
        if not alike:
            return False
    return True


class CpuLayer:
    """One decoder layer; moves hidden rows and writes their keys and values."""

    def __init__(self, index: int, config: ModelConfig, parts: LayerTensors[Linear]) -> None:
        self._index = index
        self._parts = parts
        self._eps = config.norm_eps
        self._ffn = config.ffn
        self._squared_relu = config.family is Family.BITNET
        self._heads, self._kv_heads = config.heads, config.kv_heads
        self._head_dim = config.head_dim
        self._turned = config.heads + config.kv_heads
        self._scale = torch.tensor(config.head_dim**-0.5)

    def __call__(self, x: Tensor, cache: KvCache, batch: Batch) -> Tensor:
        """fp32 [T, hidden] -> fp32 [T, hidden]."""
        parts, eps = self._parts, self._eps
        qkv = parts.qkv(rms_norm(x, parts.input_norm, eps)).view(len(x), -1, self._head_dim)
        mixed = self._attend(self._turn(qkv, batch), cache, batch)
        if parts.attention_norm is not None:
            mixed = rms_norm(mixed, parts.attention_norm, eps)
        x = x + parts.output(mixed)
        inner = self._activate(parts.gate_up(rms_norm(x, parts.ffn_input_norm, eps)))
        if parts.ffn_norm is not None:
            inner = rms_norm(inner, parts.ffn_norm, eps)
        return parts.down(inner).add_(x)

    def _turn(self, qkv: Tensor, batch: Batch) -> Tensor:
        """fp32 [T, heads + 2 kv_heads, D], its query and key heads turned to their positions.

        Products and a sum, each rounded: a fused operation is fused for whole vectors only, and
        so would round a row's last elements by the size of the batch.
        """
        parts, heads = self._parts, self._heads
        turned = qkv[:, : self._turned]
        if parts.q_norm is not None and parts.k_norm is not None:
            query = rms_norm(turned[:, :heads], parts.q_norm, self._eps)
            turned = torch.cat((query, rms_norm(turned[:, heads:], parts.k_norm, self._eps)), 1)
        swapped = turned.roll(self._head_dim // 2, -1).mul_(batch.sin)
        torch.add(turned * batch.cos, swapped, out=qkv[:, : self._turned])
        return qkv

    def _attend(self, qkv: Tensor, cache: KvCache, batch: Batch) -> Tensor:
        """fp32 [T, heads + 2 kv_heads, D] -> fp32 [T, heads * D]."""
        cache.write(self._index, batch.slots, qkv[:, self._heads :])
        # All that one KV head serves lies together: [T, kv_heads, heads / kv_heads, D].
        queries = qkv[:, : self._heads].view(len(qkv), self._kv_heads, -1, self._head_dim)
        mixed: list[Tensor] = []
        for span in batch.spans:
            keys, values = cache.read(self._index, span.place, span.lengths[-1])
            if span.prefill:
                own = qkv[span.rows.start : span.rows.stop, : self._heads]
                chunk = causal_attention(own, keys, values)
                mixed.append(chunk.view(-1, *queries.shape[2:]))
            elif len(span.rows) == 1:
                mixed.append(row_attention(queries[span.rows[0]], keys, values, self._scale))
            else:
                mixed += [
                    row_attention(queries[row], keys[..., :length], values[:, :length], self._scale)
                    for row, length in zip(span.rows, span.lengths, strict=True)
                ]
        return (torch.cat(mixed) if len(mixed) > 1 else mixed[0]).view(len(qkv), -1)

    def _activate(self, gate_up: Tensor) -> Tensor:
        """fp32 [T, 2 ffn], gate before up -> fp32 [T, ffn]."""
        gate, up = gate_up[:, : self._ffn], gate_up[:, self._ffn :]
        if self._squared_relu:
            return gate.relu().square_().mul_(up)
        return F.silu(gate).mul_(up)
