"""The demo model for training: BitNet b1.58 with a straight-through estimator.

The forward pass computes what the exported checkpoint will compute: ternary weights times a
bf16 scale, int8 activations, bf16 norms and embeddings. Gradients ignore the rounding, and are
applied to fp32 weights, from which the ternary ones are rounded (the latent weights).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tailrace.kernels.attention.rope import rope_table
from tailrace.kernels.linear.ternary import quantize_absmean, quantize_activations


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are those of the committed checkpoint."""

    vocab: int = 1024
    hidden: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 3
    ffn: int = 512
    context: int = 1024
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class _Through(torch.autograd.Function):
    """Straight-through estimator: a rounded value, whose gradient goes to the unrounded one."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _through(value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    passed: torch.Tensor = _Through.apply(value, rounded)  # type: ignore[no-untyped-call]
    return passed


def round_weight(w: torch.Tensor) -> torch.Tensor:
    """Round a latent weight to ternary values times a bf16 scale."""
    ternary, scale = quantize_absmean(w.detach())
    return _through(w, ternary.float() * scale.bfloat16().float())


def round_activation(x: torch.Tensor) -> torch.Tensor:
    """Quantise an activation to int8 and scale it back to fp32."""
    quantized, factor = quantize_activations(x.detach())
    return _through(x, quantized / factor)


def round_bf16(w: torch.Tensor) -> torch.Tensor:
    """Round a parameter to bf16, the type in which the checkpoint stores it."""
    return _through(w, w.detach().bfloat16().float())


class Ternary(nn.Module):
    """A linear layer without bias whose weight is rounded to ternary in every forward pass.

    Inputs are expected to be rounded already (`round_activation`): layers that read the same
    activation share that work.
    """

    def __init__(self, fan_in: int, fan_out: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) * gain * fan_in**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, round_weight(self.weight))


class Norm(nn.Module):
    """RMSNorm whose weight is rounded to bf16."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return round_bf16(self.weight) * scaled


Rope = tuple[torch.Tensor, torch.Tensor]


def rotate(x: torch.Tensor, tables: Rope) -> torch.Tensor:
    """Apply rotary position embedding to `x` [..., length, head_dim]."""
    return x * tables[0] + x.roll(x.shape[-1] // 2, -1) * tables[1]


class Attention(nn.Module):
    """Causal grouped-query attention with a norm before its output projection."""

    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head_dim
        self.q_proj = Ternary(shape.hidden, shape.hidden)
        self.k_proj = Ternary(shape.hidden, kv)
        self.v_proj = Ternary(shape.hidden, kv)
        self.o_proj = Ternary(shape.hidden, shape.hidden, gain)
        self.attn_sub_norm = Norm(shape.hidden, shape.norm_eps)

    def forward(self, x: torch.Tensor, tables: Rope) -> torch.Tensor:
        batch, length, _ = x.shape
        x = round_activation(x)

        def heads(projection: Ternary) -> torch.Tensor:
            split: torch.Tensor = projection(x).view(batch, length, -1, self.shape.head_dim)
            return split.transpose(1, 2)

        query, key = rotate(heads(self.q_proj), tables), rotate(heads(self.k_proj), tables)
        groups = self.shape.heads // self.shape.kv_heads
        mixed = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=1),
            heads(self.v_proj).repeat_interleave(groups, dim=1),
            is_causal=True,
        )
        mixed = self.attn_sub_norm(mixed.transpose(1, 2).reshape(batch, length, -1))
        projected: torch.Tensor = self.o_proj(round_activation(mixed))
        return projected


class Mlp(nn.Module):
    """Gated squared-ReLU feed-forward with a norm before its down projection."""

    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        self.gate_proj = Ternary(shape.hidden, shape.ffn)
        self.up_proj = Ternary(shape.hidden, shape.ffn)
        self.down_proj = Ternary(shape.ffn, shape.hidden, gain)
        self.ffn_sub_norm = Norm(shape.ffn, shape.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = round_activation(x)
        gated = self.ffn_sub_norm(F.relu(self.gate_proj(x)).square() * self.up_proj(x))
        projected: torch.Tensor = self.down_proj(round_activation(gated))
        return projected


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        gain = (2 * shape.layers) ** -0.5
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, gain)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape, gain)

    def forward(self, x: torch.Tensor, tables: Rope) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables)
        mixed: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class Net(nn.Module):
    """The whole network; its parameters have the checkpoint's names without the prefix `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=shape.hidden**-0.5)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [batch, length, vocab] for token ids [batch, length]."""
        table = round_bf16(self.embed_tokens.weight)
        x = F.embedding(ids, table)
        tables = rope_table(ids.shape[1], self.shape.head_dim, self.shape.rope_theta)
        for layer in self.layers:
            x = layer(x, tables)
        return F.linear(self.norm(x), table)

    def ternary_weights(self) -> dict[str, nn.Parameter]:
        """Return by name the latent weights that the export rounds to ternary values."""
        return {
            f"{name}.weight": module.weight
            for name, module in self.named_modules()
            if isinstance(module, Ternary)
        }
