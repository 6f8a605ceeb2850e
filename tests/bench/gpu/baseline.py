"""The baseline that kernels are compared with: a bf16 Llama decode step in plain torch, compiled.

One row per sequence, static KV cache, fused query-key-value and gate-up products, scaled dot
product attention with grouped queries; `torch.compile` makes kernels of it, and the bench
captures it in a CUDA graph as it does ours. Nothing in it is batch-invariant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tailrace.kernels.attention.rope import rope_table
from tailrace.kernels.shapes import DecoderShape

DTYPE = torch.bfloat16


def _random(size: tuple[int, ...], device: torch.device, scale: float = 1.0) -> Tensor:
    return torch.randn(size, dtype=DTYPE, device=device).mul_(scale)


class Block(nn.Module):
    """One layer; keys and values are bf16 [rows, kv_heads, context, D]."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norms: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, shape: DecoderShape, rows: int, context: int, device: torch.device) -> None:
        super().__init__()
        self._shape = shape
        for name, size in shape.linears.items():
            self.register_buffer(name, _random(size, device, size[1] ** -0.5))
        self.register_buffer("norms", torch.ones(2, shape.hidden, dtype=DTYPE, device=device))
        cached = (rows, shape.kv_heads, context, shape.head_dim)
        self.register_buffer("keys", _random(cached, device))
        self.register_buffer("values", _random(cached, device))

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + F.linear(self._attend(self._norm(x, self.norms[0]), position, cos, sin), self.o)
        gate, up = F.linear(self._norm(x, self.norms[1]), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._shape.norm_eps)

    def _attend(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, rows = self._shape, x.shape[0]
        sizes = [shape.queries, shape.keys, shape.keys]
        queries, keys, values = torch.split(F.linear(x, self.qkv), sizes, -1)
        query = self._turn(queries.view(rows, shape.heads, 1, shape.head_dim), cos, sin)
        key = self._turn(keys.view(rows, shape.kv_heads, 1, shape.head_dim), cos, sin)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, values.view_as(key))
        seen = torch.arange(self.keys.shape[2], device=x.device) <= position
        mixed = F.scaled_dot_product_attention(
            query, self.keys, self.values, attn_mask=seen[None, None, None], enable_gqa=True
        )
        return mixed.reshape(rows, shape.queries)

    @staticmethod
    def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Llama(nn.Module):
    """All layers, the head and the choice of the best id: int64 [rows] -> int64 [rows]."""

    table: Tensor
    norm: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: DecoderShape, rows: int, context: int, device: torch.device) -> None:
        super().__init__()
        self._blocks = [Block(shape, rows, context, device) for _ in range(shape.layers)]
        self._shape = shape
        size = (shape.vocab, shape.hidden)
        self.register_buffer("table", _random(size, device, shape.hidden**-0.5))
        self.register_buffer("norm", torch.ones(shape.hidden, dtype=DTYPE, device=device))
        cos, sin = rope_table(context, shape.head_dim, shape.rope_theta)
        self.register_buffer("cos", cos.to(device, DTYPE))
        self.register_buffer("sin", sin.to(device, DTYPE))

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        x = self.table[ids]
        cos, sin = self.cos[position], self.sin[position]
        for block in self._blocks:
            x = block(x, position, cos, sin)
        x = F.rms_norm(x, (x.shape[-1],), self.norm, self._shape.norm_eps)
        return F.linear(x, self.table).argmax(-1)


@torch.inference_mode()
def compiled_step(
    shape: DecoderShape, rows: int, context: int, device: torch.device, fake: bool
) -> Callable[[], None]:
    """Return a call that decodes one token of `rows` sequences at the end of a full context."""
    model = Llama(shape, rows, context, device)
    step = model if fake else torch.compile(model, fullgraph=True, dynamic=False)
    ids = torch.zeros(rows, dtype=torch.int64, device=device)
    position = torch.tensor([context - 1], device=device)

    @torch.inference_mode()
    def run() -> None:
        ids.copy_(step(ids, position))

    return run
