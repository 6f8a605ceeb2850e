"""The BitNet decoder on the CPU: fp32, one sequence at a time, with a KV cache.

A token's keys and values depend on the shapes that were multiplied to compute them, because
fp32 matrix products are not the same for every row count. Token-exact continuation therefore
fixes the shapes: a prompt goes through in chunks at absolute multiples of PREFILL_CHUNK_TOKENS
and every generated token goes through alone. Ternary layers are exact in any shape: sums of
int8 x ternary products are whole numbers, and below 2**24 fp32 holds them too.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from kernels.attention import causal_attention
from kernels.kv_cache import KvCache
from kernels.norm import rms_norm
from kernels.rope import apply_rope, rope_table
from kernels.sampler import Sampling, sample
from kernels.ternary import INT8_MAX, MIN_ABSMAX, unpack_ternary
from ledger.errors import ModelError, TooLarge
from origin.checkpoint import ModelConfig, read_config, read_tensors
from origin.model import Progress, fingerprint, prefill_chunks


class TernaryLinear:
    """One or more ternary layers of the same input, fused into one int8 product.

    Equals `kernels.ternary.ternary_linear` of each part bit for bit. Weights stay int8, a
    quarter of fp32: a decoded token reads all of them, and reading is what takes the time.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """parts: (packed uint8 [out / 4, in], scale [1]) of each fused layer, in output order."""
        unpacked = [unpack_ternary(packed) for packed, _ in parts]
        rows = torch.tensor([len(part) for part in unpacked])
        self._weight = torch.cat(unpacked).t()
        self._scale = torch.cat([scale.float() for _, scale in parts]).repeat_interleave(rows)
        self._int8_max = torch.tensor(float(INT8_MAX))

    def __call__(self, x: Tensor) -> Tensor:
        """fp32 [T, in] -> fp32 [T, out], with each row quantised to int8 by its absolute maximum.

        The oracle clamps to int8 after rounding; a row scaled by 127 / max never leaves it.
        """
        absmax = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True)
        # The oracle's 127 / absmax is this product in torch, and rounds as it does.
        factor = absmax.clamp_min_(MIN_ABSMAX).reciprocal_().mul_(self._int8_max)
        quantized = (x * factor).round_().to(torch.int8)
        # The only int8 product with int32 sums that torch has on CPUs; torchao rests on it too.
        return torch._int_mm(quantized, self._weight).div(factor).mul_(self._scale)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; norms are fp32 [size]."""

    input_norm: Tensor
    qkv: TernaryLinear
    attention_norm: Tensor
    output: TernaryLinear
    ffn_input_norm: Tensor
    gate_up: TernaryLinear
    ffn_norm: Tensor
    down: TernaryLinear


class BitNetModel:
    """A loaded checkpoint: prefill and decode move a KvCache, `logits` reads a hidden row.

    All calls are deterministic for the same thread count and fingerprint.
    """

    device = "cpu torch"

    def __init__(
        self, config: ModelConfig, tensors: dict[str, Tensor], fingerprint: str, progress: Progress
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self._embedding = tensors["model.embed_tokens.weight"].float()
        head = self._embedding if config.tied_head else tensors["lm_head.weight"].float()
        self._head = head
        self._final_norm = tensors["model.norm.weight"].float()
        self._cos, self._sin = rope_table(config.context, config.head_dim, config.rope_theta)
        self._layers = []
        for index in range(config.layers):
            self._layers.append(_layer(tensors, f"model.layers.{index}"))
            progress("unpack", index + 1, config.layers)

    def new_cache(self) -> KvCache:
        """An empty cache for one sequence of up to `config.context` tokens."""
        config = self.config
        return KvCache(config.layers, config.kv_heads, config.head_dim, config.context)

    @torch.inference_mode()
    def advance(self, ids: Sequence[int], cache: KvCache) -> Tensor:
        """Push T tokens after those in the cache; returns their final hidden rows, fp32 [T, H].

        The caller fixes T: a prefill chunk, or 1 for a generated token. Raises TooLarge when
        the context has no room for them.
        """
        start, end = cache.length, cache.length + len(ids)
        if end > cache.context:
            raise TooLarge(f"{end} tokens do not fit a context of {cache.context}")
        x = self._embedding[torch.tensor(ids)]
        cos, sin = self._cos[start:end], self._sin[start:end]
        for index, layer in enumerate(self._layers):
            x = x + self._attend(index, layer, x, cache, cos, sin)
            x = x + self._feed_forward(layer, x)
        cache.length = end
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden rows fp32 [T, H] -> fp32 [T, vocab]."""
        # [vocab, hidden] as it lies on disk: this product is a third as far from the true sums
        # as that with a transposed copy.
        return F.linear(rms_norm(hidden, self._final_norm, self.config.norm_eps), self._head)

    def sample(self, hidden: Tensor, sampling: Sampling, position: int) -> int:
        """The token that follows the last of these rows; see `kernels.sampler.sample`."""
        return sample(self.logits(hidden[-1:])[0], sampling, position)

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Logits fp32 [T, vocab] of a whole sequence, computed as a prompt would be."""
        cache = self.new_cache()
        chunks = [self.advance(chunk, cache) for chunk in prefill_chunks(ids)]
        return self.logits(torch.cat(chunks))

    def _attend(
        self, index: int, layer: Layer, x: Tensor, cache: KvCache, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config, eps = self.config, self.config.norm_eps
        heads, kv_heads = config.heads, config.kv_heads
        qkv = layer.qkv(rms_norm(x, layer.input_norm, eps))
        by_head = qkv.view(len(x), heads + 2 * kv_heads, config.head_dim)
        turned = apply_rope(by_head[:, : heads + kv_heads], cos, sin)
        keys, values = cache.extend(index, turned[:, heads:], by_head[:, heads + kv_heads :])
        mixed = causal_attention(turned[:, :heads], keys, values)
        return layer.output(rms_norm(mixed, layer.attention_norm, eps))

    def _feed_forward(self, layer: Layer, x: Tensor) -> Tensor:
        ffn, eps = self.config.ffn, self.config.norm_eps
        gate_up = layer.gate_up(rms_norm(x, layer.ffn_input_norm, eps))
        inner = gate_up[:, :ffn].relu().square_().mul_(gate_up[:, ffn:])
        return layer.down(rms_norm(inner, layer.ffn_norm, eps))


def load(directory: Path, progress: Progress = lambda *_: None) -> BitNetModel:
    """Read, check and unpack a checkpoint; see `origin.model.load_model`."""
    config = read_config(directory)
    progress("read", 0, 1)
    tensors = read_tensors(directory, config)
    # torch picks its CPU kernels by instruction set, and they differ in their last bits.
    capability = torch.backends.cpu.get_cpu_capability()
    identity = fingerprint(directory, _numeric_code(), platform.machine(), capability)
    progress("read", 1, 1)
    return BitNetModel(config, tensors, identity, progress)


def _layer(tensors: dict[str, Tensor], prefix: str) -> Layer:
    def norm(name: str) -> Tensor:
        return tensors[f"{prefix}.{name}.weight"].float()

    def linear(*names: str) -> TernaryLinear:
        stems = [f"{prefix}.{name}.weight" for name in names]
        try:
            return TernaryLinear([(tensors[stem], tensors[f"{stem}_scale"]) for stem in stems])
        except ValueError as exc:
            raise ModelError(str(exc), field=" or ".join(stems)) from exc

    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_norm=norm("self_attn.attn_sub_norm"),
        output=linear("self_attn.o_proj"),
        ffn_input_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        ffn_norm=norm("mlp.ffn_sub_norm"),
        down=linear("mlp.down_proj"),
    )


def _numeric_code() -> list[Path]:
    """The files that decide the bits of a result: this one and the oracles."""
    oracles = Path(kernels.__path__[0]).glob("*.py")
    return [Path(__file__), *(path for path in oracles if not path.stem.endswith("_triton"))]
